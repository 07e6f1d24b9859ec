"""The functions of the CUDA backend for tests: a plan for each call, by a configuration if one is given."""

from stepgraph.kernels.norm.triton import single
from stepgraph.kernels.norm.triton.single import forward_cast

__all__ = ["backward", "backward_pair", "forward", "forward_cast", "forward_pair", "forward_plan"]


def forward_plan(norm, x, weight, bias, residual, keep_h, config=None):
    return single.forward_plan(norm, keep_h, config, None, x, residual, weight, bias)


def forward(norm, x, weight, bias, residual, keep_h, config=None):
    """``(y, h, mean, rstd)``"""
    return forward_plan(norm, x, weight, bias, residual, keep_h, config).run(x, residual, weight, bias)[:4]


def backward(norm, dy, h, weight, mean, rstd, dh, dx_dtype, need_dx, need_dw, need_db, config=None):
    """``(dx, dw, db)``"""
    if not (need_dx or need_dw or need_db):
        return None, None, None
    plan = single.backward_plan(norm, dx_dtype, need_dx, need_dw, need_db, config, dy, h, weight, dh)
    return plan.run(dy, h, weight, mean, rstd, dh)[:3]


def forward_pair(norm, q, k, wq, wk, config=None):
    """``(yq, yk, rstd_q, rstd_k)``"""
    return single.forward_pair_plan(norm, config, q, k, wq, wk).run(q, k, wq, wk)


def backward_pair(norm, dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, need_dx, need_dw, config=None):
    """``(dq, dk, dwq, dwk)``"""
    if not (need_dx or need_dw):
        return None, None, None, None
    plan = single.backward_pair_plan(norm, need_dx, need_dw, config, dyq, dyk, q, k, wq, wk)
    return plan.run(dyq, dyk, q, k, wq, wk, rstd_q, rstd_k)[:4]
