"""``benchmarks/expert_swiglu.py``: its sizes are those of the record's step, and it runs in small on a CPU."""

import importlib.util
from pathlib import Path

import pytest
import torch

from stepgraph.config.presets import PRESETS
from stepgraph.parallel.experts import Capacity

spec = importlib.util.spec_from_file_location(
    "benchmark_expert_swiglu", Path(__file__).parents[2] / "benchmarks" / "expert_swiglu.py"
)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", benchmark.CASES)
def test_sizes_are_those_of_a_chunk_of_the_step(case):
    name, _, ranks = case.model.partition(", ep=")
    moe, ranks = PRESETS[name]().model.moe, int(ranks)
    here = moe.n_experts // ranks
    tokens = 4 * 4096 // 2
    assert (case.width, case.experts) == (moe.ffn_dim, here)
    assert case.rows == ranks * Capacity(case.capacity).rows(tokens, moe.top_k, here, ranks)
    assert case.used == round(case.load * tokens * moe.top_k) <= case.rows
    offsets = benchmark.offsets_of(case, CPU)
    counts = offsets.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert offsets.shape == (here,) and offsets[-1] == case.used and bool((counts > 0).all())
    assert bool(counts[0] > 2 * counts[-1]) == case.skewed


def test_in_small():
    case = benchmark.CASES[1]._replace(balanced=16, width=8, experts=4)
    rows = benchmark.measured(case, CPU)
    kinds = {(row["product"], row["provider"]) for row in rows}
    assert kinds == {(p, q) for p in benchmark.PRODUCTS for q in benchmark.PROVIDERS} and len(rows) == 6
    for row in rows:
        reads_and_writes = {"forward": 3, "backward": 5}[row["product"]]
        assert row["gbps"] * row["ms"] * 1e6 == pytest.approx(reads_and_writes * 24 * 8 * 2)
    first, second = benchmark.summary(rows, 10.0)
    assert first.startswith("deepseek-v3-16b, ep=2, capacity 2, load 1.5 skewed, forward: ours ")
    assert " backward: " in second and second.endswith(" times as fast")


def test_a_wrong_result_ends_it(monkeypatch):
    monkeypatch.setattr(benchmark, "swiglu_rows", lambda gate_up, *_: gate_up.new_zeros(len(gate_up), 8))
    with pytest.raises(AssertionError, match="not close"):
        benchmark.measured(benchmark.CASES[0]._replace(balanced=16, width=8, experts=4), CPU)
