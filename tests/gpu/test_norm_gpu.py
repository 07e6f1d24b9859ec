"""The norm kernels on a GPU: against torch in float64, and bit for bit from run to run, on any stream and in graphs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from stepgraph import kernels
from stepgraph.kernels.norm.spec import Norm
from stepgraph.kernels.norm.triton import workspace
from stepgraph.kernels.norm.triton.config.limits import Config
from tests.kernels.norm import backend as triton_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6

#: Error of a result by norm, over its norm: half a unit in the last place of its dtype, and what the inputs' few bits
#: leave of fp32 sums.
TOLERANCE = {BF16: 4e-3, FP16: 6e-4, FP32: 3e-6}

CASES = [
    ("rms", (1, 128), BF16, BF16, {}),
    ("rms", (5, 1), FP32, FP32, {}),
    ("layer", (1000, 33), BF16, BF16, {}),
    ("rms", (4096, 64), BF16, BF16, {}),
    ("rms", (8192, 192), BF16, FP32, {}),
    ("layer", (50000, 256), FP16, FP16, {}),
    ("rms", (3333, 1000), FP32, FP32, {}),
    ("rms", (4096, 2048), BF16, BF16, {"residual": BF16}),
    ("layer", (4097, 2880), BF16, BF16, {"residual": FP32}),
    ("rms", (4096, 4096), BF16, BF16, {"offset": 1.0}),
    ("layer", (2000, 8192), BF16, FP32, {}),
    ("rms", (777, 16384), BF16, BF16, {"residual": BF16}),
    ("layer", (777, 16384), FP32, FP32, {}),
    ("rms", (4096, 32768), BF16, BF16, {}),
    ("layer", (100, 50257), FP16, FP16, {}),
    ("layer", (129, 65536), BF16, BF16, {}),
    ("rms", (7, 262144), BF16, BF16, {}),
    ("rms", (512, 8, 128), BF16, BF16, {"heads": True}),
    ("layer", (512, 12, 96), BF16, BF16, {"heads": True, "layout": "slice"}),
    ("rms", (2, 1024, 16, 128), BF16, BF16, {"layout": "slice"}),
    ("rms", (3, 5, 7, 64), BF16, BF16, {"layout": "permuted"}),
    # Rows that begin anywhere within 16 bytes, amid infinities that no result may have read or written.
    ("rms", (20001, 71), BF16, BF16, {"layout": "amid"}),
    ("rms", (3001, 333), FP16, FP16, {"layout": "amid"}),
    ("layer", (5000, 1001), BF16, BF16, {"layout": "amid"}),
    ("rms", (4000, 2047), BF16, FP32, {"layout": "amid", "residual": BF16}),
    ("layer", (777, 4099), BF16, BF16, {"layout": "amid", "residual": FP32}),
    ("rms", (3000, 8191), FP32, FP32, {"layout": "amid"}),
    ("rms", (600, 50257), BF16, BF16, {"layout": "amid"}),
    ("layer", (2000, 12291), BF16, BF16, {"layout": "amid"}),
    ("rms", (100, 131071), BF16, BF16, {"layout": "amid", "offset": 1.0}),
]


def rows(shape, dtype, layout="contiguous"):
    if layout == "slice":  # as q of a fused projection
        return torch.randn(*shape[:-2], 3 * shape[-2], shape[-1], device="cuda").to(dtype)[..., : shape[-2], :]
    if layout == "permuted":
        return torch.randn(*(shape[i] for i in (2, 0, 1, 3)), device="cuda").to(dtype).permute(1, 2, 0, 3)
    if layout == "amid":
        count = torch.Size(shape).numel()
        memory = torch.full((count + 128,), torch.inf, dtype=dtype, device="cuda")
        return memory[64 : 64 + count].view(shape).copy_(torch.randn(shape, device="cuda"))
    return torch.randn(shape, device="cuda").to(dtype)


def in_float64(kind, h, weight, bias, offset):
    """torch's own norm, of double leaves."""
    n = h.shape[-1:]
    y = F.rms_norm(h, n, None, EPS) if kind == "rms" else F.layer_norm(h, n, None, None, EPS)
    y = y * (weight + offset)
    return y if bias is None else y + bias


