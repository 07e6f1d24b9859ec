"""Seconds of collectives against numbers made by hand and measured."""

import json
from pathlib import Path

import pytest
import torch

from stepgraph.costs import links
from stepgraph.costs.hardware import GPUS
from stepgraph.costs.links import collective_seconds
from tests.costs.graphs import Hand

c10d = torch.ops._c10d_functional
MEASURED = Path(__file__).parents[2] / "benchmarks" / "h200_x2_roofline.json"


def test_a_large_collective_runs_at_its_slowest_link():
    gpu, size = GPUS["h100"], 2**33
    inside = collective_seconds(gpu, "all_gather", size, range(8))
    assert inside == pytest.approx(size * 7 / 8 / 450e9, rel=0.01)
    # Two machines of eight: half of the tensor crosses, over eight adapters; with one rank each, over one.
    assert collective_seconds(gpu, "all_gather", size, range(16)) == pytest.approx(
        max(size * 15 / 16 / 450e9, size / 2 / 400e9), rel=0.01
    )
    assert collective_seconds(gpu, "all_gather", size, (0, 8)) == pytest.approx(size / 2 / 50e9, rel=0.01)
    assert collective_seconds(gpu, "all_reduce", size, range(8)) == pytest.approx(2 * inside, rel=0.01)
    assert collective_seconds(gpu, "all_reduce", size, [3]) == 0.0


def test_a_small_collective_costs_its_latency():
    # NCCL's LL protocol: 6.6 us, and 0.6 us for each of seven steps.
    assert collective_seconds(GPUS["h100"], "all_gather", 64, range(8)) == pytest.approx(10.8e-6, rel=0.01)
    # A tree between 64 machines: 6.8 us, twice seven steps of 0.6 us and twice six of 5 us.
    assert collective_seconds(GPUS["h100"], "all_reduce", 4, range(512)) == pytest.approx(75.2e-6, rel=0.01)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("size", [2**28, 2**30])
def test_two_gpus_run_at_what_kernels_pass_on(kind, size):
    """As measured: links alone would take 60 to 74% of it."""
    measured = json.loads(MEASURED.read_text())["collective_us"][f"{kind} {size}"]
    assert 1e6 * collective_seconds(GPUS["h200"], kind, size, range(2)) == pytest.approx(measured, rel=0.15)


def test_what_a_collective_moves():
    hand = Hand()
    shard = hand.input(256, 1024, dtype=torch.bfloat16)
    gather = hand(c10d.all_gather_into_tensor.default, shard, 4, "group", val=torch.empty(1024, 1024).bfloat16())
    found = links.transfer(gather, range(4), GPUS["h200"])
    assert found[:3] == ("all_gather", torch.bfloat16, 2 * 2**20)
    assert found.seconds == collective_seconds(GPUS["h200"], "all_gather", 2 * 2**20, range(4))
    assert links.group_name(gather) == "group"


def test_an_operator_without_a_row_in_the_table_goes_by_its_name():
    hand = Hand()
    x = hand.input(64, 1024)
    node = hand(c10d.broadcast.default, x, 0, "group", val=x.meta["val"])
    found = links.transfer(node, range(2), GPUS["h200"])
    assert found[:3] == ("broadcast", torch.float32, 4 * 2**16) and found.seconds > 0


def test_an_all_to_all_sends_each_part_its_own_way():
    gpu, size = GPUS["h100"], 2**30
    assert collective_seconds(gpu, "all_to_all", size, range(8)) == pytest.approx(
        max(size * 7 / 8 / 450e9, size / 531e9) + 11.8e-6, rel=0.01
    )
    # Of 64 ranks on eight machines, 56 parts of 64 leave by the rank's own adapter.
    apart = collective_seconds(gpu, "all_to_all", size, range(64))
    assert apart == pytest.approx(size * 56 / 64 / 50e9, rel=0.01)
    assert collective_seconds(gpu, "all_to_all", 64, range(64)) == pytest.approx(9.9e-6, rel=0.01)
    hand = Hand()
    x = hand.input(64, 1024)
    node = hand(c10d.all_to_all_single.default, x, [32, 32], [32, 32], "group", val=x.meta["val"])
    found = links.transfer(node, range(2), gpu)
    assert found[:3] == ("all_to_all", torch.float32, 4 * 2**16)
    assert found.seconds == collective_seconds(gpu, "all_to_all", 4 * 2**16, range(2))
