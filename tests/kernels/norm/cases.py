"""Inputs, float64 references from torch.nn.functional, and tolerances, for all tests of this folder."""

import torch
import torch.nn.functional as F

HALF = (torch.float16, torch.bfloat16)
EPS = 1e-5


def rows(*shape, dtype=torch.float32, seed=0, grad=False):
    """Normally distributed values of a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def exact(kind, x, weight, bias, residual, weight_offset=0.0, eps=EPS):
    """``(y, h)`` in float64 from torch's own norms, on inputs as they are."""
    h = x.double()
    if residual is not None:
        # The contract rounds h once, to the residual's dtype, before the norm; straight-through for the gradient.
        h = h + residual.double()
        h = h + (h.float().to(residual.dtype).double() - h).detach() if residual.dtype != torch.float64 else h
    n = x.shape[-1:]
    y = F.rms_norm(h, n, None, eps) if kind == "rms" else F.layer_norm(h, n, None, None, eps)
    if weight is not None:
        y = y * (weight.double() + weight_offset)
    return (y if bias is None else y + bias.double()), h


def tolerance(dtype, n, rows=1):
    """Absolute and relative: one rounding to ``dtype``, and sums of ``n`` (and ``rows``) float32 terms of order one.

    A value of order one is stored to within half an ulp (eps/2 relative; eps leaves room for the value just next to
    it). A float32 sum of m terms in a tree errs by about log2(m) * eps32 relative to the sum of magnitudes; 16 covers
    m = 65,536. Sums over rows add sqrt(rows) magnitudes of order one.
    """
    eps = torch.finfo(dtype).eps
    eps32 = torch.finfo(torch.float32).eps
    return {"rtol": eps + 16 * eps32, "atol": (eps + 16 * eps32) * 4 * max(1.0, rows**0.5)}


def close(actual, expected, n, rows=1):
    """Assert ``actual`` is the float64 ``expected``, up to the rounding of its own dtype."""
    torch.testing.assert_close(actual.double(), expected.double(), **tolerance(actual.dtype, n, rows))
