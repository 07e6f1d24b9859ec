"""A step peaks where it was asked to: results are kept, computed again or offloaded, with the same bits."""

import dataclasses
import functools
import re

import pytest
import torch

import stepgraph
from stepgraph.costs.hardware import GPUS, host_copy_seconds
from stepgraph.costs.memory import estimate_memory, peak_bytes
from stepgraph.costs.timeline import assumed_timeline
from stepgraph.graph.facts import is_view, tensor_bytes
from stepgraph.graph.host_copies import OFFLOAD_BEGIN, OFFLOAD_END, RELOAD_BEGIN, RELOAD_END, is_host_copy
from stepgraph.kernels.comm.exchange import Session
from stepgraph.kernels.offload import HostMemory, host_memory
from stepgraph.lower import StepSpec, copied, rewrite, trace
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions, Target, configured, parse_policy, run_passes
from stepgraph.passes.compile.blocks import consecutive
from stepgraph.passes.memory.fit import Fit, FitOptions
from stepgraph.passes.memory.policy import MemoryPolicy, check_modules

GPU = GPUS["h200"]
TARGET = Target.forecast(GPU)
SMALL = Llama3Config(dim=512, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=1536, vocab_size=256, max_seq_len=2048)
TINY = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, max_seq_len=64)


@functools.cache
def small():
    """(spec, its captured program, peak with everything kept, under ``full``) of a Llama on (4, 2048) tokens."""
    model, ids = Llama3(SMALL).bfloat16(), torch.zeros(4, 2048, dtype=torch.int64)
    spec = StepSpec(model, next_token_loss, {"tokens": ids, "targets": ids}, passes=StepOptions("exact"))
    program = trace(spec, TARGET).program
    peaks = [peak_bytes(fitted(memory, spec, program)) for memory in ("none", "full")]
    return spec, program, *peaks


def fitted(memory, spec=None, program=None):
    spec, program = (spec, program) if spec else small()[:2]
    spec = dataclasses.replace(spec, passes=dataclasses.replace(spec.passes, memory=memory))
    return rewrite(copied(program), spec, TARGET)


def report_of(program):
    return next(report for report in program.main.log if report.name == "fit_memory")


def copies(step):
    return [node for node in step.graph.nodes if is_host_copy(node)]


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.3, 0.1])
def test_the_simulated_peak_is_under_the_one_asked_for(share):
    """Between full recomputation and none. The allowance is 1% of activations and 64 MiB."""
    *_, none, full = small()
    asked = full + share * (none - full)
    program = fitted(f"peak={(asked + 64 * 2**20) * 1.01 / 2**30:.6f}GiB")
    report, peak = report_of(program), peak_bytes(program)
    assert 0.9 * asked < peak <= 1.01 * asked and report.changed
    seconds = [price for _, price in report.peak_curve]
    peaks = [peak for peak, _ in report.peak_curve]
    assert peaks == sorted(peaks, reverse=True) and min(peaks) < asked < max(peaks) and seconds[0] == 0 < seconds[-1]
    assert any(re.match(r"forecast peak of the step and its cost.* GiB \+0 ms, ", note) for note in report.notes)
    assert any(re.match(r"(recomputed|offloaded): \d+ x .+ of \S+ in layers\.\*", note) for note in report.notes)


def test_the_graph_is_looked_at_once_where_nothing_is_computed_again(monkeypatch):
    """Of a long sequence in tiles each look takes seconds."""
    looks, init = [], Fit.__init__
    monkeypatch.setattr(Fit, "__init__", lambda self, *given: looks.append(given) or init(self, *given))
    fitted("layers.*=offload")
    assert len(looks) == 1


def test_what_is_offloaded_is_waited_for_by_nothing():
    """Attention is dear to compute again and its copies hide behind other layers."""
    *_, full = small()
    program = fitted(f"peak={(full + 64 * 2**20) / 2**30:.6f}GiB")
    moved = assumed_timeline(program.main.graph).copies
    assert (
        moved and sum(copy.exposed_seconds for copy in moved) < 0.05 * assumed_timeline(program.main.graph).step_seconds
    )
    assert len(moved) % 2 == 0 and sum(copy.back for copy in moved) == len(moved) // 2


