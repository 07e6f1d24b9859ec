"""Attention within documents on a GPU: FlashAttention's results next to the reference's, and a packed training step."""

import pytest
import torch

import stepgraph
from stepgraph.integrations import PackToBudget, attend_within_documents
from stepgraph.kernels.attention.documents import attend_documents, reference

LENGTHS = (300, 1, 129, 64, 18)


@pytest.mark.parametrize("heads, shared, width", [(8, 4, 64), (4, 1, 128), (4, 2, 256)])
@pytest.mark.parametrize("causal, window", [(True, None), (True, 50), (False, None)])
def test_results_and_gradients_are_the_references(heads, shared, width, causal, window):
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(sum(LENGTHS), heads // (1 if i in (0, 3) else shared), width) for i in range(4)]
    q, k, v, grad = (torch.randn(size, device="cuda", generator=generator).bfloat16() for size in sizes)
    offsets = torch.tensor([0, *LENGTHS, 0, 0, 0], device="cuda").cumsum(0).to(torch.int32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend_documents(*leaves, offsets, 512, causal=causal, window=window)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    left = -1 if window is None else window - 1
    expected, _ = reference(*wide, offsets, causal, left, width**-0.5)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    wanted = [expected, *torch.autograd.grad(expected, wide, grad.double())]
    for got, exact in zip(found, wanted, strict=True):
        assert ((got.double() - exact).norm() / exact.norm()).item() < 1e-2


@pytest.mark.parametrize("passes", ["exact", "default"])
def test_a_packed_step_is_one_cuda_graph(passes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, head_dim=64)
    config = transformers.Qwen3Config(vocab_size=512, num_key_value_heads=2, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    attend_within_documents(model)
    pack = PackToBudget(1024, max_documents=16, max_length=512)
    lengths = torch.randint(2, 400, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = list(pack.rows({"input_ids": torch.randint(512, (n,))} for n in lengths))

    def batch(row):
        return {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in pack([row]).items()}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = stepgraph.capture(
        model, lambda model, batch: model(**batch, use_cache=False).loss, batch(rows[0]), optimizer, passes=passes
    )
    losses = [step(batch(row)).item() for row in rows]
    assert all(0 < loss < 8 for loss in losses) and len(step._forms) == 1
    if passes == "default":
        (report,) = [r for r in step.report if r.name == "cuda_graph"]
        assert "1 CUDA graph" in report.summary or not report.notes, report
