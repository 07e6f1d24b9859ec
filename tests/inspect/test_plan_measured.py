"""The forecast of memory against what a real step on this CPU allocates, as torch's profiler counts it."""

import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stepgraph import parallel
from stepgraph.config import build
from stepgraph.config.presets import PRESETS
from stepgraph.costs.hardware import GPUS
from stepgraph.inspect.forecast.forecast import forecast
from stepgraph.parallel import MeshSpec
from stepgraph.passes import PASSES


def measured(config) -> int:
    """Peak bytes of a step: what is held before it, and the most that it allocates beyond."""
    device = torch.device("cpu")
    with parallel.started(MeshSpec.parse("fsdp=1"), "cpu") as mesh:
        model = build.build_model(config, device, mesh)
        optimizer = build.build_optimizer(config, model)
        batch = build.example_batch(config, device)
        loss_fn = build.build_loss(config, device, mesh)
        step = build.build_step(config, build.step_spec(config, model, loss_fn, batch, optimizer))
        step(batch)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model, optimizer, batch)}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step(batch)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return sum(held.values()) + peak


def _tensors(model, optimizer, batch):
    for param in model.parameters():
        yield param.detach().to_local()
        yield from (getattr(t, "_local_tensor", t) for t in optimizer.state[param].values())
    yield from model.buffers()
    yield from batch.values()


def a_run(**options):
    """llama3-debug with two of its blocks, on one rank."""
    config = PRESETS["llama3-debug"]()
    settings = {"model": dataclasses.replace(config.model, n_layers=2), "mesh": "fsdp=1", "device": "cpu"}
    passes = {"cuda_graph": False, "disable_pass": ["fuse_loss", "fuse_norm"]}  # which a CPU computes in more steps
    return dataclasses.replace(config, **settings, **passes, **options)


@pytest.mark.parametrize(("memory", "precision"), [("none", "bf16-autocast"), ("full", "fp32")])
def test_every_operator_by_itself(memory, precision):
    config = a_run(memory=memory, precision=precision, inductor="off", batch_size=4)
    assert measured(config) == pytest.approx(forecast(config, GPUS["h200"]).peak.total, rel=0.01)


@pytest.mark.long
def test_fused(monkeypatch):
    """Compiled as for a GPU, forward apart from backward with a minimum cut between: the tensors that Inductor's
    kernels leave in memory are those that the forecast counts."""
    from stepgraph.passes.compile import inductor

    monkeypatch.setitem(PASSES, "rematerialize", dataclasses.replace(PASSES["rematerialize"], needs_cuda=False))
    monkeypatch.setattr(inductor, "_on_cuda", lambda step: True)
    monkeypatch.setattr(inductor, "needs_host", lambda node: None)
    config = a_run(precision="bf16", inductor="full", batch_size=16)
    assert measured(config) == pytest.approx(forecast(config, GPUS["h200"]).peak.total, rel=0.03)
