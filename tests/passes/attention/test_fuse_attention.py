"""Attention written out as products and a softmax becomes a fused kernel's, in whichever way models write it.

The kernels of GPUs get an implementation on the CPU here, by the mathematics, in the strides that they return.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.passes import StepOptions, chosen, get
from stepgraph.passes.attention.mask import Masks
from stepgraph.passes.attention.nodes import BACKWARD

aten = torch.ops.aten
CUDNN = aten._scaled_dot_product_cudnn_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
BF16 = torch.bfloat16
SHAPE = 2, 2, 32, 16  # batch, heads, tokens, channels


def scores_of(q, k, bias, scale):
    scores = scale * (q.float() @ k.float().mT)
    return scores if bias is None else scores + bias.float()


def laid_out(op, results, *args, **kwargs):
    """``results`` as ``op`` lays them out in memory; zeros for what it makes besides."""
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
    made = []
    for i, like in enumerate(op(*args, **kwargs)):
        if isinstance(like, torch.Tensor):
            like = torch.zeros_like(like, device="cpu", memory_format=torch.preserve_format)
            like = like.copy_(results[i]) if i < len(results) else like
        made.append(torch.zeros(()) if like is None else like)
    return tuple(made)


def forward_of(op):
    def run(q, k, v, bias, *rest, scale=None):
        return laid_out(op, [scores_of(q, k, bias, scale).softmax(-1) @ v.float()], q, k, v, bias, *rest, scale=scale)

    return run


def gradients_of(q, k, v, bias, *, dy, scale):
    """The kernels keep the logarithm of each row's sum in fp32, and make the weights of it again."""
    scores, dy = scores_of(q, k, bias, scale), dy.float()
    weights, slope = (scores - scores.logsumexp(-1, keepdim=True)).exp(), dy @ v.float().mT
    slope = weights * (slope - (slope * scores.softmax(-1)).sum(-1, keepdim=True))
    return scale * (slope @ k.float()), scale * (slope.mT @ q.float()), weights.mT @ dy, slope


def cudnn_backward(dy, q, k, v, out, lse, seed, offset, bias, *rest, scale=None):
    results = gradients_of(q, k, v, bias, dy=dy, scale=scale)[:3]
    return laid_out(BACKWARD[CUDNN], results, dy, q, k, v, out, lse, seed, offset, bias, *rest, scale=scale)


def efficient_backward(dy, q, k, v, bias, *rest, scale=None):
    results = gradients_of(q, k, v, bias, dy=dy, scale=scale)
    return laid_out(BACKWARD[EFFICIENT], results, dy, q, k, v, bias, *rest, scale=scale)


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    library = torch.library.Library("aten", "IMPL")
    for op, backward in ((CUDNN, cudnn_backward), (EFFICIENT, efficient_backward)):
        library.impl(op, forward_of(op), "CPU")
        library.impl(BACKWARD[op], backward, "CPU")
    yield
    library._destroy()


class Model(nn.Module):
    """Queries, keys and values of one input by a linear layer, attention by ``write(self, q, k, v)``."""

    def __init__(self, write, dtype=BF16, shape=SHAPE):
        super().__init__()
        self.write, self.shape = write, shape
        _, H, T, D = shape
        self.qkv = nn.Linear(H * D, 3 * H * D)
        self.bias = nn.Parameter(torch.randn(1, H, T, T))
        self.register_buffer("causal", torch.ones(T, T).tril().bool())
        self.to(dtype)

    def forward(self, x):
        B, H, T, D = self.shape
        q, k, v = (part.view(B, T, H, D).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.write(self, q, k, v).transpose(1, 2).reshape(B, T, H * D)


def batch_for(dtype=BF16, shape=SHAPE, device="cpu"):
    B, H, T, D = shape
    x, dy = torch.randn(2, B, T, H * D, device=device)
    return {"x": x.to(dtype), "dy": dy}


def loss_of(model, batch):
    return (model(batch["x"]).float() * batch["dy"]).sum() + 0 * model.bias.float().sum()


# The ways to write it


def causal_bias(self, q):
    least = torch.finfo(q.dtype).min
    return torch.full(self.causal.shape, least, dtype=q.dtype, device=q.device).triu(1)[None, None]


def where_bias(self, q):
    """As transformers makes a mask of its booleans."""
    index = torch.arange(q.shape[2], device=q.device)
    shown = (index[None] <= index[:, None]).expand(q.shape[0], 1, -1, -1)
    return torch.where(shown, torch.tensor(0.0, device=q.device, dtype=q.dtype), torch.finfo(q.dtype).min)


def hugging_face(self, q, k, v):
    weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5 + causal_bias(self, q)
    return torch.matmul(F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype), v)


