"""The functions of the CUDA backend for tests: a plan for each call, by a configuration if one is given."""

from stepgraph.kernels.norm.triton import single

__all__ = ["backward", "forward", "forward_plan"]


def forward_plan(norm, x, weight, bias, residual, keep_h, config=None):
    return single.forward_plan(norm, keep_h, config, x, residual, weight, bias)


def forward(norm, x, weight, bias, residual, keep_h, config=None):
    """``(y, h, mean, rstd)``"""
    return forward_plan(norm, x, weight, bias, residual, keep_h, config).run(x, residual, weight, bias)[:4]


def backward(norm, dy, h, weight, mean, rstd, dh, dx_dtype, need_dx, need_dw, need_db, config=None):
    """``(dx, dw, db)``"""
    if not (need_dx or need_dw or need_db):
        return None, None, None
    plan = single.backward_plan(norm, dx_dtype, need_dx, need_dw, need_db, config, dy, h, weight, dh)
    return plan.run(dy, h, weight, mean, rstd, dh)[:3]
