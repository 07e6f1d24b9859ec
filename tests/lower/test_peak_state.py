"""A peak of memory takes optimizer state to the host where that is needed or costs least, as much as is needed."""

import dataclasses
import functools
import os
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.costs.hardware import GPUS, host_text
from stepgraph.costs.memory import peak_bytes
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.host_copies import on_host
from stepgraph.graph.values import OptimizerState
from stepgraph.inspect.forecast.tables import time_over_peak
from stepgraph.lower import StepSpec, copied, peak, rewrite, search_of_peak, trace
from stepgraph.passes import StepOptions, Target
from stepgraph.passes.optimizer.offload import state_sizes
from tests.passes.optimizer.test_offload import Together

#: Its allocator's allowance aside, what a peak counts for a CPU.
TARGET = dataclasses.replace(Target.forecast(GPUS["h200"]), device="cpu")


def mse(model, batch):
    return F.mse_loss(model(batch), batch)


def mlp(layers=8, width=128):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@functools.cache
def wide(accumulate=1, kind=torch.optim.AdamW):
    """(spec, its program) of layers whose state is most of what a step takes."""
    model = mlp()
    optimizer = kind(model.parameters())
    spec = StepSpec(model, mse, torch.zeros(8, 128), optimizer, accumulate=accumulate, passes=StepOptions("exact"))
    return spec, trace(spec, TARGET).program


def fitted(found, asked, target=TARGET):
    spec, program = found
    memory = f"peak={asked / 2**30:.9f}GiB" if asked else "none"
    return rewrite(copied(program), dataclasses.replace(spec, passes=StepOptions("exact", memory=memory)), target)


def report_of(program):
    return next(
        r for r in program.reports if r.name == "offload_optimizer" and "no optimizer state" not in str(r.skipped)
    )


def away(program):
    nodes = [node for step in program.graphs.values() for node in step.placeholders(OptimizerState)]
    return sum(tensor_bytes(node) for node in nodes if on_host(node))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_as_much_state_as_a_peak_needs_is_on_the_host(accumulate):
    found = wide(accumulate)
    sizes = state_sizes(found[1].graphs["update" if accumulate > 1 else "step"])
    kept = peak_bytes(fitted(found, None))
    asked = kept - 3.5 * max(sizes)
    program = fitted(found, asked)
    report, moved = report_of(program), away(program)
    assert peak_bytes(program) <= asked and moved and moved in [sum(sizes[:n]) for n in range(len(sizes))]
    assert f"of {sum(sizes) / 2**20:.1f} MiB) stay in host memory" in report.summary
    assert report.added_s > 0 and f"{report.added_s * 1e3:.2f} ms more per step" in report.summary
    curve = time_over_peak(program.reports, f"peak={asked / 2**30}GiB", 0.0, accumulate)
    assert 0 < curve["state_s"] == sum(report.added_s for report in program.reports) <= curve["chosen"][1]


