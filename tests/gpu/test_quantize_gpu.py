"""Weights in fewer bits on a GPU: the kernel's bits and speed, bitsandbytes' bits, fp8, and a whole step."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.costs.hardware import known_gpu
from stepgraph.kernels.quant import KINDS, nf4, quantize_experts, quantize_linear
from tests.kernels.quant.test_experts import Layer

SHAPE = (4096, 14336)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_has_the_bits_of_the_reference(dtype):
    for shape in ((64, 64), (3, 50), (5, 7), (300, 448)):
        for nested in (True, False):
            q = nf4.quantize(torch.randn(shape, device="cuda") * 0.02, nested)
            given = nf4.dequantize_4bit(*q, 64, shape, dtype)
            assert torch.equal(given, nf4.reference(*q, 64, shape, dtype))
            on_cpu = nf4.Quantized(q.codes.cpu(), q.absmax.cpu(), q.quant_map.cpu(), tuple(t.cpu() for t in q.nested))
            assert torch.equal(given.cpu(), nf4.dequantize_4bit(*on_cpu, 64, shape, dtype))


def test_bits_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    w = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) * 0.02
    codes, state = functional.quantize_4bit(w, compress_statistics=True, quant_type="nf4")
    q = nf4.quantize(w)
    theirs = nf4.Quantized(codes, state.absmax, state.code, (state.state2.absmax, state.state2.code, state.offset))
    assert all(map(torch.equal, (*q[:3], *q.nested), (*theirs[:3], *theirs.nested)))
    assert torch.equal(nf4.dequantize_4bit(*q, 64, SHAPE, w.dtype), functional.dequantize_4bit(codes, state))


def test_it_dequantizes_at_the_speed_of_memory():
    some = [nf4.quantize(torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) * 0.02) for _ in range(4)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()  # eager calls may take longer on the host than on the GPU
    nf4.dequantize_4bit(*some[0], 64, SHAPE, torch.bfloat16)
    with torch.cuda.graph(graph):
        for q in some:
            nf4.dequantize_4bit(*q, 64, SHAPE, torch.bfloat16)
    graph.replay()
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1000 / 20
    rate = SHAPE[0] * SHAPE[1] * (2 + 0.5 + 1 / 64) / seconds
    print(f"NF4 to bf16, {SHAPE[0]} x {SHAPE[1]}: {1e6 * seconds:.1f} us, {rate / 1e12:.2f} TB/s")
    gpu = known_gpu(torch.cuda.get_device_name())
    assert gpu is None or rate > 0.6 * gpu.bandwidth


def test_products_in_fp8():
    torch.manual_seed(0)
    linear = KINDS["fp8"].of(nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y, dy = linear(x), torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)
    (dx,) = torch.autograd.grad(y, x, dy)
    weight = linear.dequantize()
    expected = nn.functional.linear(x, weight, linear.bias), dy @ weight
    for given, true in zip((y, dx), expected, strict=True):
        assert 0 < (given - true).float().norm() < 0.06 * true.float().norm()


def _peak_of(step, batch, passes):
    """Bytes that a later step allocates at its peak; in ``exact`` the step is eager's, bit for bit."""
    report = str(step.verify(batch))
    assert passes == "default" or "bitwise equal" in report, report
    for _ in range(3):
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", ["exact", "default"])
def test_a_step_keeps_bits_alone(kind, passes):
    """14 layers of 2048 x 2048: 8 MiB each in bf16, 112 together."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(14)]).bfloat16().requires_grad_(False)
    quantize_linear(model, kind, device=torch.device("cuda"))
    model.insert(0, nn.Linear(16, 2048, dtype=torch.bfloat16, device="cuda"))
    optimizer = torch.optim.AdamW(model[0].parameters(), fused=True)
    batch = torch.randn(64, 16, dtype=torch.bfloat16, device="cuda")
    step = stepgraph.capture(model, lambda m, x: m(x).float().square().mean(), batch, optimizer, passes=passes)
    assert _peak_of(step, batch, passes) < 56 * 2**20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", ["exact", "default"])
def test_a_step_keeps_the_bits_of_experts_alone(kind, passes):
    """12 weights of 4 x 1024 x 1024: 8 MiB each in bf16, 96 together."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(1024, 1024, r=8) for _ in range(6)]).to("cuda", torch.bfloat16)
    assert len(quantize_experts(model, kind)[0]) == 12
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    batch = torch.randn(64, 1024, dtype=torch.bfloat16, device="cuda")
    step = stepgraph.capture(model, lambda m, x: m(x).float().square().mean(), batch, optimizer, passes=passes)
    assert _peak_of(step, batch, passes) < 72 * 2**20  # a few weights, one in fp32, and gradients
