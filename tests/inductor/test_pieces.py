"""Pieces compiled with Inductor on a CPU: once for each structure, kept on disk."""

import copy
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
from stepgraph.models import Llama3, Llama3Config, next_token_loss

# Inductor's C++ compiler takes most of a test's time.
pytestmark = pytest.mark.slow

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
        assert [n.meta["val"] for n in piece.graph.find_nodes(op="placeholder")] == examples
        seen.append([n.target for n in piece.graph.nodes if n.op == "call_function"])

        def run(args):
            results = piece(*args)
            args.clear()
            return results

        return run

    monkeypatch.setattr(library, "_compiled", {})
    monkeypatch.setattr(compat, "inductor_compile", as_it_is)
    return seen


def test_structures_differ_in_values_and_forms(compiled):
    """Only the first two are equal: then another number, its type, a stride, and one input for two."""

    def function(x, y, z):
        results = [torch.sin(a + b) * 2 for a, b in ((x, y), (y, x))]
        return *results, torch.sin(x + y) * 3, torch.sin(x + y) * 2.0, torch.sin(x + z.t()) * 2, torch.sin(x + x) * 2

    inputs = [torch.randn(4, 4) for _ in range(3)]
    module, nodes = operators(function, *inputs)
    nodes = [n for n in nodes if n.target is not torch.ops.aten.t.default]
    result = compile_pieces(module, [Piece("test", nodes[i : i + 3]) for i in range(0, 18, 3)], CONFIG)
    assert len(compiled) == 5
    assert all(map(torch.equal, result.module(*inputs), function(*inputs)))


def test_results_in_an_order_of_their_own(compiled):
    """Equal operators of which other results are read are two structures."""
    x = torch.randn(4)
    module, nodes = operators(lambda x: (x.sin().cos(), *(lambda s: (s, s.cos()))(x.sin())), x)
    compile_pieces(module, [Piece("test", nodes[:2]), Piece("test", nodes[2:])], CONFIG)
    assert len(compiled) == 2


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


def llama(n_layers=2):
    return Llama3(
        Llama3Config(dim=32, n_layers=n_layers, n_heads=2, n_kv_heads=1, ffn_dim=48, vocab_size=37, max_seq_len=16)
    )


def captured(model):
    ids = torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    step = stepgraph.capture(copy.deepcopy(model), next_token_loss, batch, passes=["fuse_norm", "inductor"])
    step(batch)
    return step


def test_layers_share_what_was_compiled(monkeypatch):
    waits, started = [], []

    def counted(*args, on_first, **options):
        return compile_pieces(*args, on_first=lambda: started.append(len(waits)), **options)

    monkeypatch.setattr(compat, "await_compile_workers", lambda: waits.append(True))
    monkeypatch.setattr(sys.modules["stepgraph.passes.compile.inductor"], "compile_pieces", counted)
    _, made = compat.inductor_cache_counts()
    step = captured(llama(n_layers=6))
    calls = step.graph.executable.graph.find_nodes(op="call_module")
    modules = {id(getattr(step.graph.executable, call.target)) for call in calls}
    assert len(calls) > len(modules) > 1
    assert f"in {len(calls)} compiled pieces of {len(modules)} structures" in step.report[-1].summary
    assert len(waits) == compat.inductor_cache_counts()[1] - made  # for none that was on disk
    assert started == [0]  # before any is compiled
    # Each piece points back to the nodes that it replaces, in the graph that stays readable.
    names = [name for call in calls for name in nodes_of(call)]
    assert len(names) == len(set(names)) > len(calls)
    assert {node.name for node in step.graph.graph.nodes}.issuperset(names)


SCRIPT = """
import sys, torch, stepgraph
from torch import nn
from stepgraph.passes import get

for mode in sys.argv[1:]:
    passes = ["fuse_norm", get("inductor", max_autotune=mode == "autotune")]
    batch = torch.randn(8, 16)
    step = stepgraph.capture(nn.RMSNorm(16), lambda model, batch: model(batch).square().mean(), batch, passes=passes)
    step(batch)
    print(mode, step.report[-1].summary.partition("(")[2])
"""


@pytest.mark.long
def test_a_second_process_loads_from_disk(tmp_path):
    root = str(Path(stepgraph.__file__).parents[1])
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}

    def run(*modes):
        command = [sys.executable, "-c", SCRIPT, *modes]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    assert run("plain") == ["plain 0 of 1 loaded from disk)"]
    # Other options are in the key.
    assert run("plain", "autotune") == ["plain 1 of 1 loaded from disk)", "autotune 0 of 1 loaded from disk)"]