def shared_keys(self, q, k, v):
    k, v = (x[:, :1, None].expand(-1, 1, *q.shape[1:]).reshape(q.shape) for x in (k, v))
    return hugging_face(self, q, k, v)


def min_gpt(self, q, k, v):
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    return F.softmax(scores.masked_fill(~self.causal, -math.inf), dim=-1) @ v


def gpt_neo(self, q, k, v):
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    hidden = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype, device=q.device)
    return torch.matmul(F.softmax(torch.where(self.causal, scores, hidden), -1).to(v.dtype), v)


def bloom(self, q, k, v):
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    slopes = (torch.arange(T, device=q.device) * 0.1).to(q.dtype).expand(B * H, 1, T)
    scores = slopes.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=D**-0.5).view(B, H, T, T)
    weights = F.softmax((scores + causal_bias(self, q)).float(), -1).to(q.dtype)
    return torch.bmm(weights.view(B * H, T, T), v).view(B, H, T, D)


def divided(self, q, k, v):
    width = q.shape[-1] ** 0.25
    return F.softmax((q / width) @ (k / width).mT, -1) @ (v * 2.0)


def einsum(self, q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(~self.causal, -math.inf).softmax(-1), v)


def einsum_by_tokens(self, q, k, v):
    """Heads behind tokens, as projections give them; with a learned bias."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k) + self.bias
    return torch.einsum("bhij,bjhd->bihd", weights.softmax(-1), v).transpose(1, 2)


def along_rows(self, q, k, v):
    """The pairs of AlphaFold: rows of a square attend each, keys are hidden, and the bias is that of all rows."""
    q, k, v = (x.view(1, 2, *x.shape[1:]) for x in (q, k, v))
    hidden = torch.linspace(0, -3, q.shape[-2], dtype=q.dtype, device=q.device).expand(1, 2, 1, 1, -1)
    scores = torch.einsum("bnhid,bnhjd->bnhij", q, k) * q.shape[-1] ** -0.5 + hidden + self.bias[:, None]
    return torch.einsum("bnhij,bnhjd->bnhid", scores.softmax(-1), v)[0]


def three_dimensions(self, q, k, v):
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q * D**-0.5, k.transpose(1, 2)), -1)
    return torch.bmm(weights, v).view(B, H, T, D)


def einsum_of_three(self, q, k, v):
    """Heads and batch as one dimension, next to which ``einsum`` puts dimensions of size 1."""
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    weights = torch.einsum("bid,bjd->bij", q * D**-0.5, k).softmax(-1)
    return torch.einsum("bij,bjd->bid", weights, v).view(B, H, T, D)


def einsum_of_turned_queries(self, q, k, v):
    """The same, of queries with channels first."""
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    weights = torch.einsum("bdi,bjd->bij", q.mT.contiguous() * D**-0.5, k).softmax(-1)
    return torch.einsum("bij,bjd->bid", weights, v).view(B, H, T, D)


def unet(self, q, k, v):
    """Channels first, as U-Nets of diffusion have them."""
    B, H, T, D = q.shape
    q, k, v = (x.mT.reshape(B * H, D, T) for x in (q, k, v))
    weights = torch.einsum("bct,bcs->bts", q * D**-0.25, k * D**-0.25)
    weights = torch.softmax(weights.float(), dim=-1).type(weights.dtype)
    return torch.einsum("bts,bcs->bct", weights, v).view(B, H, D, T).mT


def vqgan(self, q, k, v):
    """Channels first by products, as of VQGAN and SAGAN."""
    B, H, T, D = q.shape
    q, k, v = (x.mT.reshape(B * H, D, T) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * D**-0.5, dim=2)
    return torch.bmm(v, weights.permute(0, 2, 1)).view(B, H, D, T).mT


def fewer_keys(self, q, k, v):
    """Channels first, of a third as many keys."""
    B, H, T, D = q.shape
    q, k, v = (x.mT.reshape(B * H, D, -1) for x in (q, k[:, :, ::3], v[:, :, ::3]))
    weights = F.softmax(torch.bmm(q.mT * D**-0.5, k), dim=-1)
    return torch.bmm(v, weights.mT).view(B, H, D, T).mT


def bart(self, q, k, v):
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, T, T) + causal_bias(self, q).expand(B, 1, T, T)
    return torch.bmm(F.softmax(scores.view(B * H, T, T), dim=-1), v).view(B, H, T, D)


def windows(self, q, k, v):
    """Swin: the windows of an image hide other keys each; the learned bias is that of all."""
    B, H, T, _ = q.shape
    places = torch.arange(T, device=q.device)
    mask = torch.stack([((places[:, None] - places) > n).to(q.dtype) for n in (1, 4)]) * -100.0
    scores = (q * q.shape[-1] ** -0.5) @ k.mT + self.bias
    scores = scores.view(B // 2, 2, H, T, T) + mask.unsqueeze(1).unsqueeze(0)
    return F.softmax(scores.view(-1, H, T, T), -1) @ v


def grouped(self, q, k, v):
    """A bias of each head within groups of heads."""
    B, H, T, _ = q.shape
    distance = (torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)).abs()
    slopes = torch.linspace(0.1, 0.4, H, device=q.device)[None, :, None, None, None]
    scores = (q @ k.mT * q.shape[-1] ** -0.5).view(B, H, 1, T, T) + (-slopes * distance).to(q.dtype)
    return F.softmax(scores.view(B, H, T, T), -1) @ v


def folded(self, q, k, v):
    """A bias of each head, where heads and batch are one dimension."""
    B, H, T, _ = q.shape
    distance = (torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)).abs()
    slopes = torch.linspace(0.1, 0.4, H, device=q.device).repeat(B)[None, :, None, None]
    scores = (q @ k.mT * q.shape[-1] ** -0.5).view(1, B * H, T, T) + (-slopes * distance).to(q.dtype)
    return F.softmax(scores.view(B, H, T, T), -1) @ v


def positions(self, q, k, v):
    return F.softmax(q @ k.mT * q.shape[-1] ** -0.5 + self.bias, -1) @ v


def of_bias(self, *shape):
    """A table that learns: as many numbers of the bias, over and over again."""
    need = math.prod(shape)
    return self.bias.flatten().repeat(-(-need // self.bias.numel()))[:need].view(shape)


def relative(self, q, k, v):
    """Transformer-XL's and Conformer's: a product of queries and positions, shifted; both are scaled."""
    B, H, T, D = q.shape
    table = of_bias(self, 1, H, D, 2 * T - 1)
    shifted = torch.cat([torch.zeros(B, H, T, 1, dtype=q.dtype, device=q.device), (q + 1) @ table], -1)
    shifted = shifted.view(B, H, 2 * T, T)[:, :, 1:].view(B, H, T, 2 * T - 1)[..., :T]
    return F.softmax((q @ k.mT + shifted) / D**0.5, -1) @ v


def disentangled(self, q, k, v):
    """DeBERTa's: products with relative positions, gathered for each pair."""
    B, H, T, D = q.shape
    table, places = of_bias(self, 1, H, D, T), torch.arange(T, device=q.device)
    index = (places[:, None] - places).clamp(0).expand(B, H, T, T)
    scores = (q @ k.mT) * (2 * D) ** -0.5 + torch.gather(q @ table, -1, index) * (2 * D) ** -0.5
    return F.softmax(scores, -1) @ v


