"""FlashAttention 4 as operators, forward and backward: the optional package ``flash-attn-4`` (``flash_attn.cute``).

    out = softmax(scale q k^T) v        lse = log of the softmax's denominator, with the scale inside

The package is called by the two functions that torch's own integration calls
(``torch.nn.attention.activate_flash_attention_impl("FA4")``, which would replace FlashAttention 2 by it for
the whole process). On a CPU the reference runs, to test numerics, not for speed.

Source: the package's ``flash_attn/cute/interface.py``, read at 4.0.0b10 and 4.0.0b36.
"""

import importlib.util
import math
from pathlib import Path

import torch

from stepgraph.kernels.attention.reference import attend, gradients, wide
from stepgraph.kernels.operator import operator
from stepgraph.kernels.optional import Package

Tensor = torch.Tensor


def installed() -> bool:
    """Whether the package is installed, judged by its folder: nothing is imported."""
    spec = importlib.util.find_spec("flash_attn")  # FlashAttention 2 has the same folder, without cute
    return spec is not None and any(Path(place, "cute").is_dir() for place in spec.submodule_search_locations or ())


PACKAGE = Package(
    "flash-attn-4", "flash_attn.cute.interface", ("_flash_attn_fwd", "_flash_attn_bwd"), installed,
    "another backend of attention",
)  # fmt: skip
unavailable = PACKAGE.unavailable


def reference(query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """`flash4_attention` in plain torch, rounded once."""
    out, lse = attend(query, key, value, *_options(query, key, scale, is_causal))
    made, log_sum = _results(query, value)
    return made.copy_(out), log_sum.copy_(lse)


def reference_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, scale: float | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`flash4_attention_backward` in plain torch."""
    options = _options(query, key, scale, is_causal)
    grads = zip((query, key, value), gradients(grad_out, query, key, value, out, logsumexp, *options), strict=True)
    return tuple(torch.empty_like(x).copy_(grad) for x, grad in grads)


def _options(query: Tensor, key: Tensor, scale: float | None, is_causal: bool) -> tuple[Tensor | None, float]:
    """What is hidden, and the scale."""
    shape = query.shape[2], key.shape[2]
    hidden = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1) if is_causal else None
    return hidden, 1 / math.sqrt(query.shape[3]) if scale is None else scale


def run_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """`flash4_attention` by the package, which takes (B, T, H, D) in any strides."""
    out, lse = _results(query, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    PACKAGE.load()._flash_attn_fwd(
        q, k, v, softmax_scale=scale, causal=is_causal, return_lse=True, out=out.transpose(1, 2), lse=lse
    )
    return out, lse


def run_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float | None,
    is_causal: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash4_attention_backward` by the package."""
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    dy, q, k, v, y = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    PACKAGE.load()._flash_attn_bwd(
        q, k, v, y, dy, logsumexp,
        softmax_scale=scale, causal=is_causal, deterministic=deterministic, dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    return grads


@operator(lambda query, _, value, *__: _results(query, value), launch=run_forward)
def flash4_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend by FlashAttention 4: (B, H, T, D_v) in the dtype of ``query``, its dimensions in memory in the order of
    the query's; and the ``lse`` (B, H, T) in fp32, for fp64 in fp64.

    query: (B, H, T, D), bf16 or fp16, on a CPU fp32 and fp64 too. key, value: (B, H_kv, S, D) and (B, H_kv, S, D_v), in
    the same dtype; H_kv divides H. scale: of the scores, None: 1 / sqrt(D). is_causal: each query sees the keys up to
    its own; T and S must then be equal. Raises ``ValueError`` on a GPU where the package is missing.
    """
    return reference(query, key, value, scale, is_causal)


@operator(lambda _, *inputs: tuple(map(torch.empty_like, inputs[:3])), launch=run_backward)
def flash4_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float | None,
    is_causal: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the ``query``, ``key`` and ``value`` of `flash4_attention`, as ``torch.empty_like`` of them,
    from ``grad_out`` (B, H, T, D_v).

    deterministic: add up the gradient of the queries, and of shared keys and values, in a fixed order; otherwise in the
    order in which blocks of keys finish. Raises ``ValueError`` as `flash4_attention`.
    """
    return reference_backward(grad_out, query, key, value, out, logsumexp, scale, is_causal)


def _results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for both results."""
    B, H, T, _ = query.shape
    outer_first = sorted(range(4), key=lambda dim: -query.stride(dim))
    out = torch.empty_permuted((B, H, T, value.shape[3]), outer_first, dtype=query.dtype, device=query.device)
    return out, query.new_empty(B, H, T, dtype=wide(query))
