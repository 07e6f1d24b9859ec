"""Pieces compiled with Inductor on a CPU: once for each structure, with views and frees of their own, kept on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph import compat
from stepgraph.inductor.pieces import Piece, compile_pieces, nodes_of

aten = torch.ops.aten
CONFIG = {"fallback_random": True}


def operators(function, *inputs):
    """``function`` as a flat graph, and its operators in order."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    return module, [node for node in module.graph.nodes if node.op == "call_function"]


@pytest.fixture
def compiled(monkeypatch):
    """The pieces that would have been compiled; they run as they are instead."""
    seen = []

    def as_it_is(piece, examples, options):
        assert [n.meta["val"] for n in piece.graph.find_nodes(op="placeholder")] == examples
        seen.append(piece)

        def run(args):
            results = piece(*args)
            args.clear()
            return results

        return run

    monkeypatch.setattr(compat, "inductor_compile", as_it_is)
    return seen


def test_structures_differ_in_values_and_forms(compiled):
    """Only the first two and the last but one are equal: then another number, its type, a stride, one input for two."""

    def function(x, y, z):
        results = [torch.sin(a + b) * 2 for a, b in ((x, y), (y, x))]
        results += [torch.sin(x + y) * 3, torch.sin(x + y) * 2.0, torch.sin(x + z.t()) * 2, torch.sin(x + y) * 2]
        return *results, torch.sin(x + x) * 2

    inputs = [torch.randn(4, 4) for _ in range(3)]
    module, nodes = operators(function, *inputs)
    nodes = [n for n in nodes if n.target is not aten.t.default]
    pieces = [Piece("test", nodes[3 * i : 3 * i + 3]) for i in range(7)]
    result = compile_pieces(module, pieces, CONFIG).module
    assert len(compiled) == 5
    for actual, expected in zip(result(*inputs), function(*inputs), strict=True):
        assert torch.equal(actual, expected)
    calls = result.graph.find_nodes(op="call_module")
    assert [nodes_of(call) for call in calls] == [tuple(n.name for n in piece.nodes) for piece in pieces]


def test_results_in_an_order_of_their_own(compiled):
    """Equal operators of which other results are read are two structures."""
    x = torch.randn(4)
    module, nodes = operators(lambda x: (x.sin().cos(), *(lambda s: (s, s.cos()))(x.sin())), x)
    result = compile_pieces(module, [Piece("test", nodes[:2]), Piece("test", nodes[2:])], CONFIG).module
    assert len(compiled) == 2
    for actual, expected in zip(result(x), (x.sin().cos(), x.sin(), x.sin().cos()), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.slow
def test_what_a_piece_reads_last_is_freed_and_views_leave_it(monkeypatch):
    """The list of arguments comes back empty; a view of an argument and one of a result are results as well. What has
    to be compiled waits for the workers, and starts what can run beside it once."""

    def function(x):
        y = x.t()
        z = (x * 2).exp()
        return y.sin(), y, z.view(-1), z

    x, waits, started = torch.rand(4, 6), [], []
    monkeypatch.setattr(compat, "await_compile_workers", lambda: waits.append(True))
    module, nodes = operators(function, x)
    _, made = compat.inductor_cache_counts()
    compilation = compile_pieces(module, [Piece("test", nodes)], CONFIG, beside=lambda: started.append(True))
    assert len(waits) == len(started) == compat.inductor_cache_counts()[1] - made  # for none that was on disk
    (call,) = compilation.module.graph.find_nodes(op="call_module")
    args = [x]
    getattr(compilation.module, call.target).boxed(args)
    assert args == []
    for actual, expected in zip(compilation.module(x), function(x), strict=True):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)


SCRIPT = """
import sys, torch, stepgraph
from torch import nn
from stepgraph.passes import get

for autotune in sys.argv[1:]:
    passes = [get("inductor", max_autotune=autotune == "autotune")]
    batch = torch.randn(8, 16)
    step = stepgraph.capture(nn.RMSNorm(16), lambda model, batch: model(batch).square().mean(), batch, passes=passes)
    step(batch)
    print(autotune, step.report[-1].summary.partition("(")[2])
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_second_process_loads_from_disk(tmp_path):
    root = str(Path(stepgraph.__file__).parents[1])
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}

    def run(*autotune):
        command = [sys.executable, "-c", SCRIPT, *autotune]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    assert run("default") == ["default 0 of 1 loaded from disk)"]
    # In the end other options: they are in the key.
    assert run("default", "autotune") == ["default 1 of 1 loaded from disk)", "autotune 0 of 1 loaded from disk)"]
