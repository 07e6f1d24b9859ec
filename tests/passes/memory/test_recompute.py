"""Recomputation lowers memory by what its policies say, and computes again only what gives the same bits."""

import functools
import re
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.capture import phase_of
from stepgraph.costs.hardware import GPUS
from stepgraph.costs.memory import estimate_memory
from stepgraph.graph.facts import is_mutating, is_random, tensor_bytes
from stepgraph.graph.values import Parameter
from stepgraph.lower import StepSpec, lower, peak_bytes_by_policy
from stepgraph.models import Llama3Config, next_token_loss
from stepgraph.passes import StepOptions, Target, configured, get, parse_policy, run_passes
from stepgraph.passes.memory.recompute import MemoryPolicy, Plan

aten = torch.ops.aten
POLICIES = ["none", "selective", "full"]
DEEP = Llama3Config(dim=32, n_layers=8, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, max_seq_len=128)


@functools.cache
def deep_step(tools):
    """An 8-layer Llama on (4, 128) tokens, captured without an optimizer."""
    torch.manual_seed(0)
    model, batch = stepgraph.models.Llama3(DEEP), tools.tokens(vocab=64, length=128)[0]
    return tools.trace(model, tools.next_token_loss, batch), [*model.parameters(), *model.buffers(), *batch.values()]


def with_policy(tools, step, text):
    copy = tools.copied(step)
    run_passes(copy, configured("exact", memory=text))
    return copy


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that operators made and that is still alive; ``peak`` is the most."""

    def __init__(self, inputs):
        super().__init__()
        self.live = {t.untyped_storage().data_ptr() for t in inputs}
        self.bytes = self.peak = sum(t.untyped_storage().nbytes() for t in inputs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor):
                self._see(value.untyped_storage())
        return result

    def _see(self, storage):
        place, size = storage.data_ptr(), storage.nbytes()
        if size and place not in self.live:
            self.live.add(place)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._drop, place, size)

    def _drop(self, place, size):
        self.live.discard(place)
        self.bytes -= size


def measured_peak(step, inputs):
    inputs = [t.detach().clone() for t in inputs]
    with torch.no_grad(), LiveBytes(inputs) as count:
        step.module(*inputs)
    return count.peak


@pytest.mark.parametrize("policy", [*POLICIES, "budget=0.5"])
def test_estimated_peak_is_the_measured_peak(tools, policy):
    """Tolerance 1%: the estimate leaves out only what an operator allocates and frees inside itself."""
    step, inputs = deep_step(tools)
    step = with_policy(tools, step, policy)
    assert estimate_memory(step.graph).peak == pytest.approx(measured_peak(step, inputs), rel=0.01)


def test_a_stronger_policy_keeps_less_and_peaks_lower(tools):
    step, inputs = deep_step(tools)
    steps = [with_policy(tools, step, policy) for policy in POLICIES]
    saved = [estimate_memory(s.graph).saved for s in steps]
    peaks = [measured_peak(s, inputs) for s in steps]
    assert saved[0] > 1.5 * saved[1] > 1.5 * saved[2] and peaks[0] > peaks[1] > peaks[2]
    # What is recomputed does not pile up: the peak falls by nearly as much as is no longer kept.
    assert peaks[0] - peaks[2] > 0.8 * (saved[0] - saved[2])


def test_full_keeps_only_what_enters_each_block(tools):
    step, _ = deep_step(tools)
    plan = Plan(step)
    kept = plan.kept(plan.dropped("full"))
    inside = sum(tensor_bytes(n) for n in kept if plan.block[n] is not None)
    block_input = 4 * 128 * DEEP.dim * 4
    eps_sums = 2 * DEEP.n_layers * 4 * 128 * 4  # `mean.add_(eps)` of each norm is written in place, so it is kept
    assert inside <= DEEP.n_layers * block_input + eps_sums
    assert plan.kept_bytes(plan.dropped("full")) == sum(map(tensor_bytes, kept))


def test_full_holds_one_block_at_a_time(tools):
    """The peak is that of one block's recomputed results on top of the kept ones and the gradients made so far."""
    step, _ = deep_step(tools)
    full, none = with_policy(tools, step, "full"), with_policy(tools, step, "none")
    kept, everything = estimate_memory(full.graph), estimate_memory(none.graph)
    one_block = (everything.saved - kept.saved) / DEEP.n_layers
    gradients = sum(tensor_bytes(n) for n in step.placeholders(Parameter))
    assert kept.peak < kept.inputs + kept.saved + gradients + 3 * one_block


