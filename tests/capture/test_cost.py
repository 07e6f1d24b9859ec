"""What a capture costs: linear in the model's depth, and not much above the trace it is made of.

Function calls are counted instead of seconds, which on a shared machine differ by a factor from run to run;
``benchmarks/capture.py`` measures those.
"""

import cProfile
import importlib.util
import pstats
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location(
    "benchmark_capture", Path(__file__).parents[2] / "benchmarks" / "capture.py"
)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def cost(trace, layers):
    """Function calls of a trace of Llama 3 8B with so many layers; its nodes."""
    profile = cProfile.Profile()
    _, nodes = profile.runcall(trace, layers)
    return pstats.Stats(profile).total_calls, nodes


@pytest.mark.slow
def test_llama3_8b_is_captured_in_linear_time():
    benchmark.captured(1)  # torch imports some of itself at first use
    (few, few_nodes), (many, many_nodes) = cost(benchmark.captured, 2), cost(benchmark.captured, 8)
    per_layer = (many_nodes - few_nodes) / 6
    assert per_layer == int(per_layer)
    assert many / many_nodes < 1.05 * few / few_nodes
    bare, bare_nodes = cost(benchmark.bare, 8)
    assert many_nodes < 1.2 * bare_nodes
    assert many < 1.6 * bare
