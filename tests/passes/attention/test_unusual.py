"""Attention of unusual shapes and masks: the default passes leave on a CPU what eager computes, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph import compat
from stepgraph.passes import configured

BF16 = torch.bfloat16


class Attend(nn.Module):
    """Attention whose queries, keys and values (and added ``bias``) are parameters; by tokens where ``layout`` is t.
    ``reentrant``: it is inside a checkpoint of that kind."""

    def __init__(self, *, B=2, H=4, H_kv=2, T=24, S=None, D=32, D_v=None, dtype=torch.float32, layout="h", bias=None,
                 mask=None, causal=False, scale=None, dropout=0.0, reentrant=None, grouped=True):  # fmt: skip
        super().__init__()
        S, D_v = T if S is None else S, D_v or D
        self.layout, self.mask, self.reentrant = layout, mask, reentrant
        self.options = {"is_causal": causal, "scale": scale, "dropout_p": dropout, "enable_gqa": grouped}
        for name, heads, length, width in (("q", H, T, D), ("k", H_kv, S, D), ("v", H_kv, S, D_v)):
            size = (B, heads, length, width) if layout == "h" else (B, length, heads, width)
            setattr(self, name, nn.Parameter(torch.randn(size, dtype=dtype)))
        self.bias = None if bias is None else nn.Parameter(torch.randn(bias, dtype=dtype))

    def attend(self, q, k, v):
        mask = self.mask(q, k) if self.mask else self.bias
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)

    def forward(self, x):
        q, k, v = (t if self.layout == "h" else t.transpose(1, 2) for t in (self.q * x, self.k, self.v))
        if self.reentrant is None:
            return self.attend(q, k, v)
        return checkpoint(self.attend, q, k, v, use_reentrant=self.reentrant)


def loss_of(model, batch):
    return model(batch["x"]).square().mean()


def causal(q, k):
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()


def some_rows_see_nothing(q, k):
    return causal(q, k) & (torch.arange(q.shape[2]) % 3 != 1)[:, None]


def nobody_sees_anything(q, k):
    return torch.zeros_like(causal(q, k))


def padded_keys(q, k):
    return (torch.arange(k.shape[2]) < k.shape[2] - 2).expand(q.shape[0], 1, 1, -1)


def numbers(q, k):
    return torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype).masked_fill(~causal(q, k), float("-inf"))


CASES = {
    **{f"{width} channels": {"D": width, "causal": True} for width in (1, 80, 96, 112, 256)},
    "192 and 128 channels": {"D": 192, "D_v": 128, "H_kv": 4, "causal": True},
    "16 and 64 channels": {"D": 16, "D_v": 64},
    "rows that see nothing": {"mask": some_rows_see_nothing},
    "rows that see nothing, in bf16": {"mask": some_rows_see_nothing, "dtype": BF16},
    "nothing to see": {"mask": nobody_sees_anything},
    "padded keys": {"mask": padded_keys},
    "a mask of -inf": {"mask": numbers, "dtype": BF16},
    **{f"a learned mask {size}": {"bias": size} for size in ((24, 24), (4, 24, 24), (2, 1, 1, 24), (24, 1), (24,))},
    "fewer queries than keys": {"T": 8, "S": 24, "causal": True},
    "more queries than keys": {"T": 24, "S": 8, "causal": True},
    "one query and key": {"T": 1, "causal": True},
    "scale 0": {"scale": 0.0},
    "a negative scale": {"scale": -0.5},
    "fp64": {"dtype": torch.float64, "causal": True},
    "by tokens": {"layout": "t", "causal": True},
    "one head of keys, viewed as many": {"H_kv": 1, "grouped": False},
    "no heads": {"H": 0, "H_kv": 0, "grouped": False},
    "no tokens": {"T": 0},
    "no keys": {"T": 4, "S": 0},
    "dropout": {"dropout": 0.25, "causal": True},
    **{f"a checkpoint, {kind}": {"reentrant": kind == "old", "mask": causal} for kind in ("old", "new")},
    "a checkpoint with dropout": {"reentrant": False, "dropout": 0.25},
    "a checkpoint with a learned mask": {"reentrant": False, "bias": (4, 24, 24)},
}


@pytest.mark.parametrize("memory", ["none", "full"])
@pytest.mark.parametrize("name", CASES)
def test_as_eager(name, memory):
    if name == "no heads" and compat.TORCH < (2, 13):
        pytest.skip("torch's own attention ends the process there")
    torch.manual_seed(0)
    model = Attend(**CASES[name])
    batch = {"x": torch.randn(model.q.shape[0], 1, 1, 1, dtype=model.q.dtype)}
    eager = copy.deepcopy(model)
    step = stepgraph.capture(model, loss_of, batch, passes=configured(inductor="off", memory=memory))
    torch.manual_seed(1)
    right = loss_of(eager, batch)
    right.backward()
    torch.manual_seed(1)
    loss = step(batch)
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    for found, expected in [(loss, right), *((p.grad, q.grad) for p, q in pairs)]:
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0, equal_nan=True)