def test_a_peak_that_is_met_for_less_leaves_the_state():
    """By activations that cost little to compute again; and one that takes nothing at all."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4))
    )
    model.forward = lambda x: functools.reduce(lambda x, layer: layer(x), model[1], model[0](x))
    optimizer = torch.optim.AdamW(model.parameters())
    spec = StepSpec(model, mse, torch.zeros(4096, 8), optimizer, passes=StepOptions("exact"))
    found = spec, trace(spec, TARGET).program
    kept = peak_bytes(fitted(found, None))
    for share, changed in ((1.0, False), (0.8, True)):
        program = fitted(found, share * kept)
        fit = next(report for report in program.reports if report.name == "fit_memory")
        assert bool(fit.changed) == changed and peak_bytes(program) <= share * kept
        assert report_of(program).skipped == "the peak is met without it" and not away(program)


def test_hosts_without_room_and_optimizers_across_parameters_keep_it():
    found = wide()
    asked = peak_bytes(fitted(found, None)) - 2 * max(state_sizes(found[1].main))
    fitted(found, asked)
    with pytest.raises(ValueError, match=r"cannot be met: .* at least peak="):
        fitted(found, asked, dataclasses.replace(TARGET, host_memory=1000))
    with pytest.raises(
        ValueError, match=r"cannot be met: .*\(offload_optimizer updates .* several parameters"
    ) as error:
        fitted(wide(kind=Together), asked / 2)
    assert "\n" not in str(error.value)


def test_training_under_such_a_peak_is_bitwise():
    def trained(memory):
        model = mlp(width=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = stepgraph.capture(
            model, mse, torch.ones(4, 32), optimizer, max_grad_norm=1.0, passes=StepOptions("exact", memory=memory)
        )
        losses = [step(torch.full((4, 32), float(i))) for i in range(3)]
        return [*losses, *model.parameters(), *(s[k] for s in optimizer.state.values() for k in sorted(s))], step

    plain, step = trained("none")
    asked = peak_bytes(step.program) - 20_000
    found, step = trained(f"peak={asked / 2**30:.9f}GiB")
    assert all(map(torch.equal, plain, found)) and away(step.program) >= 20_000
    assert step.verify(torch.ones(4, 32)).bitwise


def test_a_share_of_a_known_gpu_is_known_to_all_who_ask():
    """Also before it is looked up how much memory the GPU has."""
    spec = dataclasses.replace(wide()[0], passes=StepOptions("exact", memory="peak=90%"))
    assert spec.is_exact and trace(spec, TARGET).program.main


def test_the_hosts_line_names_nodes(tmp_path, monkeypatch):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4F, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 9})
    device = torch.device("cuda", 0)
    assert host_text(device, tmp_path).endswith("; the GPU's NUMA node is unknown")
    for path, text in (
        ("bus/pci/devices/0000:4f:00.0/numa_node", "1\n"),
        ("devices/system/node/node0/cpulist", "0-3,16\n"),
        ("devices/system/node/node1/cpulist", "8-9\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    assert re.fullmatch(
        r"host memory: [\d.]+ GiB free for this rank; the GPU is on NUMA node 1 and this process may run on 0, 1: "
        r"numactl --cpunodebind=1 --membind=1 keeps copies from crossing",
        host_text(device, tmp_path),
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9})
    assert host_text(device, tmp_path).endswith("free for this rank, on the GPU's NUMA node 1")
    assert host_text(torch.device("cpu")) == ""


def test_state_that_is_on_the_host_stays_there(monkeypatch):
    """So that the forms of a step for long and for short batches have it in one place."""
    found = wide()
    sizes = state_sizes(found[1].main)
    monkeypatch.setattr(peak, "_locked_bytes", lambda program: sum(sizes[:3]))
    assert away(fitted(found, 2**30)) == sum(sizes[:3])
    assert away(fitted(found, peak_bytes(fitted(found, None)) - 6 * max(sizes))) > sum(sizes[:3])
    assert away(fitted(found, None)) == 0


def test_a_try_is_rewritten_as_the_step_will_be():
    """By passes of the optimizer too. They serve a compiler, which comes after what is tried again."""
    model, target = mlp(width=512), Target.forecast(GPUS["h200"])
    optimizer = torch.optim.NAdam(model.parameters())
    spec = StepSpec(model, mse, torch.zeros(8, 512), optimizer, passes=StepOptions(memory="peak=1GiB"))
    program = trace(spec, target).program
    tried = search_of_peak(program, spec, target).attempt(peak.PeakTry()).made
    whole = rewrite(copied(program), dataclasses.replace(spec, passes=StepOptions()), target)
    for made in (whole, tried, rewrite(copied(program), spec, target)):
        assert any(report.name == "fuse_updates" and report.changed for report in made.reports)
        assert peak_bytes(made, fused=True) == peak_bytes(whole, fused=True)
