"""Experts of transformers and of plain torch by our kernels: eager's gradients, and a reason where they stay."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.kernels.moe import combine_rows, gather_rows, grouped_mm, sort_by_expert
from stepgraph.passes import configured

aten, ours = torch.ops.aten, torch.ops.stepgraph
NAMES = (
    "fold_constants", "remove_noop_views", "dedupe_casts", "false_masks", "dead_code", "fuse_experts", "weight_experts",
)  # fmt: skip
PASSES = [p for p in configured(inductor="off") if p.name in NAMES]


def captured(model, loss_fn, batch, passes=PASSES):
    """(step, its reports of the two passes); the gradients are those of one step."""
    model = copy.deepcopy(model)
    step = stepgraph.capture(model, loss_fn, batch, passes=passes)
    loss = step(batch)
    reports = [r for r in step.report if r.name in ("fuse_experts", "weight_experts")]
    return step, reports, loss, [p.grad for p in model.parameters()]


def count(step, target):
    return len(step.graph.graph.find_nodes(op="call_function", target=target))


def compare(model, loss_fn, batch, passes=PASSES, tolerance=1e-5):
    step, reports, loss, grads = captured(model, loss_fn, batch, passes)
    expected = loss_fn(model, batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=tolerance, atol=tolerance)
    right = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    for mine, theirs, (name, _) in zip(grads, right, model.named_parameters(), strict=True):
        if mine is None or theirs is None:
            assert mine is theirs, name
            continue
        assert (mine - theirs).norm() <= tolerance * theirs.norm() + 1e-7, name
    return step, reports


# transformers


def check_transformers(name):
    pytest.importorskip("transformers")
    from tests.capture.test_experts import batches, build, loss_fn

    model, (batch, *_) = build(name), batches()
    step, (fused, weighted) = compare(model, loss_fn, batch)
    layers = count(step, ours.sort_by_expert.default)
    assert layers >= 1 and not fused.notes and fused.changed == fused.matched == 7 * layers
    assert f"{layers} routings, {2 * layers} gathers, {2 * layers} combines, {6 * layers} grouped" in fused.line()
    for target in (aten.sort.default, aten.sort.stable, aten._grouped_mm.default, aten.histc.default):
        assert not count(step, target)
    if name == "GptOss":  # whose last product is followed by a bias
        assert (weighted.matched, weighted.changed) == (layers, 0) and count(step, aten.index_put.default) == 2 * layers
        assert all("not made by a grouped product" in note for note in weighted.notes)
    elif name in ("Mixtral", "Olmoe", "Jamba"):  # wide experts
        assert (weighted.matched, weighted.changed) == (layers, 0) and "wider than" in weighted.notes[0]
    else:
        assert weighted.matched == weighted.changed == layers and not weighted.notes
        assert not count(step, aten.index_put.default) and not count(step, ours.combine_rows_backward.default)


def test_deepseek_v3_of_transformers():
    check_transformers("DeepseekV3")


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "Olmoe", "GptOss", "Jamba"])
def test_other_transformers(name):
    check_transformers(name)


def test_transformers_in_bf16():
    """Gradients as close to those of fp32 as eager's are."""
    pytest.importorskip("transformers")
    from tests.capture.test_experts import batches, build, loss_fn

    torch.manual_seed(0)
    model, (batch, *_) = build("DeepseekV3").bfloat16(), batches()
    wide = copy.deepcopy(model).float()
    exact = torch.autograd.grad(loss_fn(wide, batch), list(wide.parameters()))
    eager = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
    _, (fused, weighted), _, mine = captured(model, loss_fn, batch)
    assert fused.changed == 7 and weighted.changed == 1
    for found, theirs, right in zip(mine, eager, exact, strict=True):
        assert (found - right).norm() <= 2 * (theirs - right).norm() + 2e-2 * right.norm() + 1e-6


# Plain torch: the same experts, changed in one thing each


