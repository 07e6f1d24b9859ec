"""All calls of a pipeline's step as one recording: when it may be, and that it gives what single calls give. CUDA's
part, which records and replays, is played by the same calls on the static batch; tests/gpu has the true one."""

import contextlib
import dataclasses
import re
from functools import partial
from unittest import mock

import pytest
import torch

import stepgraph
from stepgraph import parallel
from stepgraph.parallel import next_token_loss
from stepgraph.passes import configured, record_whole
from stepgraph.run import cuda_graph
from stepgraph.run import program as run_program
from stepgraph.run.interpreter import Interpreter
from stepgraph.run.spans import Clock
from tests.distributed.ranks import global_batch, make_mesh, on_ranks
from tests.distributed.test_pipeline import CLIP, DEEP, SHORT, adamw, pipelined

N = 4


class Replayed:
    """In place of a CUDA graph: recording was the first step, and each later replay makes the calls again, on the
    tensors that were recorded and into the results that were."""

    step = None

    def __init__(self, keep_graph):
        assert keep_graph  # what `prepare` stands in for needs it
        self.replays, self.prepared = 0, False

    def prepare(self):
        """In place of `memsets_to_kernels`, which comes once, before the first replay."""
        assert not self.prepared and not self.replays
        self.prepared = True

    def replay(self):
        assert self.prepared
        self.replays += 1
        if self.replays > 1:
            for old, new in zip(
                self.step.results.tensors(), self.step.calls(self.step.static, None).tensors(), strict=True
            ):
                old.copy_(new)


@contextlib.contextmanager
def as_on_gpus(waits=lambda node: None):
    """``waits``: whether a node is seen to wait for the GPU."""

    def watched(module, inputs):
        return Interpreter(module)(inputs), {node.name for node in module.graph.nodes if waits(node)}

    names = ("Stream", "current_stream", "current_device", "synchronize", "empty_cache", "graph_pool_handle")
    with (
        mock.patch.multiple(torch.cuda, **dict.fromkeys(names, mock.DEFAULT)),
        mock.patch.multiple(torch.cuda, stream=mock.MagicMock(), graph=mock.MagicMock(), CUDAGraph=Replayed),
        mock.patch.multiple(
            cuda_graph, run_watched=watched, recording_stream=mock.DEFAULT, memsets_to_kernels=Replayed.prepare
        ),
        mock.patch.object(run_program, "RecordedClock", lambda room, device: Clock()),
        mock.patch("stepgraph.lower.lowering.record_whole", partial(record_whole, gpu="cpu")),
    ):
        yield


def passes():
    """Those of an exact step, CUDA graphs among them wherever it runs."""
    return [dataclasses.replace(p, needs_cuda=False) if p.name == "cuda_graph" else p for p in configured("exact")]


def captured(mesh, schedule, sends, chosen):
    model, _ = pipelined(mesh, schedule, DEEP if schedule == "interleaved" else SHORT, sends=sends)
    step = stepgraph.capture(
        model,
        next_token_loss(mesh),
        global_batch(0, 1, N),
        adamw(model.parameters()),
        max_grad_norm=CLIP,
        accumulate=N,
        passes=chosen,
    )
    return model, step


def reports(step):
    return {r.graph: r for graph in step.graphs.values() for r in graph.log if r.name == "cuda_graph"}


def state(model):
    return [p.detach().to_local().clone() for p in parallel.held_parameters(model).values()]


def check_same(mesh, schedule, sends):
    """Six steps, of which one is broken off: the same as calls one by one, and the caller's results stay his. Messages
    through process groups use no flags: their recording stays valid after a step that was broken off."""
    plain_model, plain = captured(mesh, schedule, sends, configured("exact"))
    model, step = captured(mesh, schedule, sends, passes())
    first = (0, 4) if sends == "symmetric" else (0,)
    runner = step._current.runner
    Replayed.step = runner.whole
    assert step.program.recorded_whole and not plain.program.recorded_whole
    for report in reports(step).values():
        assert report.skipped is None and report.summary == "part of the single CUDA graph of this rank's step"
        assert report.matched == report.changed > 0
    kept = []
    for i in range(7):
        batch = global_batch(i, 1, N)
        if i == 4:
            step._session.forget(runner.every_group)
        loss, expected = step(batch), plain(batch)
        assert torch.equal(loss, expected) and torch.equal(step.metrics["grad_norm"], plain.metrics["grad_norm"]), i
        recorded = i not in first  # the first steps, here and behind the broken one, run node by node
        assert (runner.whole.graph is not None) == recorded, i
        assert not recorded or runner.whole.graph.replays == i - max(k for k in first if k < i), i
        kept.append((loss, expected))
    assert all(map(torch.equal, state(model), state(plain_model)))
    assert all(torch.equal(*both) for both in kept)
    assert [call for call, *_ in step.spans.seconds()] == [call for call, *_ in plain.spans.seconds()]
    assert step.where() == ""
    seen = set()
    with step.watched(lambda graph, node: seen.add(graph)):
        assert torch.equal(step(global_batch(9, 1, N)), plain(global_batch(9, 1, N)))
    assert seen == set(step.graphs)


def check_apart(mesh):
    """Why a step is not one CUDA graph."""
    with mock.patch("stepgraph.passes.compile.cuda_graph.needs_host", lambda node, gpu="cuda": host(node)):
        _, step = captured(mesh, "1f1b", "symmetric", passes())
    assert not step.program.recorded_whole
    (skipped,) = {r.skipped for name, r in reports(step).items() if name != "update"}
    assert "the step is not one CUDA graph: silu" in skipped and ": a test says so" in skipped, skipped


def host(node):
    return "a test says so" if node.target is torch.ops.aten.silu.default else None


def check_waiting(mesh):
    """A node that waits for the GPU is noticed in the first step; the step goes on call by call."""
    with as_on_gpus(host):
        model, step = captured(mesh, "1f1b", "symmetric", passes())
        plain_model, plain = captured(mesh, "1f1b", "symmetric", configured("exact"))
        with mock.patch.object(run_program, "GraphRunner", lambda graph, *_: Interpreter(graph.executable)):
            for i in range(3):
                assert torch.equal(step(global_batch(i, 1, N)), plain(global_batch(i, 1, N)))
                assert step._current.runner.whole is None and not step.program.recorded_whole
    assert all(map(torch.equal, state(model), state(plain_model)))
    found, name = reports(step), f"forward.{mesh.place('pp')}"
    assert found["update"].skipped is None
    assert re.search(rf"the step is not one CUDA graph: silu\w* in {name} waits for the GPU$", found[name].skipped)


def _check():
    mesh = make_mesh("pp=2")
    with as_on_gpus():
        check_same(mesh, "interleaved", "symmetric")
        check_same(mesh, "zero-bubble", "symmetric")
        check_same(mesh, "1f1b", "point-to-point")
        check_apart(mesh)
    check_waiting(mesh)


@pytest.mark.slow
def test_a_whole_step_is_what_its_calls_are():
    on_ranks(2, _check)
