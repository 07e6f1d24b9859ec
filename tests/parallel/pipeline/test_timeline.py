"""Schedules on paper, against times and memory that formulas give."""

import dataclasses
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from stepgraph.graph.step_graph import Call, Kind
from stepgraph.parallel.pipeline.schedules import SCHEDULES, rank_of, work_of
from stepgraph.parallel.pipeline.timeline import Span, aligned, simulate_schedule

KINDS = ("forward", "backward", "backward_input", "backward_weight")


def simulated(name, ranks, microbatches, forward=1.0, backward=2.0, send=0.0):
    schedule = SCHEDULES[name]
    stages = ranks * schedule.chunks
    times = dict(zip(KINDS, (forward, backward, backward / 2, backward / 2), strict=True))
    seconds = {(kind, stage): times[kind] / schedule.chunks for kind in KINDS for stage in range(stages)}
    sends = {(way, stage): send for way in (True, False) for stage in range(stages)}
    ranks_of = [rank_of(schedule, ranks, stage) for stage in range(stages)]
    return simulate_schedule(work_of(name, ranks, microbatches), ranks_of, seconds, sends)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.integers(2, 6), st.integers(0, 8), st.floats(0.1, 3), st.floats(0.1, 3))
def test_1f1b_takes_the_time_of_its_formula(ranks, more, forward, backward):
    """(m + p - 1) (f + b), and stage i keeps p - i microbatches: Narayanan et al., "Memory-Efficient
    Pipeline-Parallel DNN Training", 2021."""
    count = ranks + more
    found = simulated("1f1b", ranks, count, forward, backward)
    assert found.seconds == pytest.approx((count + ranks - 1) * (forward + backward))
    assert found.bubble == pytest.approx((ranks - 1) / (count + ranks - 1))
    assert [found.most_in_flight(stage) for stage in range(ranks)] == [ranks - stage for stage in range(ranks)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_does_one_thing_at_a_time_and_all_of_it(name):
    ranks, count = 4, 8
    found = simulated(name, ranks, count)
    stages = ranks * SCHEDULES[name].chunks
    for rank in range(ranks):
        own = sorted((span.start, span.end) for span in found.spans if span.rank == rank)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(own))
        assert found.busy(rank) == pytest.approx(count * 3.0)
    assert len([span for span in found.spans if span.work[0] == "forward"]) == stages * count
    ends = {span.work: span.end for span in found.spans}
    for span in found.spans:  # what a stage reads of the one before it
        kind, stage, microbatch = span.work
        if kind == "forward" and stage:
            assert span.start >= ends["forward", stage - 1, microbatch] - 1e-9


def test_halves_and_rounds_shrink_the_bubble():
    bubbles = {name: simulated(name, 4, 8).bubble for name in SCHEDULES}
    assert bubbles["interleaved"] < bubbles["1f1b"]
    assert bubbles["zero-bubble"] < bubbles["1f1b"]
    assert bubbles["zbv"] < bubbles["interleaved"]


def test_messages_delay_who_waits_for_them():
    fast, slow = simulated("1f1b", 2, 4), simulated("1f1b", 2, 4, send=0.5)
    assert slow.seconds > fast.seconds
    assert slow.busy(0) == fast.busy(0)


def test_an_order_that_never_ends_is_named():
    orders = [
        [Call(Kind.BACKWARD, 0, 0), Call(Kind.FORWARD, 0, 0)],
        [Call(Kind.FORWARD, 1, 0), Call(Kind.BACKWARD, 1, 0)],
    ]
    seconds = {(kind, stage): 1.0 for kind in KINDS for stage in range(2)}
    sends = {(way, stage): 0.0 for way in (True, False) for stage in range(2)}
    with pytest.raises(ValueError, match="never ends"):
        simulate_schedule(orders, [0, 1], seconds, sends)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.lists(st.floats(0, 9), min_size=4))
def test_clocks_of_ranks_are_aligned_by_what_they_send(name, ranks, clocks):
    """Spans on clocks that began at any time: nothing is read before it is made, and ranks keep their own times."""
    found = simulated(name, ranks, 2 * ranks)
    where = [rank_of(SCHEDULES[name], ranks, stage) for stage in range(ranks * SCHEDULES[name].chunks)]
    told = [s._replace(start=s.start + clocks[s.rank], end=s.end + clocks[s.rank]) for s in found.spans]
    again = aligned(dataclasses.replace(found, spans=told), where)
    moved = {rank: set() for rank in range(ranks)}
    for before, after in zip(found.spans, again.spans, strict=True):
        assert (after.rank, after.work) == (before.rank, before.work)
        moved[before.rank] |= {round(after.start - before.start, 6), round(after.end - before.end, 6)}
    assert all(max(by) - min(by) < 1e-5 for by in moved.values())
    assert min(span.start for span in again.spans) == pytest.approx(0.0, abs=1e-9)
    ends = {span.work: span.end for span in again.spans}
    for span in again.spans:
        kind, stage, microbatch = span.work
        if kind == "forward" and stage:
            assert span.start > ends["forward", stage - 1, microbatch] - 1e-6
        backward = "backward_input" if SCHEDULES[name].halves else "backward"
        if kind == backward and stage + 1 < len(where):
            assert span.start > ends[backward, stage + 1, microbatch] - 1e-6


def test_one_clock_stays_as_it_is():
    spans = [Span(0, Call(Kind.FORWARD, 0, 0), 0.0, 1.0), Span(1, Call(Kind.FORWARD, 1, 0), 1.5, 2.0)]
    found = dataclasses.replace(simulated("1f1b", 2, 2), spans=spans)
    assert aligned(found, [0, 1]).spans == spans


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_kept_is_the_sum_over_the_microbatches_at_every_moment(name):
    ranks, kept, between = 4, 5, 3
    found = simulated(name, ranks, 8)
    stages = range(ranks * SCHEDULES[name].chunks)
    ends = {span.work: span.end for span in found.spans}
    for rank in range(ranks):
        own = {stage: (kept, between) for stage in stages if rank_of(SCHEDULES[name], ranks, stage) == rank}
        most = 0
        for moment in [span.start for span in found.spans]:
            now = 0
            for span in found.spans:
                kind, stage, microbatch = span.work
                if kind != "forward" or stage not in own or span.start > moment:
                    continue
                late = ends.get(("backward_weight", stage, microbatch))
                first = ends["backward" if late is None else "backward_input", stage, microbatch]
                now += kept if moment < first else between if late is not None and moment < late else 0
            most = max(most, now)
        assert found.most_kept(own) == most