class Layer(nn.Module):
    """Experts as transformers computes them. ``change``: what is done otherwise."""

    def __init__(self, change="", D=8, width=8, experts=4):
        super().__init__()
        self.inlet, self.router, self.change, self.experts = nn.Linear(D, D), nn.Linear(D, experts), change, experts
        self.up, self.down = nn.Parameter(torch.randn(experts, D, width)), nn.Parameter(torch.randn(experts, width, D))

    def forward(self, x):
        change, x, K = self.change, self.inlet(x), 1 if self.change == "one slot" else 2
        N = x.shape[0]
        weights, chosen = self.router(x).softmax(-1).topk(K)
        if change == "experts not of topk":
            chosen = (chosen * 2) % self.experts
        if change == "topk of others":
            chosen = F.pad(self.router(x), (0, 1), value=-9.0).topk(K)[1]
        if change == "written choice":
            chosen = chosen.clone()
            chosen[:, 0].fill_(1)
        ids, permutation = chosen.reshape(-1).sort(
            descending=change == "descending", stable=change.startswith("written")
        )
        bins = self.experts
        counts = torch.histc(ids.float(), bins=bins, min=0, max=bins if change == "wider histogram" else bins - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        tokens = permutation % N if change == "other tokens" else permutation // K
        if change == "written tokens":
            tokens[0] = 0
        rows = x[tokens]
        rows = torch._grouped_mm(torch._grouped_mm(rows, self.up, offs=offsets).tanh(), self.down, offs=offsets)
        if change == "two readers":
            rows = rows + rows.detach().mean(0)
        w = weights.reshape(-1)[permutation].unsqueeze(-1)
        if change == "written weights":
            w[0] *= 0.5
        made, rows = rows, self.inlet.bias if change == "weighted bias" else rows
        weighted = rows * w * w if change == "weighted twice" else rows if change == "unweighted" else w * rows
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(N * K)
        if change == "written places":
            inverse[0] = inverse[1].clone()
        slots = weighted[inverse].view(N, K, -1)
        y = slots.amax(1) if change == "maximum" else slots.sum(1)
        if change == "weighted bias":
            y = y + made.square().sum(0)
        return y + weighted.sum(0) if change == "read sorted" else y


def square_loss(model, batch):
    return (model(batch["x"]) * batch["y"]).sum()


def vectors(N=10, D=8):
    return {"x": torch.randn(N, D), "y": torch.randn(N, D)}


#: By the change: routings, gathers and combines that are ours then, and a text of the notes.
CHANGES = {
    "": (1, 2, 2, None),
    "one slot": (1, 2, 2, None),
    "experts not of topk": (0, 0, 0, "not chosen by topk over the 4"),
    "topk of others": (0, 0, 0, "not chosen by topk over the 4"),
    "descending": (0, 0, 0, "in ascending order"),
    "other tokens": (1, 0, 2, None),
    "two readers": (1, 2, 2, None),
    "weighted twice": (1, 2, 2, None),
    "unweighted": (1, 2, 2, None),
    "weighted bias": (1, 2, 2, None),
    "written choice": (0, 0, 0, "is written to"),
    "written tokens": (1, 0, 2, None),
    "written weights": (1, 2, 2, None),
    "written places": (1, 2, 0, None),
    "maximum": (1, 2, 0, "2 of its readers are left unchanged"),
    "read sorted": (1, 2, 2, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_experts(change):
    torch.manual_seed(1)
    routings, gathers, combines, note = CHANGES[change]
    layer = Layer(change)
    step, (fused, _) = compare(layer, square_loss, vectors())
    assert f"{routings} routings, {gathers} gathers, {combines} combines, 6 grouped products" in fused.summary
    assert (note is None and not fused.notes) or any(note in text for text in fused.notes), fused.notes
    assert count(step, ours.sort_by_expert.default) == routings


def test_other_sorts_are_left_alone():
    class Sorted(nn.Linear):
        def forward(self, x):
            return super().forward(x).sort(-1)[0]

    _, (fused, weighted) = compare(Sorted(8, 8), square_loss, vectors())
    assert (fused.matched, weighted.matched) == (0, 0) and not fused.notes


# Weights before the last product


class Ours(nn.Module):
    """A layer on our operators. ``change``: what is done otherwise."""

    def __init__(self, change="", D=8, width=8, experts=4):
        super().__init__()
        self.router, self.change, self.experts = nn.Linear(D, experts), change, experts
        self.up = nn.Parameter(torch.randn(experts, width, D))
        self.down = nn.Parameter(torch.randn(experts, D, width))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        order, places, counts = sort_by_expert(chosen, self.experts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        hidden = grouped_mm(gather_rows(x, order, places), self.up.mT, offsets).tanh()
        rows = grouped_mm(hidden, self.down.mT, offsets)
        if self.change == "late weights":
            weights = self.router(x).sigmoid().topk(2)[0]
        y = combine_rows(rows, places, weights, None if self.change == "no order" else order)
        return y + rows.mean(0) if self.change == "read rows" else y


@pytest.mark.parametrize(
    ("change", "width", "note"),
    [
        ("", 8, None),
        ("no order", 4, None),
        ("", 16, "wider than the rows after it"),
        ("late weights", 8, "computed after the last product"),
        ("read rows", 8, "something else reads the"),
    ],
)
def test_weights_before_the_last_product(change, width, note):
    torch.manual_seed(2)
    step, (_, weighted) = compare(Ours(change, width=width), square_loss, vectors())
    assert (weighted.matched, weighted.changed) == (1, int(note is None))
    assert (not weighted.notes) if note is None else note in weighted.notes[0]
    # Backward reads the last product's result only where it must.
    assert count(step, ours.combine_rows_backward.default) == int(note is not None)


def test_frozen_experts_and_router():
    """Fewer gradients are wanted: what is left is computed."""
    for frozen in ("router", "down", "up"):
        for build in (Layer, Ours):
            torch.manual_seed(3)
            layer = build()
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
            batch = vectors()
            mine = copy.deepcopy(layer)
            step = stepgraph.capture(mine, square_loss, batch, passes=PASSES)
            step(batch)
            square_loss(layer, batch).backward()
            for a, b in zip(mine.parameters(), layer.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_both_run_by_default_and_not_where_all_is_exact():
    names = [p.name for p in configured()]
    assert names.index("index_gradients") < names.index("fuse_experts") < names.index("weight_experts")
    assert names.index("weight_experts") < names.index("recompute")
    assert not {"fuse_experts", "weight_experts"} & {p.name for p in configured("exact")}
