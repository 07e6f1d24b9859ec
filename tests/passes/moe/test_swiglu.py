"""SwiGLU of experts' rows by our kernels: eager's bits, on ranks of experts and in models by hand, and what stays."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.kernels.moe import grouped_mm
from stepgraph.models import family_of
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import next_token_loss, parallelize
from stepgraph.passes import StepOptions, chosen, configured, get
from stepgraph.passes.memory.recompute import Plan
from stepgraph.passes.order import ORDER
from tests.distributed.ranks import make_mesh, on_ranks
from tests.distributed.test_experts import VOCAB, adamw, assert_same_state, batch_of, own_batch
from tests.models.moe_models import DEEPSEEK, our_model

ours = torch.ops.stepgraph
KERNELS = (ours.swiglu_rows.default, ours.swiglu_rows_backward.default)
LAYERS = 1
CONFIG = dataclasses.replace(DEEPSEEK, n_layers=LAYERS, n_dense_layers=0, vocab_size=VOCAB)


def with_swiglu(passes):
    """``passes`` and, in its place among them, the pass, which then runs on a CPU too."""
    mine = dataclasses.replace(get("expert_swiglu"), needs_cuda=False)
    return sorted([*(p for p in passes if p.name != mine.name), mine], key=lambda p: ORDER.index(p.name))


def report_of(step, name="expert_swiglu"):
    return next(r for r in step.report if r.name == name)


def count(step):
    return [len(step.graph.graph.find_nodes(op="call_function", target=target)) for target in KERNELS]


# Models of ours


def check_ranks(exchange, chunks, memory):
    """Losses, parameters and buffers of two steps are those without the pass, bit for bit; nothing more is kept."""
    mesh = make_mesh("fsdp=2,ep=2")
    plain = configured("exact", memory=memory, cuda_graph=False)
    runs = []
    for passes in (plain, with_swiglu(plain)):
        model = our_model(CONFIG)
        options = {"expert_exchange": exchange, "expert_chunks": chunks, "param_dtype": torch.bfloat16}
        parallelize(model, mesh, family_of(CONFIG).tp_plan(CONFIG), **options)
        step = stepgraph.capture(model, next_token_loss(mesh), own_batch(mesh, 0), adamw(model), passes=passes)
        runs.append(([step(own_batch(mesh, i)) for i in range(2)], model, step))
    (losses, model, before), (found, other, step) = runs
    assert all(map(torch.equal, losses, found))
    assert_same_state(model, other)
    report, n = report_of(step), LAYERS * chunks
    assert report.summary == f"{n} of {n} SwiGLUs of expert rows in our kernels" and not report.notes
    kept, least = (Plan(s.graph).kept_bytes(set()) for s in (before, step))
    assert 0 < least <= kept
    assert count(before) == [0, 0] and count(step) == [n if memory == "none" else 2 * n, n]


def _check_ranks():
    check_ranks("collectives", 1, "none")
    check_ranks("symmetric", 2, "full")


def _check_more():
    check_ranks("collectives", 2, "full")
    check_ranks("symmetric", 1, "none")
    check_ranks("collectives", 1, "selective")


def test_experts_on_two_ranks():
    on_ranks(2, _check_ranks)


@pytest.mark.long
def test_experts_on_two_ranks_otherwise():
    on_ranks(2, _check_more)


def test_experts_that_are_weighted_before_their_last_product_stay():
    step = stepgraph.capture(
        our_model(CONFIG), one_rank_loss, batch_of(0, 1), passes=with_swiglu(configured("default", inductor="off"))
    )
    assert report_of(step, "weight_experts").changed == LAYERS
    report = report_of(step)
    assert (report.matched, report.changed, report.notes, count(step)) == (0, 0, [], [0, 0])


def test_experts_wider_than_the_model_are_not_weighted_and_match():
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, ffn_dim=CONFIG.dim + 8))
    plain, runs = [p for p in configured(inductor="off") if p.name == "weight_experts"], []
    for passes in (plain, with_swiglu(plain)):
        model = our_model(config)
        step = stepgraph.capture(model, one_rank_loss, batch_of(0, 1), passes=passes)
        runs.append([step(batch_of(0, 1)), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *runs)) and report_of(step).changed == LAYERS
    assert report_of(step, "weight_experts").changed == 0


# Models by hand

R, USED, D, WIDTH, EXPERTS = 12, 9, 6, 5, 3


class Experts(nn.Module):
    """``gated(gate_up)``: h, and what else the loss counts, or None. ``frozen``: gate and up have no gradient."""

    def __init__(self, gated, frozen=False, offsets=None):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, D, generator=generator), requires_grad=not frozen)
        self.down = nn.Parameter(torch.randn(EXPERTS, D, WIDTH, generator=generator))
        self.gated, self.other = gated, offsets

    def forward(self, x, offsets):
        h, more = self.gated(grouped_mm(x, self.gate_up.mT, offsets))
        y = grouped_mm(h, self.down.mT, offsets if self.other is None else offsets - self.other)
        return y if more is None else torch.cat([y, more], 1)


def loss_fn(model, batch):
    return model(**batch).square().mean()


def by_chunks(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up, None


def by_sizes(gate_up):
    gate, up = gate_up.split([WIDTH, WIDTH], dim=1)
    return up * F.silu(gate), None


def by_slices(gate_up):
    return F.silu(gate_up[:, :WIDTH]) * gate_up[:, WIDTH:], None


def returned(gate_up):
    h, _ = by_chunks(gate_up)
    return h, h


def up_returned(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up, up


def silu_returned(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    silu = F.silu(gate)
    return silu * up, silu


def product_returned(gate_up):
    return by_chunks(gate_up)[0], gate_up


def gate_behind_up(gate_up):
    up, gate = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up, None


def of_a_third(gate_up):
    gate, up, more = gate_up.split([WIDTH - 1, WIDTH - 1, 2], dim=-1)
    return F.pad(F.silu(gate) * up, (0, 1)), more


def by_gelu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up, None


def batch_by_hand():
    x = torch.randn(R, D, generator=torch.Generator().manual_seed(1))
    return {"x": x, "offsets": torch.tensor([4, 4, USED], dtype=torch.int32)}


def check(model, passes=("expert_swiglu",), compiled=False):
    """The report and the step, whose loss and gradients are eager's: in every bit where nothing else is compiled."""
    batch = batch_by_hand()
    eager = copy.deepcopy(model)
    step = stepgraph.capture(model, loss_fn, batch, passes=with_swiglu([get(name) for name in passes]))
    loss, expected = step(batch), loss_fn(eager, batch)
    expected.backward()
    tolerance = 1e-5 if compiled else 0.0
    torch.testing.assert_close(loss, expected.detach(), rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    return report_of(step), step


@pytest.mark.parametrize("gated", [by_chunks, by_sizes, by_slices])
def test_every_form_of_halves(gated):
    report, step = check(Experts(gated))
    assert (report.matched, report.changed, report.notes, count(step)) == (1, 1, [], [1, 1])
    left = {str(node.target) for node in step.graph.graph.nodes}
    assert not any(name in target for target in left for name in ("silu", "split", "slice", "aten.cat"))


def test_without_a_gradient_forward_alone():
    report, step = check(Experts(by_chunks, frozen=True))
    assert (report.matched, report.changed, report.notes, count(step)) == (1, 1, [], [1, 0])


@pytest.mark.parametrize(
    ("gated", "offsets", "why"),
    [
        (returned, None, "something other than grouped products reads it"),
        (up_returned, None, "something else reads gate, up or silu"),
        (silu_returned, None, "something else reads gate, up or silu"),
    ],
)
def test_what_something_else_reads_stays_and_the_report_says_why(gated, offsets, why):
    report, step = check(Experts(gated, offsets=offsets))
    assert (report.matched, report.changed, count(step)) == (1, 0, [0, 0])
    assert len(report.notes) == 1 and report.notes[0].endswith(f" is left unchanged: {why}")


@pytest.mark.parametrize(
    ("gated", "offsets"),
    [(product_returned, None), (gate_behind_up, None), (of_a_third, None), (by_gelu, None), (by_chunks, 1)],
)
def test_other_forms_are_none_of_it(gated, offsets):
    """Also a product of fewer rows behind it, whose other rows then are no zeros of ours."""
    report, step = check(Experts(gated, offsets=offsets))
    assert (report.matched, report.changed, report.notes, count(step)) == (0, 0, [], [0, 0])


def test_inductor_takes_it():
    report, step = check(Experts(by_chunks), ("remove_noop_views", "dead_code", "inductor"), compiled=True)
    assert report.changed == 1 and report_of(step, "inductor").changed > 2


def test_its_place():
    names = [p.name for p in chosen(StepOptions())]
    assert names.index("weight_experts") < names.index("expert_swiglu") < names.index("recompute")
    assert "expert_swiglu" not in {p.name for p in chosen(StepOptions("exact"))}
    step = stepgraph.capture(Experts(by_chunks), loss_fn, batch_by_hand(), passes=configured(inductor="off"))
    assert report_of(step).line() == "expert_swiglu [numerics]: skipped, the step has no CUDA tensors"
