"""Every schedule's messages complete without any buffer; orders that only buffers save are refused, with the ranks that
wait for each other."""

import itertools
import re
import time

import pytest

from stepgraph.graph.step_graph import Call, Kind
from stepgraph.parallel.pipeline import messages
from stepgraph.parallel.pipeline.messages import calls_of, check_messages, message_of
from stepgraph.parallel.pipeline.schedules import SCHEDULES, check_schedule, with_once, work_of
from stepgraph.parallel.pipeline.timeline import PipelineTime, Span
from tests.parallel.pipeline.orders import begun_early, one_way_for_both, ranks_of

NEVER = "^the pipeline's messages never complete: rank "


def counts(name, ranks, most=33):
    """The numbers of microbatches that a schedule runs."""
    for n in range(ranks, most):
        try:
            check_schedule(name, ranks, n)
        except ValueError:
            continue
        yield n


@pytest.mark.parametrize("ranks", (2, 3, 4, 8))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_completes(name, ranks):
    where, found = ranks_of(name, ranks), list(counts(name, ranks))
    for n in found:
        orders = work_of(name, ranks, n)
        calls = calls_of(with_once(orders, {0}, {len(where) - 1}), where)
        check_messages(calls, where)
        if (name, n) != ("interleaved", 2 * ranks - 1):  # which completes in any order
            with pytest.raises(ValueError, match=NEVER):
                check_messages(begun_early(orders, where), where, lambda channel: channel)  # one for each kind too
        sent = [[m for call in own if (m := message_of(call, where))] for own in calls]
        assert sum(map(len, sent)) == 4 * n * sum(a != b for a, b in itertools.pairwise(where))
    assert len(found) > 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_communicator_for_both_directions_never_ends(name):
    where = ranks_of(name, 4)
    for symmetric in (False, True):
        with pytest.raises(ValueError, match=r"never complete|cross"):
            check_messages(calls_of(work_of(name, 4, 8), where, symmetric), where, one_way_for_both)


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_alone_completes(name):
    where = ranks_of(name, 4)
    orders = [[Call(Kind.FORWARD, stage, 0) for stage, rank in enumerate(where) if rank == own] for own in range(4)]
    check_messages(calls_of(orders, where), where)


def test_calls_are_checked_where_they_are_made(monkeypatch):
    """Whatever places receives: here all of them before the first computation."""
    at_once = [Span(rank, work, 0.0, 0.0) for rank, order in enumerate(work_of("1f1b", 2, 4)) for work in order]
    monkeypatch.setattr(messages, "on_paper", lambda orders, where: PipelineTime(at_once, 2))
    with pytest.raises(ValueError, match=NEVER):
        calls_of(work_of("1f1b", 2, 4), [0, 1])


def test_the_ranks_that_wait_for_each_other_are_named():
    orders, where = work_of("1f1b", 2, 4), [0, 1]
    with pytest.raises(ValueError, match=NEVER) as error:
        check_messages(begun_early(orders, where), where)
    found = re.findall(
        r"rank (\d) waits in (\S+) of microbatch (\d) until rank (\d) meets its (\S+) of", str(error.value)
    )
    assert found == [
        ("0", "forward.0", "1", "1", "receive_backward.0"),
        ("1", "backward.1", "0", "0", "receive_forward.1"),
    ]
    assert "\n" not in str(error.value)


def changed(change):
    """The calls of 1f1b on two ranks after ``change`` of those of rank 1."""
    calls = calls_of(work_of("1f1b", 2, 2), [0, 1])
    return [calls[0], change(calls[1])]


def test_a_message_that_is_never_sent_is_named():
    calls = changed(lambda own: [call for call in own if call != Call(Kind.SEND_BACKWARD, 1, 1)])
    with pytest.raises(ValueError, match=r"receive_backward.0 of microbatch 1; rank 1 has ended; change"):
        check_messages(calls, [0, 1])


def test_messages_that_cross_are_named():
    def swap(own):
        at, to = (own.index(Call(Kind.RECEIVE_FORWARD, 1, k)) for k in (0, 1))
        own[at], own[to] = own[to], own[at]
        return own

    with pytest.raises(ValueError, match=r"cross: .*send_forward.0 of microbatch 0.*receive_forward.1 of microbatch 1"):
        check_messages(changed(swap), [0, 1])


def test_a_receive_is_posted_when_its_message_has_been_sent():
    """Before the next computation, not before the one that makes it."""
    calls = calls_of(work_of("1f1b", 2, 4), [0, 1])
    assert [str(call) for call in calls[0][:6]] == [
        "forward.0 of microbatch 0",
        "send_forward.0 of microbatch 0",
        "forward.0 of microbatch 1",
        "send_forward.0 of microbatch 1",
        "receive_backward.0 of microbatch 0",
        "backward.0 of microbatch 0",
    ]
    # Rank 1 runs forward 0, backward 0, forward 1, whose message is sent when forward 0 ends.
    assert calls[1].index(Call(Kind.RECEIVE_FORWARD, 1, 1)) == calls[1].index(Call(Kind.BACKWARD, 1, 0)) - 1


def test_the_check_is_quick():
    orders, where = work_of("zbv", 16, 64), ranks_of("zbv", 16)
    start = time.process_time()
    calls_of(orders, where)
    assert time.process_time() - start < 2