def raw(tensors):
    return [None if t is None else t.detach().contiguous().view(torch.uint8).clone() for t in tensors]


def new_leaves(*tensors):
    """Leaves for one call: autograd ties a leaf to the stream of its first use, for which a capture may not wait."""
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


def everywhere(call):
    """Results of ``call``, after it gave the same bits again, on another stream, and in a replayed CUDA graph."""
    results = call()
    expected = raw(results)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        again = call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for other in (raw(again), raw(captured)):
        for a, b in zip(expected, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    return results


def close(name, value, wanted, size=None):
    size = (wanted.norm() if size is None else size).clamp_min(1e-30)
    error = ((value.double() - wanted).norm() / size).item()
    assert error <= TOLERANCE[value.dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize(("kind", "shape", "dtype", "weight_dtype", "options"), CASES, ids=str)
def test_forward_and_backward(kind, shape, dtype, weight_dtype, options):
    torch.manual_seed(0)
    layout, offset = options.get("layout", "contiguous"), options.get("offset", 0.0)
    x, dy = rows(shape, dtype, layout), rows(shape, dtype, layout)
    weight = (1 + 0.3 * torch.randn(shape[-2:] if options.get("heads") else shape[-1:], device="cuda")).to(weight_dtype)
    bias = torch.randn_like(weight) if kind == "layer" else None
    residual = rows(shape, options["residual"]) if "residual" in options else None
    dh = rows(shape, residual.dtype) if residual is not None else None
    function = {"rms": kernels.rms_norm, "layer": kernels.layer_norm}[kind]

    def call():
        at = new_leaves(x, weight, bias, residual)
        leaves = [t for t in at if t is not None]
        out = function(*at, EPS, weight_offset=offset, prenorm=residual is not None)
        y, h = out if residual is not None else (out, None)
        outputs, slopes = ([y], [dy]) if h is None else ([y, h], [dy, dh])
        return [y, h, *torch.autograd.grad(outputs, leaves, slopes)]

    y, h, *gradients = everywhere(call)
    if residual is not None:
        assert torch.equal(h, (x.float() + residual.float()).to(residual.dtype))
    wide = [(x if h is None else h).detach().double(), weight.double(), None if bias is None else bias.double()]
    wide = [None if t is None else t.requires_grad_() for t in wide]
    y64 = in_float64(kind, *wide, offset)
    total = (y64 * dy.double()).sum() + (0 if dh is None else (wide[0] * dh.double()).sum())
    total.backward()
    close("y", y, y64.detach())
    # dx of a row of one is what two equal terms leave of each other: measured against the terms.
    size = (dy.double() * weight.double()).norm() / EPS**0.5 if shape[-1] == 1 else None
    wanted = [t.grad for t in wide if t is not None]
    for name, value, want in zip(("dx", "dw", "db"), gradients, wanted, strict=False):
        close(name, value, want, size if name == "dx" else None)


@pytest.mark.parametrize("shape", [(4096, 256), (3000, 2048), (5000, 5120), (300, 32768)])
def test_sums_over_rows_have_the_same_bits_everywhere(shape):
    torch.manual_seed(0)
    x, dy = rows(shape, BF16), rows(shape, BF16)
    weight = torch.ones(shape[-1], dtype=BF16, device="cuda")
    rstd = (x.float().square().mean(-1) + EPS).rsqrt()
    norm = Norm("rms", EPS, 0.0, BF16)
    arguments = (norm, dy, x, weight, None, rstd, None, BF16, True, True, False)
    _, dw, _ = everywhere(lambda: triton_norm.backward(*arguments))
    close("dw", dw, (dy.double() * x.double() * rstd.double()[:, None]).sum(0))


@pytest.mark.parametrize("heads", [False, True])
def test_queries_and_keys_of_one_projection(heads):
    torch.manual_seed(0)
    qkv = torch.randn(2, 512, 24, 128, device="cuda").to(BF16)
    q, k = qkv[:, :, :16], qkv[:, :, 16:20]
    wq, wk = ((1 + 0.3 * torch.randn((count, 128) if heads else (128,), device="cuda")).to(BF16) for count in (16, 4))
    dyq, dyk = torch.randn_like(q), torch.randn_like(k)

    def call():
        leaves = new_leaves(q, k, wq, wk)
        out = kernels.qk_norm(*leaves, EPS)
        return [*out, *torch.autograd.grad(out, leaves, (dyq, dyk))]

    yq, yk, *gradients = everywhere(call)
    wide = [t.detach().double().requires_grad_() for t in (q, k, wq, wk)]
    out = [in_float64("rms", wide[i], wide[i + 2], None, 0.0) for i in (0, 1)]
    for y, y64 in zip((yq, yk), out, strict=True):
        close("y", y, y64.detach())
    wanted = torch.autograd.grad(out, wide, (dyq.double(), dyk.double()))
    for name, value, want in zip(("dq", "dk", "dwq", "dwk"), gradients, wanted, strict=True):
        close(name, value, want)


def test_streams_share_no_scratch():
    torch.manual_seed(0)
    xs = [torch.randn(2048, 4096, device="cuda").to(BF16) for _ in range(4)]
    weight = torch.randn(4096, device="cuda").to(BF16).requires_grad_()

    def gradient(i):
        x = xs[i].detach().requires_grad_()
        return torch.autograd.grad(kernels.rms_norm(x, weight), (x, weight), xs[(i + 1) % 4])

    wanted = [gradient(i) for i in range(4)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    got = []
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append((i, gradient(i)))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for i, result in got for a, b in zip(result, wanted[i], strict=True))


def test_more_than_two_to_the_31_elements():
    m, n = 2**19 + 3, 4096
    x = torch.randn(1024, n, device="cuda").to(BF16).repeat(513, 1)[:m]
    assert x.numel() > 2**31
    weight = torch.ones(n, dtype=BF16, device="cuda")
    y = kernels.rms_norm(x, weight, eps=EPS)
    assert torch.equal(y[:1024], y[m // 1024 * 1024 - 1024 : m // 1024 * 1024])
    close("y", y[-1024:], F.rms_norm(x[-1024:].double(), (n,), None, EPS))


def test_the_first_call_does_not_wait(monkeypatch):
    """A step's warm-up takes whatever waits for the GPU out of its CUDA graph: also what only a first call does."""
    monkeypatch.setattr(workspace, "_streams", {})
    monkeypatch.setattr(workspace, "_chunks", {})
    n = 65536  # rows that programs share
    x = torch.randn(64, n, device="cuda").to(BF16).requires_grad_()
    weight = torch.ones(n, dtype=BF16, device="cuda").requires_grad_()
    dy = x.detach().clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(kernels.rms_norm(x, weight), (x, weight), dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert workspace._chunks, "no counters were needed: nothing was tested"


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("m", "n", "split"), [(4, 97408, 12), (60, 27372, 4), (150, 33001, 3), (7, 262144, 16)])
@pytest.mark.parametrize("residual", [False, True])
def test_sums_by_a_launch_ahead_have_the_bits_of_those_that_are_waited_for(kind, m, n, split, residual):
    """The second launch begins before the first ends: in a loop over new rows, each made just before, alone and in a
    CUDA graph."""
    norm = Norm(kind, EPS, 0.0, BF16)
    w = torch.randn(n, device="cuda").bfloat16()
    wait = Config(1, 4096, 16, 1, 1, split, weight="after")
    ahead = replace(wait, exchange="launch")
    x, r = (torch.empty(m, n, device="cuda", dtype=BF16) for _ in range(2))

    def run(config):
        return triton_norm.forward(norm, x, w, w, r if residual else None, True, config=config)

    run(ahead), run(wait)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.normal_()
        r.normal_()
        recorded = run(ahead)
    for _ in range(20):
        graph.replay()
        waited = run(wait)
        x.mul_(1)  # the last kernel before the launch ahead writes what that reads
        for found in (run(ahead), recorded):
            for mine, theirs in zip(found, waited, strict=True):
                assert mine is theirs is None or torch.equal(mine, theirs)
