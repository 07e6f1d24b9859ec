"""Packed documents on a GPU: a row is its documents one by one, by kernels that hold no square of scores a head."""

import pytest
import torch

import stepgraph
from stepgraph.models import Golf, GolfConfig, Llama3, Llama3Config, next_token_loss
from stepgraph.models.documents import attend_within, document_mask
from stepgraph.passes import StepOptions
from tests.models.moe_models import DEEPSEEK, QWEN, our_model

SIZES = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 256, "vocab_size": 96}
MODELS = {
    "llama3": lambda: Llama3(Llama3Config(dim=128, max_seq_len=256, **SIZES)),
    "golf": lambda: Golf(GolfConfig(dim=128, **SIZES)),
    "deepseek-v3": lambda: our_model(DEEPSEEK),
    "qwen3-moe": lambda: our_model(QWEN),
}
ROWS = [[10, 1, 29, 24], [64]]  # one of the kernels' tiles and less


def positions_of(rows):
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows]).cuda()


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_is_its_documents_one_by_one(name):
    """fp32 without TF32; sums in another order than those of the kernels for causal attention."""
    model = MODELS[name]().cuda()
    tokens = torch.randint(96, (2, 64), device="cuda")
    packed = model(tokens, positions=positions_of(ROWS))
    alone = [[model(one[None])[0] for one in row.split(n)] for row, n in zip(tokens, ROWS, strict=True)]
    torch.testing.assert_close(packed, torch.stack([torch.cat(row) for row in alone]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama3", "golf"])
def test_one_graph_serves_all_boundaries(name):
    """Recorded with some documents, replayed with others, in bf16."""
    model = MODELS[name]().cuda().bfloat16()
    tokens = torch.randint(96, (2, 64), device="cuda")
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "positions": positions_of([[64], [64]])}
    step = stepgraph.capture(model, next_token_loss, batch, passes=StepOptions("default"))
    for rows in ([[64], [64]], [[64], [64]], [[64], [64]], ROWS, [[1] * 64, [3, 61]]):
        batch["positions"] = positions_of(rows)
        loss = step(batch)
        assert loss.item() == pytest.approx(next_token_loss(model, batch).item(), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_mask(dtype):
    heads, length = 16, 4096
    positions = positions_of([[1000, 96, 3000]])
    q = torch.randn(1, heads, length, 64, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, 4, length, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend_within(q, k, v, document_mask(positions, dtype))
    out.backward(torch.randn_like(out))
    assert out.isfinite().all() and q.grad.isfinite().all()
    mask = length * length * dtype.itemsize
    # The mask, what it is made of and what a kernel makes of it; scores of 16 heads would be 16 masks.
    assert torch.cuda.max_memory_allocated() - before < 7 * mask
