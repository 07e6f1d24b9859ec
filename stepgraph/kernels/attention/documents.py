"""Attention within the documents of a packed sequence, as operators: each document attends to itself alone.

    out[t] = softmax(scale q[t] k[d]^T) v[d]     over the keys of t's document, with `causal` those up to t,
                                                 with `window` the latest `window` of those

``offsets`` (N + 1,) int32 say where documents begin: document n has the tokens from ``offsets[n]`` to
``offsets[n + 1]``. They are a tensor of fixed size: unused entries repeat the number of tokens, and documents without
tokens are fine. With ``key_offsets`` a document's queries are its latest tokens alone, as of a rank that has a part of
a sequence: its last query sees its last key. On CUDA FlashAttention 2 of torch runs, which skips everything outside a
document; elsewhere the reference, in plain torch, which computes all scores.

Source: Dao, "FlashAttention-2", 2023; torch's ``torch.nn.attention.varlen``, which has no CPU form.
"""

import math
from typing import Any

import torch

from stepgraph.kernels.attention.reference import attend, gradients, wide
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor
aten = torch.ops.aten

#: What the kernel takes on CUDA.
DTYPES = (torch.bfloat16, torch.float16)


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    key_offsets: Tensor | None = None,
    key_longest: int | None = None,
) -> Tensor:
    """Attend within documents.

    Args:
        query: (T, H, D), bf16 or fp16 on CUDA, any floating point elsewhere.
        key, value: (T, H_kv, D), in the same dtype; H_kv divides H. With ``key_offsets``: (S, H_kv, D).
        offsets: (N + 1,) int32, from 0 to T, never falling.
        longest: no document is longer. A smaller number launches fewer programs; a too small one is a wrong result,
            so give a bound that the data cannot exceed.
        causal: a token sees no later one.
        window: a token sees itself and the ``window - 1`` tokens before it; with ``causal`` alone.
        scale: of the scores, None: 1 / sqrt(D).
        key_offsets: (N + 1,) int32, from 0 to S: where documents begin among the keys; None: where they do among the
            queries. A document has at least as many keys as queries.
        key_longest: with ``key_offsets``: no document has more keys.

    Returns:
        (T, H, D) in the dtype of ``query``.

    Raises:
        ValueError: other shapes or dtypes, or a window without ``causal``.
    """
    if window is not None and not causal:
        raise ValueError(f"attend_documents got window={window} without causal: use causal=True, or drop the window")
    left = -1 if window is None else window - 1
    return document_attention(query, key, value, offsets, longest, causal, left, scale, key_offsets, key_longest)[0]


