"""The kernels over q and k together against float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.norm.spec import Norm
from tests.kernels.norm import backend as triton_norm
from tests.kernels.norm.interpreter.inputs import DTYPES, EPS, close, configs, norm, tensor


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 5),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 2)),
    n=st.sampled_from((1, 8, 33, 64)),
    dtype=st.sampled_from(DTYPES),
    weights=st.sampled_from(("none", "shared", "per head")),
    offset=st.sampled_from((0.0, 1.0)),
    fused=st.booleans(),
    forced=st.tuples(st.none() | configs(False, False), st.none() | configs(True, False)),
    need_dx=st.booleans(),
)
def test_pair(batch, heads, n, dtype, weights, offset, fused, forced, need_dx):
    both = tensor((batch, sum(heads), n), dtype, "contiguous", 0)
    q, k = both.split(heads, 1)
    if not fused:
        q, k = q.contiguous(), k.contiguous()
    wq = wk = None
    if weights != "none":
        wq, wk = (tensor((h, n) if weights == "per head" else (n,), torch.float32, "contiguous", h) for h in heads)
    dyq, dyk = (tensor((batch, h, n), dtype, "contiguous", 9) for h in heads)
    spec = Norm("rms", EPS, offset, dtype)
    yq, yk, rstd_q, rstd_k = triton_norm.forward_pair(spec, q, k, wq, wk, config=forced[0])
    need_dw = weights != "none"
    arguments = (spec, dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, need_dx, need_dw)
    got = triton_norm.backward_pair(*arguments, config=forced[1])
    for a, b in zip(got, triton_norm.backward_pair(*arguments, config=forced[1]), strict=True):
        assert a is b is None or torch.equal(a, b)
    for x, w, dy, y, rstd, dx, dw in (
        (q, wq, dyq, yq, rstd_q, got[0], got[2]),
        (k, wk, dyk, yk, rstd_k, got[1], got[3]),
    ):
        x64 = x.double().detach().requires_grad_()
        w64 = None if w is None else w.double().requires_grad_()
        y64 = norm("rms", x64, w64, None, offset)
        close("y", y, y64.detach(), n)
        close("rstd", rstd, (x64.square().mean(-1) + EPS).rsqrt().detach(), n)
        (y64 * dy.double()).sum().backward()
        scale = 1 + int(rstd.max())
        assert (dx is not None) == need_dx
        if need_dx:
            close("dx", dx, x64.grad, n * scale)
        if need_dw:
            close("dw", dw, w64.grad, x.numel() // n)
