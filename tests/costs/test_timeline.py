"""The simulation of a graph against times made by hand."""

import pytest
import torch

from stepgraph.costs.hardware import GPUS
from stepgraph.costs.links import Group, collective_seconds
from stepgraph.costs.timeline import simulate
from tests.costs.graphs import Hand, aten

c10d = torch.ops._c10d_functional
H200 = GPUS["h200"]
GROUPS = {"a": Group("dp_shard", (0, 1)), "b": Group("tp", (0, 2))}
SIZE = 2**24
TAKES = collective_seconds(H200, "all_gather", 4 * SIZE, (0, 1))


def gathers(hand, group, x):
    return hand(c10d.all_gather_into_tensor.default, x, 2, group, val=torch.empty(SIZE, device="meta"))


def waits(hand, gather):
    return hand(c10d.wait_tensor.default, gather, val=gather.meta["val"])


def timeline(order, computing):
    """``order``: gathers and waits of two groups (``a+`` begins, ``a-`` ends) and ``c``, which computes."""
    hand, begun, seconds = Hand(), {}, {}
    x = hand.input(SIZE // 2)
    for word in order.split():
        if word == "c":
            seconds[hand(aten.neg.default, x)] = computing
        elif word[1] == "+":
            begun[word[0]] = gathers(hand, word[0], x)
        else:
            waits(hand, begun[word[0]])
    return simulate(hand.graph, seconds, H200, GROUPS)


def test_computation_hides_what_runs_beside_it():
    found = timeline("a+ c a-", 2 * TAKES)
    assert found.step_seconds == found.compute_seconds == 2 * TAKES and found.exposed_seconds == 0
    (gather,) = found.collectives
    assert (gather.kind, gather.axis, gather.ranks, gather.bytes) == ("all_gather", "dp_shard", 2, 4 * SIZE)


def test_what_is_waited_for_at_once_is_exposed():
    found = timeline("a+ a- c", TAKES)
    assert found.exposed_seconds == pytest.approx(TAKES) and found.step_seconds == pytest.approx(2 * TAKES)
    assert timeline("a+ c a-", TAKES / 4).exposed_seconds == pytest.approx(TAKES * 3 / 4)


def test_a_groups_collectives_follow_each_other_and_other_groups_run_beside():
    assert timeline("a+ b+ a- b-", 0).step_seconds == pytest.approx(TAKES)
    assert timeline("a+ a+ a-", 0).step_seconds == pytest.approx(2 * TAKES)


def test_a_wait_for_nothing_takes_no_time():
    hand = Hand()
    waits(hand, hand.input(SIZE))
    assert simulate(hand.graph, {}, H200, GROUPS).step_seconds == 0