def test_copies_stand_just_before_their_first_reader(tools):
    step, _ = deep_step(tools)
    step = with_policy(tools, step, "full")
    nodes = list(step.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    copies = [n for n in nodes if "recomputes" in n.meta]
    assert len(copies) > 100
    for node in copies:
        assert phase_of(node) == "backward"
        first = min(position[user] for user in node.users)
        # Between a copy and its first reader stand only other copies, made for the same reader.
        assert all("recomputes" in n.meta for n in nodes[position[node] + 1 : first])


def test_forward_drops_what_it_made_for_backward_alone(tools):
    step, _ = deep_step(tools)
    for policy in POLICIES:
        rewritten = with_policy(tools, step, policy)
        assert all(n.users or is_mutating(n) for n in rewritten.nodes("forward"))


@pytest.mark.parametrize("text", ["budget=0.4", "budget=0.7", "budget=0.0015GiB", "budget=0.003GiB"])
def test_budget_is_met(tools, text):
    step, _ = deep_step(tools)
    policy = parse_policy(text)
    everything = Plan(step).kept_bytes(set())
    limit = policy.budget * (everything if policy.budget_is_fraction else 2**30)
    rewritten = with_policy(tools, step, text)
    assert estimate_memory(rewritten.graph).saved <= limit
    again = sum("recomputes" in n.meta for n in rewritten.nodes())
    assert 0 < again < sum("recomputes" in n.meta for n in with_policy(tools, step, "full").nodes())


def test_budget_of_everything_recomputes_nothing(tools):
    step, _ = deep_step(tools)
    assert not any("recomputes" in n.meta for n in with_policy(tools, step, "budget=1").nodes())


@pytest.mark.parametrize("text, unit", [("budget=0.01", ""), ("budget=0.0001GiB", "GiB")])
def test_budget_that_cannot_be_met_says_the_least_and_that_is_enough(tools, text, unit):
    step, _ = deep_step(tools)
    with pytest.raises(ValueError, match=r"cannot be met.*remain; ask for at least budget=[\d.]+" + unit) as error:
        with_policy(tools, step, text)
    assert "\n" not in str(error.value)
    with_policy(tools, step, re.search(r"budget=\S+", str(error.value))[0])


def test_peak_bytes_by_policy_are_those_measured(tools):
    step, inputs = deep_step(tools)
    torch.manual_seed(0)
    model, batch = stepgraph.models.Llama3(DEEP), tools.tokens(vocab=64, length=128)[0]
    peaks = peak_bytes_by_policy(StepSpec(model, tools.next_token_loss, batch, passes="exact"))
    assert list(peaks) == POLICIES
    for policy, peak in peaks.items():
        assert peak == pytest.approx(measured_peak(with_policy(tools, step, policy), inputs), rel=0.01)


class Mixed(nn.Module):
    """Blocks with random, mutating and many-output operators."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x):
            h = torch.relu(self.linear(x))
            noise = torch.rand_like(h)
            self.mean.lerp_(h.detach().mean(0), 0.1)
            top, index = torch.topk(h * noise, 4)
            h = self.norm(h + self.mean).gather(1, index) * top
            return x + torch.nn.functional.dropout(h.repeat(1, 4), 0.5)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_random_and_writing_nodes_are_never_computed_again(tools, policy):
    torch.manual_seed(0)
    model, batch = Mixed(), tools.vectors(6, 16)[0]
    step = tools.trace(model, tools.mse, batch)
    run_passes(step, [get("recompute", policy=policy)])
    copies = [n for n in step.nodes() if "recomputes" in n.meta]
    assert copies and not any(is_random(n) or is_mutating(n) for n in copies)
    forward = [n for n in step.nodes() if is_random(n)]
    assert [phase_of(n) for n in forward] == ["forward"] * len(forward)


def test_a_result_whose_source_is_written_later_is_kept(tools):
    """Also where the operator has several results, and where the write goes through a view."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 4))

        def forward(self, x):
            h = x * 2
            e = torch.exp(h)
            values, index = h.max(dim=1)
            out = self.w * e + self.w * values[:, None] + self.w * index[:, None]
            h.view(-1)[0] = 100.0
            return out + h

    batch = {"x": torch.randn(3, 4), "y": torch.zeros(3, 4)}
    model = Written()
    step = tools.trace(model, tools.mse, batch)
    run_passes(step, [get("recompute", policy="full")])
    again = {n.target for n in step.nodes() if "recomputes" in n.meta}
    assert aten.exp.default not in again and aten.max.dim not in again
    tools.mse(model, batch).backward()
    assert torch.equal(step.module(model.w.detach(), *batch.values())[1], model.w.grad)


def test_attention_without_dropout_is_not_random(tools):
    def attention(p):
        q = torch.randn(1, 2, 8, 4)
        function = functools.partial(aten._scaled_dot_product_flash_attention_for_cpu, is_causal=True)
        step = tools.by_hand(lambda q: (function(q, q, q, p)[0],), q)
        return next(n for n in step.nodes() if "attention" in str(n.target))

    assert not is_random(attention(0.0)) and is_random(attention(0.5))


def test_the_models_checkpoint_calls_are_honoured(tools):
    batch, kept = tools.vectors(64, 32)[0], {}
    for name, wrap in {
        "plain": None,
        "new": functools.partial(checkpoint, use_reentrant=False),
        "old": functools.partial(checkpoint, use_reentrant=True),
    }.items():
        # A first layer: the old flavour needs inputs that require gradients.
        model = nn.Sequential(nn.Linear(32, 32), tools.Tower(wrap, p=0.0, width=32))
        step = tools.trace(model, tools.mse, batch)
        (report,) = run_passes(step, ["recompute"])
        kept[name] = estimate_memory(step.graph).saved
        assert (report.changed > 0) == (name != "plain")
        assert any("torch.utils.checkpoint" in note for note in report.notes) == (name != "plain")
    assert kept["new"] < 0.5 * kept["plain"] and kept["old"] <= kept["new"] * 1.2


def test_model_without_blocks_is_one_block(tools):
    model = tools.CASES["no blocks"].build()
    step = tools.trace(model, tools.mse, tools.vectors(6, 12)[0])
    assert step.blocks == []
    (report,) = run_passes(step, [get("recompute", policy="full")])
    assert report.changed and "treated as one block" in report.notes[0]


def test_recomputing_never_keeps_more(tools):
    """A small sum of a large, otherwise unneeded result is better kept than computed again from it."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(8, 512, bias=False) for _ in range(2))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return sum(self.scale * up(x).sum(1, keepdim=True) for up in self.up) + x

    step = tools.trace(Sums(), tools.mse, tools.vectors(16, 8)[0])
    plan = Plan(step)
    none, selective, full = (plan.kept_bytes(plan.dropped(p)) for p in POLICIES)
    assert none >= selective >= full


class Adapted(nn.Module):
    """A frozen layer with two adapters, as LoRA has one: backward reads a sum of three products."""

    def __init__(self):
        super().__init__()
        self.frozen, self.out = nn.Linear(8, 32, bias=False).requires_grad_(False), nn.Linear(32, 8, bias=False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x):
        return x + self.out(nn.functional.silu(self.frozen(x) + self.b(self.a(x)) + self.b(self.a(x * 0.5))))


def test_a_sum_of_products_is_kept_and_what_follows_it_is_not(tools):
    """To compute the sum again all products would be kept: `selective` then kept more than `none`, and gave way."""
    plan = Plan(tools.trace(nn.Sequential(Adapted(), Adapted()), tools.mse, tools.vectors(16, 8)[0]))
    none, selective = (plan.kept_bytes(plan.dropped(p)) for p in POLICIES[:2])
    assert plan.kept_bytes(plan.selective()) > none > selective


@pytest.mark.parametrize(
    "text", ["half", "full=1", "budget", "budget=", "budget=-1", "budget=0", "budget=nan", "budget=inf", "budget=8MB"]
)
def test_bad_policies_are_refused_in_one_line(text):
    with pytest.raises(ValueError, match="allowed: none, full, selective, budget=") as error:
        parse_policy(text)
    assert "\n" not in str(error.value)


def test_policies_read_as_documented():
    assert parse_policy("none") == MemoryPolicy("none")
    assert parse_policy("budget=8GiB") == MemoryPolicy("budget", 8.0)
    assert parse_policy("budget=8") == MemoryPolicy("budget", 8.0)
    assert parse_policy("budget=0.5") == MemoryPolicy("budget", 0.5, budget_is_fraction=True)
    assert parse_policy("budget=0.5GiB") == MemoryPolicy("budget", 0.5)


def test_bad_options_of_the_pass_are_refused():
    with pytest.raises(ValueError, match="unknown memory policy 'ful': did you mean 'full'"):
        get("recompute", policy="ful")
    with pytest.raises(ValueError, match="not a positive number"):
        get("recompute", policy="budget", budget=0.0)


def test_no_policy_computes_the_loss_again():
    """Backward begins with a cross entropy, which is fused with its gradient where it is not computed again."""
    model = stepgraph.models.Llama3(DEEP)
    batch = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("tokens", "targets")}
    for memory in ("selective", "full", "budget=0.6"):
        spec = StepSpec(model, next_token_loss, batch, passes=StepOptions(memory=memory))
        log = lower(spec, Target.forecast(GPUS["h100"])).program.main.log
        reports = {report.name: report for report in log}
        assert reports["recompute"].changed > 0
        assert (reports["fuse_loss"].matched, reports["fuse_loss"].changed) == (1, 1), memory
