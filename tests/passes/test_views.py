"""Views of views, written as people write them: captured with the exact passes, each gives eager's bits."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph

PARTS = {
    "chunk": lambda x, n: x.chunk(n, -1),
    "split": lambda x, n: x.split(x.shape[-1] // n, -1),
    "unbind": lambda x, n: x.unflatten(-1, (n, -1)).unbind(-2),
}


def same_as_eager(model, batch, loss_fn, steps=2):
    """Losses and parameters of captured AdamW steps are eager's, bit for bit."""
    eager = copy.deepcopy(model)
    eager_optimizer, optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (eager, model))
    step = stepgraph.capture(model, loss_fn, batch, optimizer, passes="exact")
    for i in range(steps):
        expected = loss_fn(eager, batch)
        expected.backward()
        eager_optimizer.step()
        eager_optimizer.zero_grad()
        assert torch.equal(step(batch), expected), f"step {i}: loss"
        for (name, a), b in zip(eager.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b), f"step {i}: {name}"
    return step


class Attention(nn.Module):
    """Attention with one product for q, k and v, and a rotary embedding; ``parts``, ``halves``: how it takes apart
    the product, and a head's two halves."""

    def __init__(self, parts, halves, width=16, heads=2):
        super().__init__()
        self.parts, self.halves, self.heads = parts, halves, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        angle = torch.arange(6.0)[:, None] / torch.arange(1.0, width // heads // 2 + 1)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def rotate(self, x):  # (B, H, T, D)
        a, b = self.halves(x, 2)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def forward(self, x):  # (B, T, D)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.parts(self.qkv(x), 3))
        return self.out(
            F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize("parts, halves", list(itertools.product(PARTS, PARTS)))
def test_attention_with_a_rotary_embedding(parts, halves):
    batch = {"x": torch.randn(2, 6, 16), "y": torch.randn(2, 6, 16)}
    same_as_eager(Attention(PARTS[parts], PARTS[halves]), batch, lambda m, b: F.mse_loss(m(b["x"]), b["y"]))


class Halves(nn.Module):
    """The left and the right of a picture's upper half: chunks of a chunk."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x):
        top, _ = self.conv(x).chunk(2, 2)
        left, right = top.chunk(2, 3)
        return self.head(left.mean((2, 3)) - right.mean((2, 3)))


def test_chunks_of_a_chunk():
    batch = {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(5, (4,))}
    same_as_eager(Halves(), batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))


class ReshapedInPlace(nn.Module):
    """Tensors reshaped in place of which another tensor is an equal view."""

    def __init__(self, which):
        super().__init__()
        self.w, self.which = nn.Parameter(torch.linspace(0.5, 1.5, 24).view(4, 6)), which

    def view_of_the_same_shape(self, h):
        same = h.view(4, 6)
        same.unsqueeze_(0)
        return same.sum(0) * h.t().sum(1)

    def equal_views(self, h):
        first, second = h[0], h[0]
        second.unsqueeze_(1)
        return first * second

    def parts_of_equal_splits(self, h):
        first, second = h.split(2)[0], h.split(2)[0]
        first.t_()
        return first @ second

    def forward(self, x):
        return (getattr(self, self.which)(x * 1) * self.w.sum()).sum()


@pytest.mark.parametrize("which", ["view_of_the_same_shape", "equal_views", "parts_of_equal_splits"])
def test_tensors_reshaped_in_place_stand_for_no_other(which):
    same_as_eager(ReshapedInPlace(which), {"x": torch.randn(4, 6)}, lambda m, b: m(b["x"]))


class ReshapedBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x):
        return (self.table.t_().sum(1) * self.w * x).sum()


def test_a_buffer_reshaped_in_place_is_refused():
    with pytest.raises(ValueError, match=r"forward reshapes table in place, from \[2, 3\] to \[3, 2\]"):
        stepgraph.capture(ReshapedBuffer(), lambda m, b: m(b["x"]), {"x": torch.ones(3)}, passes="exact")
