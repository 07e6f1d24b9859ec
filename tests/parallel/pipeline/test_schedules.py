"""The calls of a pipeline's ranks, run on paper: nothing waits for ever, nothing is lost or out of order."""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.graph.step_graph import Call, Kind
from stepgraph.parallel.pipeline.layout import check_split
from stepgraph.parallel.pipeline.messages import calls_of
from stepgraph.parallel.pipeline.schedules import SCHEDULES, check_schedule, rank_of, with_once, work_of


def ranks_of(name, ranks):
    schedule = SCHEDULES[name]
    return [rank_of(schedule, ranks, stage) for stage in range(ranks * schedule.chunks)]


def run(calls, where):
    """Run all ranks' calls, each as soon as what it reads is there; the calls in the order in which they ran."""
    queues = [deque(own) for own in calls]
    channels = defaultdict(deque)
    arrived, done = set(), []
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue and ready(queue[0], rank, where, arrived):
                call = queue.popleft()
                done.append((rank, call))
                moved = True
                if call.kind.sends:
                    to = call.stage + (1 if call.kind.forward else -1)
                    channels[call.kind.forward, rank, where[to]].append((to, call.microbatch))
                elif call.computes:
                    arrived.add(call)
            # What is sent goes to the receive that was begun next, in the channel's order.
            for (forward, sender, receiver), messages in channels.items():
                begun = [c for r, c in done if r == receiver and c.kind.receives and c.kind.forward == forward]
                begun = [c for c in begun if where[c.stage - (1 if forward else -1)] == sender]
                for sent, call in zip(messages, begun, strict=False):
                    assert sent == (call.stage, call.microbatch)
                    if call not in arrived:
                        arrived.add(call)
                        moved = True
    assert not any(queues), [queue[0] for queue in queues if queue]
    return done


def ready(call, rank, where, arrived):
    kind, stage, microbatch = call
    if not call.computes:
        return True
    if kind is Kind.BACKWARD_WEIGHT:
        return Call(Kind.BACKWARD_INPUT, stage, microbatch) in arrived
    source = stage + (-1 if kind.forward else 1)
    own = kind.forward or Call(Kind.FORWARD, stage, microbatch) in arrived
    if not 0 <= source < len(where):
        return own
    if where[source] == rank:
        makers = (kind,) if kind.forward else (kind, Kind.BACKWARD_INPUT)
        return own and any(Call(made, source, microbatch) in arrived for made in makers)
    return own and Call(kind.receive, stage, microbatch) in arrived


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 5), st.integers(0, 6))
def test_all_ranks_come_to_the_end(name, ranks, more):
    microbatches = ranks * SCHEDULES[name].fewest + more
    try:
        check_schedule(name, ranks, microbatches)
    except ValueError:
        return
    where, orders = ranks_of(name, ranks), work_of(name, ranks, microbatches)
    calls = calls_of(orders, where)
    done = run(calls, where)
    kinds = ("forward", "backward_input", "backward_weight") if SCHEDULES[name].halves else ("forward", "backward")
    for stage in range(len(where)):
        for kind in kinds:  # sums over microbatches are those of one rank only in their order
            order = [call.microbatch for _, call in done if call[:2] == (kind, stage)]
            assert order == list(range(microbatches)), (kind, stage)
    assert len(done) == len(set(done))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(0, 4), st.data())
def test_what_is_done_once_is_done_around_a_stage(name, ranks, more, data):
    microbatches = ranks * (SCHEDULES[name].fewest + more)
    where, orders = ranks_of(name, ranks), work_of(name, ranks, microbatches)
    some = st.sets(st.integers(0, len(where) - 1))
    chosen = {"gather": data.draw(some), "reduce": data.draw(some)}
    calls = calls_of(with_once(orders, *chosen.values()), where)
    for stage, rank in enumerate(where):
        graphs = [call.graph for call in calls[rank]]
        computed = [
            i for i, graph in enumerate(graphs) if graph[:4] in ("forw", "back") and graph.endswith(f".{stage}")
        ]
        for kind, stages in chosen.items():
            assert graphs.count(f"{kind}.{stage}") == (stage in stages)
        assert stage not in chosen["gather"] or calls[rank].index(Call(Kind.GATHER, stage)) < computed[0]
        assert stage not in chosen["reduce"] or calls[rank].index(Call(Kind.REDUCE, stage)) > computed[-1]
    run([[call for call in own if call.microbatch is not None] for own in calls], where)


@pytest.mark.parametrize("name", SCHEDULES)
def test_too_few_microbatches_are_refused_with_a_number_that_works(name):
    with pytest.raises(ValueError, match=r"accumulate=1 is too small .*pp=4.*--accumulate \d+$") as error:
        check_schedule(name, 4, 1)
    check_schedule(name, 4, int(str(error.value).split()[-1]))
    with pytest.raises(ValueError, match=r"unknown schedule '1fb1'.*1f1b"):
        check_schedule("1fb1", 4, 4)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["interleaved", "zero-bubble"]), st.integers(2, 6), st.integers(0, 30))
def test_microbatches_that_make_no_rounds_are_refused_with_a_number_that_works(name, ranks, more):
    try:
        check_schedule(name, ranks, ranks + more)
    except ValueError as error:
        assert "\n" not in str(error)
        check_schedule(name, ranks, int(str(error).split()[-1]))
    else:
        assert len(work_of(name, ranks, ranks + more)) == ranks


@pytest.mark.parametrize(
    "starts, problem",
    [((0, 2), "2 stages and the schedule interleaved on pp=2 has 4"), ((0, 1, 2, 9), "8 blocks"), ((1, 2, 3, 4), "0")],
)
def test_a_split_that_does_not_fit_is_refused(starts, problem):
    with pytest.raises(ValueError, match=problem):
        check_split(starts, 8, 4, "interleaved", 2)
