"""The optimizer's state stays on the host, parameters are updated in parts, and every bit is the same."""

import dataclasses
import functools
import gc
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture import trace_step
from stepgraph.costs.memory import estimate_memory
from stepgraph.costs.timeline import assumed_timeline
from stepgraph.graph.facts import is_mutating
from stepgraph.graph.host_copies import COPIES, OFFLOAD_BEGIN, RELOAD_BEGIN, RELOAD_END, STORE_BEGIN, STORE_END, on_host
from stepgraph.kernels.comm.exchange import Session
from stepgraph.kernels.offload import page_locked
from stepgraph.passes import StepOptions, Target, configured, get, run_passes

EXPAND = dataclasses.replace(get("expand_optimizer"), needs_cuda=False)
ops = torch.ops.stepgraph


def mse(model, batch):
    return F.mse_loss(model(batch).float(), batch.float())


def muon(params):
    params = list(params)
    matrices = [p for p in params if p.ndim == 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW([p for p in params if p.ndim < 2], fused=True)]


OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "two groups": lambda params: torch.optim.AdamW([{"params": [p]} for p in params], fused=True),
    "own step": torch.optim.AdamW,
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "master": stepgraph.MasterAdamW,
    "muon": muon,
}


def passes_of(offload, part_bytes=600):
    found = configured("exact", offload_optimizer=offload)
    return [p.with_options(part_bytes=part_bytes) if p.name == "offload_optimizer" else p for p in found]


def trained(name, passes, steps=3, **options):
    """(losses, parameters and state, step) of a model of two layers: parts of 600 bytes hold one matrix's state."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "master" else torch.float32
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    batch = torch.randn(4, 8, dtype=dtype)
    step = stepgraph.capture(model, mse, batch, optimizer, max_grad_norm=1.0, passes=passes, **options)
    losses = [step(batch) for _ in range(steps)]
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    state = [value for one in optimizers for state in one.state.values() for value in state.values()]
    return losses, [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))], step


def same(a, b):
    return all(all(map(torch.equal, x, y)) for x, y in zip(a[:2], b[:2], strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"on_nonfinite": "skip"}, {"accumulate": 2, "on_nonfinite": "skip"}], ids=str
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_the_same(name, options):
    plain, found = (trained(name, passes_of(offload), **options) for offload in (False, True))
    assert same(plain, found)
    (report,) = (r for r in found[2].report if r.name == "offload_optimizer" and r.skipped is None)
    assert report.changed == report.matched >= 2 and re.search(r"updates in \d+ parts?", report.summary)
    graph = found[2].program.graphs["update" if "accumulate" in options else "step"].graph
    for node in graph.nodes:  # state is read and written by copies alone
        if node.name.startswith("optimizer_") and on_host(node):
            assert {user.target for user in node.users} == {RELOAD_BEGIN, STORE_BEGIN}


@pytest.mark.parametrize("bad", [slice(None), slice(0, 2), slice(2, 4)], ids=["all", "first", "last"])
def test_an_update_that_is_left_out_leaves_the_state(bad):
    """Also where one microbatch alone, the one before the update or the one that is in its graph, is not finite."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accumulate = 1 if bad == slice(None) else 2
    options = {"max_grad_norm": 1.0, "on_nonfinite": "skip", "passes": passes_of(True), "accumulate": accumulate}
    step = stepgraph.capture(model, mse, torch.randn(4, 8), optimizer, **options)
    step(torch.randn(4, 8))
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    batch = torch.randn(4, 8)
    batch[bad] = float("nan")
    step(batch)
    assert step.metrics["skipped"] and before["exp_avg"].any()
    assert all(torch.equal(optimizer.state[model.weight][key], value) for key, value in before.items())
    step(torch.randn(4, 8))
    assert not step.metrics["skipped"]


def test_it_is_verified_with_eager_and_captured_again():
    """State that `load_state_dict` creates from a checkpoint is offloaded too."""
    step = trained("fused", passes_of(True))[2]
    batch = torch.randn(4, 8)
    assert step.verify(batch).bitwise
    (optimizer,) = step._update.optimizers
    optimizer.load_state_dict(optimizer.state_dict())
    assert step.verify(batch).bitwise
    assert sum(node.target is STORE_BEGIN for node in step.graph.graph.nodes) == 8


@pytest.mark.parametrize("name", ["fused", "master"])
def test_arithmetic_of_a_compiler_is_by_parts(name):
    """What `expand_optimizer` writes out reads and writes what is on the device."""
    plain = trained(name, ["inplace_update", EXPAND])
    found = trained(name, ["inplace_update", get("offload_optimizer", part_bytes=600), EXPAND])
    assert same(plain, found) and found[2].report[-1].changed == 4
    nodes = [node for node in found[2].graph.graph.nodes if is_mutating(node) and node.target is not STORE_BEGIN]
    assert not any(on_host(source) for node in nodes for source in node.all_input_nodes)


def large(part_bytes, rows=4, passes=None):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = trace_step(
        model, mse, torch.zeros(256).expand(rows, 256), optimizer, room=0.0 if part_bytes is not None else math.inf
    ).program.main
    passes = passes or passes_of(part_bytes is not None, part_bytes)
    run_passes(step, passes, target=Target("cuda", simulated=True))
    return step


