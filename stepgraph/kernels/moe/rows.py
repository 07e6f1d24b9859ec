"""Rows copied from tokens to their slots' places, and back as weighted sums.

    gather_rows:    rows[places[n, k]] = x[n]
    combine_rows:   y[n] = sum over k of weights[n, k] * rows[places[n, k]]

With all weights one each is the other's gradient. No atomic additions: a token adds up its own rows, in the order of
its slots. A slot without a place (-1) has no row, and a row that is no slot's place is zero.
"""

import functools
from typing import Any

import torch

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, and fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def gather_reference(x: Tensor, places: Tensor, n_rows: int) -> Tensor:
    """`gather_rows` in plain torch."""
    rows, used = x.new_zeros(n_rows, x.shape[1]), places >= 0
    rows[places[used].long()] = x.unsqueeze(1).expand(-1, places.shape[1], -1)[used]
    return rows


def combine_reference(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """`combine_rows` in plain torch."""
    total = rows.new_zeros(places.shape[0], rows.shape[1], dtype=wide(rows.dtype))
    for k in range(places.shape[1]):
        part = _at(rows, places[:, k])
        part = part if weights is None else part * weights[:, k, None].to(part.dtype)
        total += part.masked_fill((places[:, k] < 0).unsqueeze(1), 0.0)
    return total.to(rows.dtype)


def combine_backward_reference(dy: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of rows, gradient of weights), in plain torch."""
    drows, dweights = torch.zeros_like(rows, memory_format=torch.contiguous_format), torch.zeros_like(weights)
    grad = dy.to(wide(rows.dtype))
    for k in range(places.shape[1]):
        used = places[:, k] >= 0
        drows[places[used, k].long()] = (grad * weights[:, k, None].to(grad.dtype))[used].to(rows.dtype)
        dweights[:, k] = (grad * _at(rows, places[:, k])).sum(1).masked_fill(~used, 0.0)
    return drows, dweights.contiguous()


def _at(rows: Tensor, places: Tensor) -> Tensor:
    """The rows at ``places`` in the dtype of sums; anything where there is no place."""
    if not rows.shape[0]:
        return rows.new_zeros(places.shape[0], rows.shape[1], dtype=wide(rows.dtype))
    return rows[places.long().clamp(min=0)].to(wide(rows.dtype))


# Operators. ``order`` says which rows no slot uses; without it rows are zeroed first.


def _check(
    name: str, x: Tensor, places: Tensor, order: Tensor | None, n_rows: int, weights: Tensor | None = None
) -> None:
    tokens = x.shape[0] if name == "gather_rows" else places.shape[0]
    right = (
        x.ndim == places.ndim == 2
        and (x.is_floating_point() or (name == "gather_rows" and x.dtype == torch.uint8))
        and places.dtype == torch.int32
        and places.shape[0] == tokens
        and (order is None or (order.dtype == torch.int32 and order.shape == (n_rows,)))
        and (weights is None or (weights.is_floating_point() and weights.shape == places.shape))
    )
    if right:
        return
    given = {"order": order, "places": places, "weights": weights}
    texts = [f"{x.dtype} {tuple(x.shape)}"]
    texts += [f"{key} {t.dtype} {tuple(t.shape)}" for key, t in given.items() if t is not None]
    raise ValueError(
        f"{name} got {', '.join(texts)}; allowed is a matrix of a floating dtype (gather_rows: or uint8), places int32 "
        "(tokens, slots), order int32 (rows,), weights like places: pass what sort_by_expert gives"
    )


@operator(
    lambda x, _, __, n_rows: x.new_empty(n_rows, x.shape[1]),
    launch="moe.rows_triton:gather", check=functools.partial(_check, "gather_rows"), name="gather_rows",
)  # fmt: skip
def _gather(x: Tensor, places: Tensor, order: Tensor | None, n_rows: int) -> Tensor:
    return gather_reference(x, places, n_rows)


@operator(
    lambda rows, places, *_: rows.new_empty(places.shape[0], rows.shape[1]),
    launch="moe.rows_triton:combine", name="combine_rows",
    check=lambda rows, places, weights, order: _check("combine_rows", rows, places, order, rows.shape[0], weights),
)  # fmt: skip
def _combine(rows: Tensor, places: Tensor, weights: Tensor | None, order: Tensor | None) -> Tensor:
    return combine_reference(rows, places, weights)


@operator(
    lambda dy, rows, places, weights, _: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
    launch="moe.rows_triton:combine_backward", name="combine_rows_backward",
)  # fmt: skip
def _combine_backward(
    dy: Tensor, rows: Tensor, places: Tensor, weights: Tensor, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    return combine_backward_reference(dy, rows, places, weights)


# Gradients


def _save_gather(ctx: Any, inputs: tuple, output: Any) -> None:
    _, places, order, _ = inputs
    ctx.save_for_backward(places, order)


def _gather_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    places, order = ctx.saved_tensors
    return _combine(grad, places, None, order), None, None, None


def _save_combine(ctx: Any, inputs: tuple, output: Any) -> None:
    rows, places, weights, order = inputs
    ctx.n_rows = rows.shape[0]
    ctx.save_for_backward(None if weights is None else rows, places, weights, order)


def _combine_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, places, weights, order = ctx.saved_tensors
    if weights is None:
        return _gather(grad, places, order, ctx.n_rows), None, None, None
    drows, dweights = _combine_backward(grad, rows, places, weights, order)
    return drows, None, dweights, None


_gather.register_autograd(_gather_gradient, setup_context=_save_gather)
_combine.register_autograd(_combine_gradient, setup_context=_save_combine)


# Public functions


def gather_rows(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Copy each token to the places of its slots.

    Args:
        x: (N, D), fp32, bf16 or fp16, on a CPU fp64 too; uint8 (packed rows of fp8), which has no gradient.
        order: (R,) int32, the flat slot ``n * K + k`` at each row; -1 for a row of zeros.
        places: (N, K) int32, the row of each slot, each row once at most; -1 for a slot without one. Order and places
            are each other's inverse, as `sort_by_expert` gives them; R may differ from N * K.

    Returns:
        (R, D) in the dtype of ``x``, contiguous. The gradient of ``x`` is the sum of its rows' gradients, in the order
        of slots, in fp32 and rounded once.

    Raises ``ValueError`` for other shapes or dtypes. Deterministic.
    """
    return _gather(x, places, order, order.shape[0])


def combine_rows(rows: Tensor, places: Tensor, weights: Tensor | None = None, order: Tensor | None = None) -> Tensor:
    """Add up the rows of each token's slots, weighted.

    Args:
        rows: (R, D), fp32, bf16 or fp16, on a CPU fp64 too.
        places: (N, K) int32, the row of each slot, each row once at most; -1 for a slot without one.
        weights: (N, K) of a floating dtype; None: all are one.
        order: (R,) int32, the inverse of ``places`` as in `gather_rows`. It changes no value: with it backward on a GPU
            need not fill the gradient of ``rows`` with zeros beforehand.

    Returns:
        (N, D) in the dtype of ``rows``, contiguous: sums in fp32, rounded once. The gradients of weights are dot
        products in fp32.

    Raises ``ValueError`` for other shapes or dtypes. Deterministic.
    """
    return _combine(rows, places, weights, order)