def test_a_peak_that_cannot_be_met_says_the_least_and_that_is_enough():
    with pytest.raises(ValueError, match=r"memory peak=0.01GiB cannot be met: .*; ask for at least peak=") as error:
        fitted("peak=0.01GiB")
    assert "\n" not in str(error.value)
    fitted(re.search(r"peak=[\d.]+GiB(?=,)", str(error.value))[0])


def test_what_is_offloaded_may_be_computed_again_instead():
    """Where copies that come back fill the memory: a policy of copies alone was the least that a search could reach."""
    program = copied(small()[1])
    fit = Fit(program.main, FitOptions(compiled=True))
    both = fit.movable & fit.again
    copied_peak = fit._set(set(), [*fit.movable])
    fit.solve(0.0)
    assert fit.peak() < copied_peak and both & fit.dropped and not fit.gone & fit.dropped


def test_a_peak_that_fits_changes_nothing():
    program = fitted("peak=100%")
    assert report_of(program).changed == 0 and peak_bytes(program) == small()[2]


def trained(memory, passes="exact", steps=3, **changes):
    torch.manual_seed(0)
    model = Llama3(dataclasses.replace(TINY, **changes))
    ids = torch.randint(64, (4, 65))
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if memory is None:
        losses = []
        for _ in range(steps):
            loss = next_token_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, list(model.parameters()), None
    options = StepOptions(passes, memory=memory, inductor="off")
    step = stepgraph.capture(model, next_token_loss, batch, optimizer, passes=options, accumulate=1)
    return [step(batch) for _ in range(steps)], list(model.parameters()), step


POLICIES = ["layers.*=offload", "full,layers.*=offload", "layers.*.mlp=recompute,layers.1=offload", "peak=0.0014GiB"]


@pytest.mark.parametrize("memory", POLICIES)
def test_training_is_bitwise_eager(memory):
    losses, parameters, _ = trained(None)
    found, own, step = trained(memory)
    assert all(map(torch.equal, losses, found)) and all(map(torch.equal, parameters, own))
    assert any(report.name == "fit_memory" and report.changed for report in step.report)


def test_host_memory_is_allocated_once():
    _, _, step = trained("full,layers.*=offload")
    (memory,) = step._session.host_memory.values()
    graph = step.graphs["step"] if "step" in step.graphs else next(iter(step.graphs.values()))
    gone = [node.args[0] for node in copies(graph) if node.target is OFFLOAD_BEGIN]
    assert memory.nbytes == sum(map(tensor_bytes, gone)) > 0


def test_exceptions_name_modules(tools):
    """``full`` but for the first layer's feed-forward, whose results stay."""
    torch.manual_seed(0)
    model, batch = Llama3(TINY), tools.tokens(vocab=64, length=64)[0]
    step = tools.trace(model, next_token_loss, batch)

    def again(memory):
        copy = tools.copied(step)
        run_passes(copy, configured("exact", memory=memory))
        again = [node for node in copy.nodes() if "recomputes" in node.meta and not is_view(node)]
        paths = [f"{node.meta['stepgraph'].path}." for node in again]
        return *(sum(f"layers.{i}.mlp." in path for path in paths) for i in (0, 1)), len(paths)

    first, second, _ = again("full")
    assert first and second and again("full,layers.0.mlp=keep")[:2] == (0, second)
    first, second, everything = again("none,layers.*.mlp=recompute")
    assert first + second == everything and first and second


def test_copies_lie_between_the_pieces_of_a_compiler():
    """Where they begin and end, no run of operators that Inductor compiles is split."""
    spec, program = small()[:2]
    spec = dataclasses.replace(spec, passes=StepOptions(memory="layers.*=offload", disable_pass=("rematerialize",)))
    moved = rewrite(copied(program), spec, TARGET).main
    spec = dataclasses.replace(spec, passes=StepOptions(disable_pass=("rematerialize",)))
    plain = rewrite(copied(program), spec, TARGET).main

    def pieces(step):
        return len(consecutive(step, lambda node: None if is_host_copy(node) else "step", cut=True))

    assert copies(moved) and pieces(moved) == pieces(plain)


