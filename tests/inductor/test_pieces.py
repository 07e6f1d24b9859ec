"""Pieces of a graph compiled by Inductor on a CPU: once for each structure, and kept on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph import compat
from stepgraph.inductor import library
from stepgraph.inductor.pieces import Piece, compile_pieces, nodes_of

aten = torch.ops.aten
CONFIG = {"fallback_random": True}


def operators(function, *inputs):
    """``function`` as a flat graph, and its operators in order."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    return module, [node for node in module.graph.nodes if node.op == "call_function"]


@pytest.fixture
def compiled(monkeypatch):
    """The operators of everything that would have been compiled; it runs as it is instead."""
    seen = []

    def as_it_is(piece, examples, options):
        seen.append([n.target for n in piece.graph.nodes if n.op == "call_function"])

        def run(args):
            results = piece(*args)
            args.clear()
            return results

        return run

    monkeypatch.setattr(compat, "inductor_compile", as_it_is)
    monkeypatch.setattr(library, "_compiled", {})  # without what other captures of this process compiled
    return seen


def test_structures_differ_in_values_and_forms(compiled):
    """The first two and the sixth are equal; others have another number, its type, a stride, one input for two."""

    def function(x, y, z):
        results = [torch.sin(a + b) * 2 for a, b in ((x, y), (y, x))]
        results += [torch.sin(x + y) * 3, torch.sin(x + y) * 2.0, torch.sin(x + z.t()) * 2, torch.sin(x + y) * 2]
        return *results, torch.sin(x + x) * 2

    inputs = [torch.randn(4, 4) for _ in range(3)]
    module, nodes = operators(function, *inputs)
    nodes = [n for n in nodes if n.target is not aten.t.default]
    pieces = [Piece("test", nodes[start : start + 3]) for start in range(0, 21, 3)]
    made = compile_pieces(module, pieces, CONFIG)
    assert len(compiled) == len(made.compiled) == 5
    for actual, expected in zip(made.module(*inputs), function(*inputs), strict=True):
        assert torch.equal(actual, expected)


def test_equal_operators_of_which_other_results_are_read_are_two_structures(compiled):
    x = torch.randn(4)
    module, nodes = operators(lambda x: (x.sin().cos(), *(lambda s: (s, s.cos()))(x.sin())), x)
    compile_pieces(module, [Piece("test", nodes[:2]), Piece("test", nodes[2:])], CONFIG)
    assert len(compiled) == 2


@pytest.mark.slow
def test_what_a_piece_reads_last_is_freed_and_views_leave_it():
    """The list of arguments comes back empty; a view of an argument and one of a result are results as well."""

    def function(x):
        y = x.t()
        z = (x * 2).exp()
        return y.sin(), y, z.view(-1), z

    x = torch.rand(4, 6)
    module, nodes = operators(function, x)
    compilation = compile_pieces(module, [Piece("test", nodes)], CONFIG)
    (call,) = compilation.module.graph.find_nodes(op="call_module")
    args = [x]
    getattr(compilation.module, call.target).boxed(args)
    assert args == []
    for actual, expected in zip(compilation.module(x), function(x), strict=True):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_pieces_share_what_was_compiled(monkeypatch):
    """Three calls of two structures, each of which names its nodes; what runs beside starts with the first."""
    waits, started = [], []
    monkeypatch.setattr(compat, "await_compile_workers", lambda: waits.append(True))
    _, made = compat.inductor_cache_counts()
    x = torch.rand(64)
    module, nodes = operators(lambda x: (x.sin().exp() + 1, x.cos().exp() + 1, x.sin().exp() + 1), x)
    pieces = [Piece("test", nodes[start : start + 3]) for start in (0, 3, 6)]
    result = compile_pieces(module, pieces, CONFIG, beside=lambda: started.append(True))
    calls = result.module.graph.find_nodes(op="call_module")
    assert len(calls) == 3 and len({call.target for call in calls}) == len(result.compiled) == 2
    assert len(waits) == compat.inductor_cache_counts()[1] - made  # for none that was on disk
    assert len(started) == bool(waits)
    assert [name for call in calls for name in nodes_of(call)] == [node.name for node in nodes]


SCRIPT = """
import sys, torch, stepgraph
from torch import nn
from stepgraph.passes import get

for mode in sys.argv[1:]:
    passes = [get("inductor", max_autotune=mode == "autotune")]
    batch = torch.randn(8, 16)
    step = stepgraph.capture(nn.RMSNorm(16), lambda model, batch: model(batch).square().mean(), batch, passes=passes)
    step(batch)
    print(mode, step.report[-1].summary.partition("(")[2])
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_second_process_loads_from_disk(tmp_path):
    root = str(Path(stepgraph.__file__).parents[1])
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}

    def run(*modes):
        command = [sys.executable, "-c", SCRIPT, *modes]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    note = "{} {} of 1 loaded from disk)"
    assert run("plain") == [note.format("plain", 0)]
    # In the end other options: they are in the key.
    assert run("plain", "autotune") == [note.format("plain", 1), note.format("autotune", 0)]