def fused_positions(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.expand(q.shape[0], -1, -1, -1))


def odd_keys(self, q, k, v):
    scores = q @ k[:, :, 1:].mT * q.shape[-1] ** -0.5
    bias = self.bias[..., 1:].clone()
    bias += 1.0
    return F.softmax(scores + bias, -1) @ v[:, :, 1:]


def odd_keys_of_pairs(self, q, k, v):
    """A bias of each pair, as a projection gives it, heads last: what leads on from its gradient is a view."""
    q, k, v = (x[:, :, :9] for x in (q, k, v))
    pairs = torch.einsum("bhid,bhjd->bijh", q, k).tanh().permute(0, 3, 1, 2)
    weights = torch.einsum("bhid,bhjd->bhij", q * q.shape[-1] ** -0.5, k) + pairs
    return F.pad(torch.einsum("bhij,bhjd->bhid", weights.softmax(-1), v), (0, 0, 0, self.shape[2] - 9))


def capped(self, q, k, v):
    scores = 5.0 * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / 5.0)
    later = torch.ones(self.causal.shape, device=q.device).triu(1).bool()
    return F.softmax(scores.masked_fill(later, -math.inf), -1) @ v


def with_sink(less):
    def write(self, q, k, v):
        sinks = self.bias[:, :, :1, :1].expand(q.shape[0], -1, q.shape[2], -1)
        bias = where_bias(self, q) if less else causal_bias(self, q)
        scores = torch.cat([q @ k.mT * q.shape[-1] ** -0.5 + bias, sinks], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values if less else scores
        return F.softmax(scores, dim=-1)[..., :-1] @ v

    write.__name__ = "gpt_oss" if less else "sink"
    return write


WAYS = [
    (hugging_face, "cudnn"),
    (shared_keys, "cudnn"),
    (min_gpt, "cudnn"),
    (gpt_neo, "cudnn"),
    (bloom, "cudnn"),
    (divided, "cudnn"),
    (three_dimensions, "cudnn"),
    (einsum, "cudnn"),
    (einsum_by_tokens, "efficient"),
    (along_rows, "efficient"),
    (einsum_of_three, "cudnn"),
    (einsum_of_turned_queries, "cudnn"),
    (unet, "cudnn"),
    (vqgan, "cudnn"),
    (fewer_keys, "cudnn"),
    (bart, "cudnn"),
    (windows, "efficient"),
    (grouped, "cudnn"),
    (folded, "cudnn"),
    (positions, "efficient"),
    (relative, "efficient"),
    (disentangled, "efficient"),
    (fused_positions, "efficient"),
    (odd_keys, "efficient"),
    (odd_keys_of_pairs, "efficient"),
    (capped, "flex"),
    (with_sink(False), "flex"),
    (with_sink(True), "flex"),
]


def fused(model, batch, **options):
    """The step with attention fused, and the pass's report."""
    options = {"capability": (9, 0)} | options
    own = replace(get("fuse_attention", **options), needs_cuda=False, for_target=lambda options, target: options)
    names = ("fold_constants", "remove_noop_views", "dedupe_casts", "false_masks", "dead_code")
    step = stepgraph.capture(model, loss_of, batch, passes=[*map(get, names), own])
    return step, next(report for report in step.report if report.name == "fuse_attention")


def gradients(model):
    return [torch.zeros(()) if p.grad is None else p.grad.double() for p in model.parameters()]


def near_to_fp64(model, batch, step):
    """``step`` of ``model`` is no further from the gradients in fp64 than eager, roughly."""
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    loss_of(exact, {name: value.double() for name, value in batch.items()}).backward()
    loss_of(eager, batch).backward()
    step(batch)
    for right, by_eager, ours in zip(*map(gradients, (exact, eager, model)), strict=True):
        rounding = torch.finfo(batch["x"].dtype).eps * right.norm()
        assert (ours - right).norm() <= 1.5 * (by_eager - right).norm() + rounding


@pytest.mark.parametrize(("write", "backend"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_as_near_to_fp64_as_eager(write, backend):
    torch.manual_seed(0)
    model, batch = Model(write), batch_for()
    step, report = fused(model, batch)
    assert (report.matched, report.changed, report.notes) == (1, 1, []), report.notes
    assert f"1 by {backend}" in report.summary
    assert not any("softmax" in str(node.target) for node in step.graph.nodes())
    near_to_fp64(model, batch, step)


def hidden_in_fp32(self, q, k, v):
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    return F.softmax(scores.masked_fill(~self.causal, -1e9), -1).to(q.dtype) @ v


@pytest.mark.parametrize("write", [hugging_face, hidden_in_fp32, positions])
def test_numbers_that_hide_keys_fit_in_fp16(write):
    torch.manual_seed(0)
    model, batch = Model(write, torch.float16), batch_for(torch.float16)
    step, report = fused(model, batch)
    assert report.changed == 1
    near_to_fp64(model, batch, step)


def test_the_other_kernel_where_cudnn_is_not_the_first_choice():
    for options in ({"capability": (8, 0)}, {"deterministic": True}):
        torch.manual_seed(0)
        _, report = fused(Model(hugging_face), batch_for(), **options)
        assert "1 by efficient" in report.summary, report.notes


def test_rows_hidden_whole_stay_finite():
    """By the least number of a dtype all keys weigh the same, as in eager."""

    def padded(self, q, k, v):
        mask = causal_bias(self, q).clone()
        mask[:, :, :3] = torch.finfo(q.dtype).min
        return F.softmax(q @ k.mT * q.shape[-1] ** -0.5 + mask.clone(), -1) @ v

    torch.manual_seed(0)
    model, batch = Model(padded), batch_for()
    expected = loss_of(model, batch)
    step, report = fused(model, batch)
    assert report.changed == 1, report.notes
    torch.testing.assert_close(step(batch), expected.detach(), rtol=0.02, atol=0.5)


def filled(self, q, k, hidden, number):
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, number)


def chosen_and_biased(self, q, k, hidden, number):
    scores = q @ k.mT * q.shape[-1] ** -0.5 + self.bias
    return torch.where(hidden, torch.tensor(number, dtype=q.dtype), scores)


def filled_twice(self, q, k, hidden, number):
    return filled(self, q, k, ~self.causal, number).masked_fill(hidden, number)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("write", [filled, chosen_and_biased, filled_twice])
def test_queries_that_see_no_key_have_no_gradient(write, dtype):
    """Where a number takes the place of all scores of a query, keys weigh the same, and it does not learn."""

    def attention(self, q, k, v):
        hidden = (torch.arange(q.shape[2]) > 20) | (self.bias[:, :1, :, :1] > 0.5).expand(q.shape[0], -1, -1, -1)
        number = torch.finfo(dtype).min if dtype == BF16 else -40_000.0
        return F.softmax(write(self, q, k, hidden, number), -1) @ v

    torch.manual_seed(0)
    model, batch = Model(attention, dtype), batch_for(dtype)
    step, report = fused(model, batch)
    assert report.changed == 1, report.notes
    near_to_fp64(model, batch, step)


def test_a_sink_has_all_weight_of_a_query_that_sees_no_key():
    def attention(self, q, k, v):
        hidden = (self.bias[:, :1, :, :1] > 0.5) | (self.bias[:, :1] > 1.0)
        shown = (~hidden).expand(q.shape[0], -1, -1, -1)
        scores = torch.where(shown, q @ k.mT * q.shape[-1] ** -0.5, torch.tensor(-40_000.0, dtype=q.dtype))
        sinks = self.bias[:, :, :1, :1].expand(q.shape[0], -1, q.shape[2], -1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v

    torch.manual_seed(0)
    model, batch = Model(attention), batch_for()
    step, report = fused(model, batch)
    assert report.changed == 1, report.notes
    near_to_fp64(model, batch, step)


def test_a_mask_may_depend_on_the_attention_before_and_on_a_deep_model():
    def attention(self, q, k, v):
        deep = (filled(self, q, k, ~self.causal, -40_000.0).softmax(-1) @ v).float().mean((1, 3))
        for _ in range(400):
            deep = deep + 0.01
        return filled(self, q, k, (deep > 4.0)[:, None, :, None], -40_000.0).softmax(-1) @ v

    torch.manual_seed(0)
    model, batch = Model(attention), batch_for()
    step, report = fused(model, batch)
    assert report.changed == 2, report.notes
    near_to_fp64(model, batch, step)


def test_a_mask_that_attentions_share_is_looked_at_once(monkeypatch):
    def attention(self, q, k, v):
        hidden = torch.ones(self.causal.shape).triu(1).bool()
        v = filled(self, q, k, hidden, -40_000.0).softmax(-1) @ v
        return filled(self, k, q, hidden, -40_000.0).softmax(-1) @ v.sin()

    found, evaluate = [], Masks._evaluate
    monkeypatch.setattr(Masks, "_evaluate", lambda masks, node: found.append(node.name) or evaluate(masks, node))
    fused(Model(attention), batch_for())
    assert max(map(found.count, found)) == 2, found  # before its inputs and after them


def scores_read(self, q, k, v):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return F.softmax(scores, -1) @ v + scores.logsumexp(-1, keepdim=True)


def dropped(self, q, k, v):
    return F.dropout(F.softmax(q @ k.mT, -1), 0.5) @ v


def weights_read(self, q, k, v):
    weights = F.softmax(q @ k.mT, -1)
    return weights @ v + weights.mean()


def columns_read(self, q, k, v):
    """Channels first, with weights that are read elsewhere too."""
    weights = F.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    return (v.mT @ weights.mT).mT + weights.mean()


def negative(self, q, k, v):
    return F.softmax(q @ k.mT * -1.0, -1) @ v


def mixed(self, q, k, v):
    return F.softmax(q @ k.mT, -1) * self.bias @ v


@pytest.mark.parametrize(
    ("write", "dtype", "options", "reason"),
    [
        (hugging_face, torch.float32, {}, "float32"),
        (weights_read, BF16, {}, "reads its weights"),
        (scores_read, BF16, {}, "reads the gradient of its scores"),
        (negative, BF16, {}, "multiplied by -1.0"),
        (capped, BF16, {"compiled": False}, "soft cap"),
    ],
)
def test_what_stays_says_why(write, dtype, options, reason):
    torch.manual_seed(0)
    _, report = fused(Model(write, dtype), batch_for(dtype), **options)
    assert (report.matched, report.changed) == (1, 0) and reason in report.notes[0], report.notes


@pytest.mark.parametrize("write", [dropped, mixed, columns_read])
def test_other_things_are_no_attention(write):
    torch.manual_seed(0)
    _, report = fused(Model(write), batch_for())
    assert (report.matched, report.changed) == (0, 0)


def test_only_automatic_attention_is_fused():
    names = {attention: {p.name for p in chosen(StepOptions(attention=attention))} for attention in ("auto", "eager")}
    assert "fuse_attention" in names["auto"] and "fuse_attention" not in names["eager"]