def test_offload_frees_device_memory_and_uses_none():
    plain, moved = fitted("none").main.graph, fitted("layers.*=offload").main.graph
    assert estimate_memory(moved).peak < 0.8 * estimate_memory(plain).peak
    order = [node.target for node in moved.nodes if is_host_copy(node)]
    assert {order.count(t) for t in (OFFLOAD_BEGIN, OFFLOAD_END, RELOAD_BEGIN, RELOAD_END)} == {len(order) // 4}


def test_host_memory_that_does_not_suffice_is_one_line():
    spec, program = small()[:2]
    spec = dataclasses.replace(spec, passes=StepOptions("exact", memory="layers.*=offload"))
    with pytest.raises(
        ValueError, match=r"^offloading needs 0\.\d GiB of host memory for each rank and 0.0 GiB are free"
    ):
        rewrite(copied(program), spec, dataclasses.replace(TARGET, host_memory=2**20))


def test_operators_copy_as_values_lie_and_use_buffers_again():
    with Session() as session:
        x = torch.randn(4, 6).t()
        ops = torch.ops.stepgraph
        for _ in range(3):
            token = ops.offload_begin(x)
            host = ops.offload_end(token, x)
            back = ops.reload_end(ops.reload_begin(host, x.device))
            assert torch.equal(back, x) and back.stride() == x.stride() and back.data_ptr() != x.data_ptr()
        memory = host_memory(x.device)
        assert session.host_memory == {x.device: memory} and memory.nbytes == x.nbytes
        ops.offload_begin(x)  # a step that is broken off
        session.forget(())
        ops.offload_begin(x)
        assert memory.nbytes == x.nbytes
        with pytest.raises(RuntimeError, match="is not dense"):
            ops.offload_begin(torch.zeros(4, 6)[:, ::2])
    assert isinstance(memory, HostMemory) and host_copy_seconds(2**30) > 0.01


def test_policies_are_read():
    assert parse_policy("peak=70GiB") == parse_policy("peak=70") == MemoryPolicy("peak", peak=70.0)
    assert parse_policy("peak=90%") == MemoryPolicy("peak", peak=0.9, peak_is_fraction=True)
    modules = (("layers.*.mlp", "recompute"), ("layers.0", "keep"))
    assert parse_policy("layers.*.mlp=recompute, layers.0=keep") == MemoryPolicy(modules=modules)
    assert parse_policy("full,layers.0=keep").policy == "full"


@pytest.mark.parametrize(
    "text", ["peak", "peak=", "peak=-1", "peak=0%", "peak=101%", "peak=7TB", "a=drop", "a..b=keep", "a=keep,full"]
)
def test_other_policies_are_refused(text):
    match = r"^(unknown memory policy|memory peak)[ =].*allowed: none, full.*peak="
    with pytest.raises(ValueError, match=match) as error:
        StepOptions(memory=text) and parse_policy(text)
    assert "\n" not in str(error.value)


def test_modules_that_are_not_there_are_refused():
    with pytest.raises(
        ValueError, match=r"^memory layers.\*.mpl=keep names no module of the model: did you mean layers"
    ):
        check_modules([("layers.*.mpl", "keep")], ["", "layers", "layers.0", "layers.0.mlp"])
    with pytest.raises(ValueError, match="names no module of the model: the model has embed"):
        trained("blocks.*=offload")


def test_a_share_of_unknown_memory_is_refused():
    with pytest.raises(ValueError, match=r"^memory peak=90% is a share of a GPU's memory, which is not known here"):
        trained("peak=90%")


def test_a_saved_step_is_found_again_with_a_little_more_free_host_memory():
    fit = next(p for p in configured(memory="peak=8GiB") if p.name == "fit_memory")
    here = Target("cpu", 8 * 2**30, 0, False)
    near, far, none = (
        fit.for_target(fit.options, dataclasses.replace(here, host_memory=gib and gib * 2.0**30)).host
        for gib in (101.3, 50, None)
    )
    assert near == fit.for_target(fit.options, dataclasses.replace(here, host_memory=102.7 * 2**30)).host == 96 * 2**30
    assert far == 48 * 2**30 and none is None
