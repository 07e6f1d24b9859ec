"""FlexAttention in the place of `scaled_dot_product_attention` on a GPU, by Inductor's kernels."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import configured
from tests.gpu.test_attention_gpu import BF16, DEVICE, Attend, captured, dy_for, hopper, near_to_fp64

SHAPES = [  # heads of queries and keys, widths, causal, dtype
    ((8, 2), (64, 64), True, BF16, "regional"),
    ((8, 2), (64, 64), True, BF16, "full"),
    ((6, 2), (96, 96), True, BF16, "regional"),
    ((4, 4), (128, 128), False, torch.float16, "regional"),
    ((4, 4), (192, 128), True, BF16, "regional"),
    ((4, 2), (256, 256), True, BF16, "regional"),
    ((4, 4), (64, 64), True, torch.float32, "regional"),  # torch takes grouped heads in fp32 apart
]


@pytest.mark.parametrize(("heads", "widths", "causal", "dtype", "inductor"), SHAPES, ids=str)
def test_as_near_to_fp64_as_eager(heads, widths, causal, dtype, inductor):
    """320 queries: the last block is half full."""
    model = Attend(2, 320, heads, widths, causal, dtype=dtype)
    near_to_fp64(model, dy_for(model), "flex", inductor=inductor)


@pytest.mark.parametrize(("T", "heads"), [(40, (6, 2)), (320, (8, 2))])
def test_backward_repeats_itself(T, heads):
    """Bit for bit, also in a CUDA graph, and in a second capture; for less than a block of queries too."""
    model = Attend(2, T, heads, (64, 64), True)
    batch, found = dy_for(model), []
    for _ in range(2):
        step, report = captured(model, batch, "flex", inductor="regional")
        assert any("flex: backward is deterministic" in note for note in report.notes)
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            step(batch)
            found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for grads in found[1:] for a, b in zip(found[0], grads, strict=True))


class Masked(nn.Module):
    """Attention under a mask, whose queries, keys and values come from one matrix; ``ids``: the documents' numbers."""

    def __init__(self, kind, width, dtype):
        super().__init__()
        self.kind = kind
        self.mix = nn.Parameter((torch.randn(width, width, device=DEVICE) / width**0.5).to(dtype))

    def forward(self, q, k, v, ids):
        q, k, v = (F.linear(x, self.mix.to(x.dtype)).transpose(1, 2) for x in (q, k, v))
        here = torch.arange(q.shape[2], device=q.device)
        distance = here[:, None] - here
        if self.kind == "window":
            mask = (distance >= 0) & (distance <= 150)
        else:
            mask = ((ids[:, :, None] == ids[:, None, :]) & (distance >= 0)).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def masked_loss(model, batch):
    return (model(*(batch[name] for name in ("q", "k", "v", "ids"))).float() * batch["dy"]).sum()


def masked_batch(T, width, dtype, lengths, heads=4, rows=2):
    batch = {name: torch.randn(rows, T, heads, width, device=DEVICE).to(dtype) for name in "qkv"}
    batch["dy"] = torch.randn(rows, T, heads, width, device=DEVICE)
    return batch | {"ids": documents(T, lengths).expand(rows, T).contiguous()}


def documents(T, lengths):
    lengths = torch.tensor([*lengths, T - sum(lengths)])
    return torch.arange(len(lengths)).repeat_interleave(lengths).to(DEVICE)


MASKS = [
    ("window", BF16, "regional"),
    ("documents", BF16, "regional"),
    ("documents", BF16, "full"),
    ("documents", torch.float32, "regional"),
]


@pytest.mark.parametrize(("kind", "dtype", "inductor"), MASKS, ids=str)
def test_masks(kind, dtype, inductor):
    """One graph for all boundaries of documents, as near to fp64 as the kernels that get the mask as numbers."""
    torch.manual_seed(0)
    model = Masked(kind, 64, dtype)
    batch = masked_batch(392, 64, dtype, (100, 3, 250))
    fresh = copy.deepcopy(model)
    step = stepgraph.capture(fresh, masked_loss, batch, passes=configured(attention="flex", inductor=inductor))
    assert "1 by flex" in next(r for r in step.report if r.name == "attention").summary
    for lengths in ((100, 3, 250), (1,) * 9, (390,)):
        batch["ids"] = documents(392, lengths).expand(2, 392).contiguous()
        exact, usual = copy.deepcopy(model).double(), copy.deepcopy(model)
        doubles = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        masked_loss(exact, doubles).backward()
        masked_loss(usual, batch).backward()
        fresh.zero_grad(set_to_none=True)
        step(batch)
        error, bound = ((m.mix.grad.double() - exact.mix.grad).norm() for m in (fresh, usual))
        assert error <= 2 * bound + 1e-4 * exact.mix.grad.norm(), lengths


PACKED = Llama3Config(dim=256, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=512, vocab_size=512, max_seq_len=1024)


def packed_batch(lengths):
    tokens = torch.randint(512, (2, 1024), device=DEVICE)
    positions = torch.cat([torch.arange(n) for n in (*lengths, 1024 - sum(lengths))]).expand(2, 1024).to(DEVICE)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1), "positions": positions.contiguous()}


@hopper
def test_packed_documents():
    """With Inductor over all, in one CUDA graph that serves every batch's documents."""
    model = Llama3(PACKED).to(DEVICE, BF16)
    batches = [packed_batch(lengths) for lengths in ((300, 50), (1000,), (7,) * 100)]
    step = stepgraph.capture(model, next_token_loss, batches[0], passes=configured(attention="flex"))
    reports = {r.name: r for r in step.report}
    assert "4 by flex" in reports["attention"].summary, reports["attention"].notes
    assert reports["cuda_graph"].summary.startswith("1 CUDA graph, 0 nodes on the host")
    for batch in batches * 2:
        assert step(batch).item() == pytest.approx(next_token_loss(model, batch).item(), rel=1e-2)
    assert step.verify(batches[0]).close


def step_ms(step, batch, steps=20):
    """Milliseconds of a step that is a CUDA graph, the median of three rounds."""
    for _ in range(5):
        step(batch)
    rounds = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            step(batch)
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / steps)
    return sorted(rounds)[1]


LONG = [("documents", 1024), ("documents", 8192), ("window", 8192)]


@pytest.mark.timed
@hopper
@pytest.mark.parametrize(("kind", "T"), LONG)
def test_times_of_masks(kind, T, capsys):
    """Attention and its projections, forward and backward: by FlexAttention, and by what gets the mask as numbers."""
    torch.manual_seed(0)
    rows = 8192 // T
    batch = masked_batch(T, 128, BF16, (T // 3, T // 5), heads=16, rows=rows)
    model, times = Masked(kind, 128, BF16), {}
    for name, disable in (("flex", ()), ("mask", ("attention", "attention_windows"))):
        attention = "flex" if name == "flex" else "auto"
        passes = configured(attention=attention, inductor="regional", disable_pass=disable)
        step = stepgraph.capture(copy.deepcopy(model), masked_loss, batch, passes=passes)
        times[name] = step_ms(step, batch)
    text = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
    with capsys.disabled():
        print(f"\n{kind}, {rows} x 16 heads x {T} x 128: {text}", end="")
    assert times["flex"] < times["mask"]