def _hidden(offsets: Tensor, key_offsets: Tensor | None, queries: int, keys: int, causal: bool, left: int) -> Tensor:
    """(T, S), true where a query (row) does not see a key (column)."""

    def placed(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """(the document of each token, its place as counted from the document's end)."""
        place, ends = torch.arange(tokens, device=offsets.device), offsets[1:].long()
        document = torch.searchsorted(ends, place, right=True)
        return document, place - ends[document.clamp(max=len(ends) - 1)]

    of_keys = offsets if key_offsets is None else key_offsets
    (document, query), (other, key) = placed(offsets, queries), placed(of_keys, keys)
    document, query = document.unsqueeze(1), query.unsqueeze(1)
    hidden = document != other
    if causal:
        hidden = hidden | (key > query)
    if left >= 0:
        hidden = hidden | (key < query - left)
    return hidden


def reference(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool, left: int, scale: float,
    key_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`document_attention` in plain torch, rounded once."""
    hidden = _hidden(offsets, key_offsets, len(query), len(key), causal, left)
    out, lse = attend(*(x.transpose(0, 1) for x in (query, key, value)), hidden, scale)
    return out.transpose(0, 1).to(query.dtype).contiguous(), lse


def reference_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, offsets: Tensor,
    causal: bool, left: int, scale: float, key_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients in plain torch."""
    hidden = _hidden(offsets, key_offsets, len(query), len(key), causal, left)
    dy, q, k, v, y = (x.transpose(0, 1) for x in (grad_out, query, key, value, out))
    grads = zip((query, key, value), gradients(dy, q, k, v, y, lse, hidden, scale), strict=True)
    return tuple(grad.transpose(0, 1).to(x.dtype).contiguous() for x, grad in grads)


def _check(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, key_offsets: Tensor | None = None) -> None:
    q, k, v = query.shape, key.shape, value.shape
    fits = q[0] == k[0] or key_offsets is not None
    if not len(q) == len(k) == len(v) == 3 or k != v or not fits or q[2] != k[2] or q[1] % k[1]:
        raise ValueError(
            f"attend_documents got query {tuple(q)}, key {tuple(k)} and value {tuple(v)}; allowed is (T, H, D) and "
            "twice (T, H_kv, D) where H_kv divides H: flatten batch and sequence into T"
        )
    given = (offsets, *([] if key_offsets is None else [key_offsets]))
    if any(one.ndim != 1 or one.dtype != torch.int32 or one.shape != offsets.shape for one in given):
        offsets = given[-1]
        raise ValueError(
            f"attend_documents got offsets {tuple(offsets.shape)} of {offsets.dtype}; allowed is (N + 1,) of int32: "
            "use offsets.to(torch.int32)"
        )
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) > 1 or not query.is_floating_point() or (query.is_cuda and query.dtype not in DTYPES):
        raise ValueError(
            f"attend_documents got {', '.join(sorted(map(str, dtypes)))}; allowed is one dtype for all, bfloat16 or "
            "float16 on a GPU: cast them, or train in bf16"
        )


def _empty(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    T, H = query.shape[:2]
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(H, T, dtype=wide(query))


@operator(_empty, check=lambda *given: _check(*given[:4], *given[8:9]))
def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    causal: bool,
    left: int,
    scale: float | None,
    key_offsets: Tensor | None = None,
    key_longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(`attend_documents`'s result; the logarithm of each softmax's denominator, (H, T) in fp32, for fp64 in fp64).

    ``left``: how many tokens before itself a token sees; -1: all of its document.
    """
    factor = _factor(query, scale)
    if not query.is_cuda:
        return reference(query, key, value, offsets, causal, left, factor, key_offsets)
    of_keys = (offsets, longest) if key_offsets is None else (key_offsets, key_longest)
    out, lse, *_ = aten._flash_attention_forward(
        query, key, value, offsets, of_keys[0], longest, of_keys[1], 0.0, causal, False,
        scale=factor, window_size_left=left, window_size_right=0 if causal and left >= 0 else -1,
    )  # fmt: skip
    return out, lse


@operator(lambda _, *given: tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[:3]))
def document_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    longest: int,
    causal: bool,
    left: int,
    scale: float | None,
    key_offsets: Tensor | None = None,
    key_longest: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, contiguous.

    FlashAttention 2 adds up the gradient of the queries in a fixed order only under
    ``torch.use_deterministic_algorithms(True)``.
    """
    factor = _factor(query, scale)
    if not query.is_cuda:
        return reference_backward(grad_out, query, key, value, out, lse, offsets, causal, left, factor, key_offsets)
    of_keys = (offsets, longest) if key_offsets is None else (key_offsets, key_longest)
    unused = query.new_zeros(2, dtype=torch.uint64)  # the state of dropout, of which there is none
    return aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, offsets, of_keys[0], longest, of_keys[1], 0.0, causal, unused, unused,
        scale=factor, window_size_left=left, window_size_right=0 if causal and left >= 0 else -1,
    )  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, offsets, *ctx.options, key_offsets, ctx.key_longest = inputs
    ctx.save_for_backward(query, key, value, *output, offsets, key_offsets)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 10
    *saved, key_offsets = ctx.saved_tensors
    grads = document_attention_backward(grad_out.contiguous(), *saved, *ctx.options, key_offsets, ctx.key_longest)
    return *grads, *(None,) * 7


document_attention.register_autograd(_backward, setup_context=_setup_context)


def _factor(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