def test_three_parts_are_on_the_device():
    """Of eight layers' state, 512 KiB each, three; and the forecast counts the copies of all."""
    plain, found = large(None), large(1)
    state = 8 * 2 * 256 * 256 * 4
    before, after = estimate_memory(plain.graph), estimate_memory(found.graph)
    assert before.inputs - after.inputs == state
    graph = found.graph
    alive = most = 0
    for node in graph.nodes:
        alive += {RELOAD_BEGIN: 1, STORE_END: -1}.get(node.target, 0)
        most = max(most, alive)
    assert most == 2 * 3 and alive == 0
    targets = [node.target for node in graph.nodes if node.target in COPIES]
    assert {targets.count(t) for t in (RELOAD_BEGIN, RELOAD_END, STORE_BEGIN, STORE_END)} == {16}
    copies = assumed_timeline(graph).copies
    assert sum(copy.bytes for copy in copies) == 2 * state and sum(copy.back for copy in copies) == len(copies) / 2


def test_activations_come_before_state():
    """Their copies travel the same way, and backward waits for them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in "1234"))
    model.forward = lambda x: functools.reduce(lambda x, layer: layer(x), model[1], model[0](x))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = trace_step(model, mse, torch.zeros(512, 64), optimizer, room=0.0).program.main
    run_passes(
        step, StepOptions("exact", offload_optimizer=True, memory="1.*=offload"), target=Target("cuda", simulated=True)
    )
    reloads = [node for node in step.graph.nodes if node.target is RELOAD_BEGIN]
    of_state = [node.args[0].op == "placeholder" for node in reloads]
    assert of_state == sorted(of_state) and not all(of_state) and any(of_state)


def test_parts_end_with_a_repeated_block():
    """So that the updates of equal blocks are compiled once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
    model.forward = lambda x: functools.reduce(lambda x, layer: layer(x), model[1], model[0](x))
    step = trace_step(model, mse, torch.zeros(4, 8), torch.optim.AdamW(model.parameters(), fused=True)).program.main
    run_passes(step, passes_of(True, 2**30))
    updates = [node for node in step.graph.nodes if "_fused_adamw_" in str(node.target)]
    assert [len(node.args[0]) for node in updates] == [2] * 5


class Together(torch.optim.Optimizer):
    """Scales each momentum by the sum of all."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if "m" not in self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
                self.state[p]["m"].add_(p.grad)
            total = sum(self.state[p]["m"].sum() for p in group["params"])
            for p in group["params"]:
                p.sub_(self.state[p]["m"] * total)


class Noisy(Together):
    """Adds noise to each momentum."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if "m" not in self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
                self.state[p]["m"].add_(torch.rand_like(self.state[p]["m"]) * p.grad)
                p.sub_(self.state[p]["m"])


@pytest.mark.parametrize(("kind", "why"), [(Together, "the state of several parameters"), (Noisy, "random numbers")])
def test_what_is_not_element_by_element_is_refused(kind, why):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    message = rf"^offload_optimizer updates .* {why}; leave it out, or use .*AdamW$"
    with pytest.raises(ValueError, match=message) as error:
        stepgraph.capture(model, mse, torch.randn(4, 8), kind(model.parameters()), passes=passes_of(True))
    assert "\n" not in str(error.value)


def test_a_step_without_state_says_so():
    model = nn.Linear(8, 8)
    step = stepgraph.capture(model, mse, torch.randn(4, 8), passes=StepOptions("exact", offload_optimizer=True))
    (report,) = (r for r in step.report if r.name == "offload_optimizer")
    assert report.skipped == "the graph has no optimizer state"


def test_a_machine_without_room_is_refused_in_one_line():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = trace_step(model, mse, torch.zeros(4, 8), optimizer, room=0.0).program.main
    target = Target("cuda", simulated=True, host_memory=100)
    with pytest.raises(
        ValueError, match=r"^offload_optimizer needs 0.0 GiB of host memory .* \(fsdp\), or leave it out$"
    ):
        run_passes(step, passes_of(True), target=target)


class Runtime:
    """Stands in for CUDA's."""

    def __init__(self):
        self.locked, self.code = {}, 0

    def cudaHostRegister(self, address, nbytes, flags):
        if not self.code:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.locked[address]


def test_page_locked_memory_has_its_size_and_is_given_back(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    memory = page_locked(3 * 2**20 + 7)
    view = memory[16:64].view(torch.float32)
    del memory
    gc.collect()
    assert runtime.locked == {view.untyped_storage().data_ptr(): 3 * 2**20 + 7} and not view.fill_(0).any()
    del view
    gc.collect()
    assert not runtime.locked
    runtime.code = 2
    with pytest.raises(
        RuntimeError, match=r"^the host does not give 0\.00 GiB of page-locked memory \(CUDA error 2\): "
    ):
        page_locked(2**20)


def test_operators_write_state_back():
    with Session() as session:
        host, x = torch.zeros(3, 5).t(), torch.randn(3, 5).t()
        ops.store_end(ops.store_begin(host, x), x)
        assert torch.equal(host, x)
        back = ops.reload_end(ops.reload_begin(host, x.device))
        assert torch.equal(back, x) and back.stride() == x.stride() and back.data_ptr() != host.data_ptr()
        (memory,) = session.host_memory.values()
        assert not memory.nbytes and not memory._free and not memory._under_way


def test_activations_and_state_share_the_host_of_a_forecast_machine():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList(blocks))
    model.forward = lambda x: functools.reduce(lambda x, layer: layer(x), model[1], model[0](x))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = StepOptions("exact", offload_optimizer=True, memory="1.*=offload")

    def lowered(host_memory):
        step = trace_step(model, mse, torch.zeros(64, 8), optimizer, room=0.0).program.main
        run_passes(step, options, target=Target("cpu", simulated=True, host_memory=host_memory))
        return sum(node.args[0].meta["val"].nbytes for node in step.graph.nodes if node.target is OFFLOAD_BEGIN)

    state, gone = 2 * 4 * 5 * (64 + 8), lowered(2**20)
    assert gone and lowered(state + gone) == gone
    with pytest.raises(ValueError, match=r"^offloading needs .* of host memory for each rank"):
        lowered(state + gone - 1)
