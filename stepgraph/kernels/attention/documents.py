"""Attention within the documents of a packed sequence, as operators: each document attends to itself alone.

    out[t] = softmax(scale q[t] k[d]^T) v[d]     over the keys of t's document, with `causal` those up to t,
                                                 with `window` the latest `window` of those

``offsets`` (N + 1,) int32 say where documents begin: document n has the tokens from ``offsets[n]`` to
``offsets[n + 1]``. They are a tensor of fixed size: unused entries repeat the number of tokens, and documents without
tokens are fine. On CUDA FlashAttention 2 of torch runs, which skips everything outside a document; elsewhere the
reference, in plain torch, which computes all scores.

Source: Dao, "FlashAttention-2", 2023; torch's ``torch.nn.attention.varlen``, which has no CPU form.
"""

import math

import torch

Tensor = torch.Tensor
aten = torch.ops.aten

_DTYPES = (torch.bfloat16, torch.float16)


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
) -> Tensor:
    """Attend within documents.

    Args:
        query: (T, H, D), bf16 or fp16 on CUDA, any floating point elsewhere.
        key, value: (T, H_kv, D), in the same dtype; H_kv divides H.
        offsets: (N + 1,) int32, from 0 to T, never falling.
        longest: no document is longer. A smaller number launches fewer programs; a too small one is a wrong result,
            so give a bound that the data cannot exceed.
        causal: a token sees no later one.
        window: a token sees itself and the ``window - 1`` tokens before it; with ``causal`` alone.
        scale: of the scores, None: 1 / sqrt(D).

    Returns:
        (T, H, D) in the dtype of ``query``.

    Raises:
        ValueError: other shapes or dtypes, or a window without ``causal``.
    """
    if window is not None and not causal:
        raise ValueError(f"attend_documents got window={window} without causal: give causal=True, or drop the window")
    left = -1 if window is None else window - 1
    return document_attention(query, key, value, offsets, longest, causal, left, scale)[0]


def _hidden(offsets: Tensor, tokens: int, causal: bool, left: int) -> Tensor:
    """(T, T), true where a query (row) does not see a key (column)."""
    place = torch.arange(tokens, device=offsets.device)
    document = torch.searchsorted(offsets[1:].long(), place, right=True)
    hidden = document.unsqueeze(1) != document
    if causal:
        hidden = hidden | (place > place.unsqueeze(1))
    if left >= 0:
        hidden = hidden | (place < place.unsqueeze(1) - left)
    return hidden


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _heads(x: Tensor, repeated: int = 1) -> Tensor:
    """(H, T, D) of (T, H, D), wide, each head ``repeated``."""
    return x.to(_wide(x)).transpose(0, 1).repeat_interleave(repeated, 0)


def _scores(query: Tensor, key: Tensor, offsets: Tensor, causal: bool, left: int, scale: float) -> Tensor:
    """(H, T, T), scaled; -inf where hidden."""
    q, k = _heads(query), _heads(key, query.shape[1] // key.shape[1])
    return (q @ k.mT * scale).masked_fill(_hidden(offsets, query.shape[0], causal, left), -math.inf)


def reference(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, causal: bool, left: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`document_attention` in plain torch: everything in fp32, or fp64 for fp64, rounded once."""
    scores = _scores(query, key, offsets, causal, left, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ _heads(value, query.shape[1] // value.shape[1])
    return out.transpose(0, 1).to(query.dtype).contiguous(), lse


def reference_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    causal: bool,
    left: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in plain torch. Source: Dao et al., "FlashAttention", 2022, appendix B."""
    shared = query.shape[1] // key.shape[1]
    p = (_scores(query, key, offsets, causal, left, scale) - lse.unsqueeze(-1)).exp()
    dy, q, k, v, y = _heads(grad_out), _heads(query), _heads(key, shared), _heads(value, shared), _heads(out)
    ds = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) * scale
    dk, dv = ((a.mT @ b).unflatten(0, (-1, shared)).sum(1) for a, b in ((ds, q), (p, dy)))
    grads = zip((query, key, value), (ds @ k, dk, dv), strict=True)
    return tuple(grad.transpose(0, 1).to(x.dtype).contiguous() for x, grad in grads)


@torch.library.custom_op("stepgraph::document_attention", mutates_args=())
def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    causal: bool,
    left: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """(`attend_documents`'s result; the logarithm of each softmax's denominator, (H, T) in fp32, for fp64 in fp64).

    ``left``: how many tokens before itself a token sees; -1: all of its document.
    """
    _check(query, key, value, offsets)
    factor = _factor(query, scale)
    if not query.is_cuda:
        return reference(query, key, value, offsets, causal, left, factor)
    out, lse, *_ = aten._flash_attention_forward(
        query, key, value, offsets, offsets, longest, longest, 0.0, causal, False,
        scale=factor, window_size_left=left, window_size_right=0 if causal and left >= 0 else -1,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("stepgraph::document_attention_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, contiguous.

    FlashAttention 2 adds up the gradient of the queries in a fixed order only under
    ``torch.use_deterministic_algorithms(True)``.
    """
    factor = _factor(query, scale)
    if not query.is_cuda:
        return reference_backward(grad_out, query, key, value, out, lse, offsets, causal, left, factor)
    unused = query.new_zeros(2, dtype=torch.uint64)  # the state of dropout, of which there is none
    return aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, offsets, offsets, longest, longest, 0.0, causal, unused, unused,
        scale=factor, window_size_left=left, window_size_right=0 if causal and left >= 0 else -1,
    )  # fmt: skip


@document_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    _check(query, key, value, offsets)
    T, H = query.shape[:2]
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(H, T, dtype=_wide(query))


@document_attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _setup_context(ctx, inputs, output) -> None:
    query, key, value, offsets, ctx.longest, ctx.causal, ctx.left, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, offsets)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 8
    grads = document_attention_backward(
        grad_out.contiguous(), *ctx.saved_tensors, ctx.longest, ctx.causal, ctx.left, ctx.scale
    )
    return *grads, None, None, None, None, None


document_attention.register_autograd(_backward, setup_context=_setup_context)


def _factor(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _check(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> None:
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 3 or k != v or q[0] != k[0] or q[2] != k[2] or q[1] % k[1]:
        raise ValueError(
            f"attend_documents got query {tuple(q)}, key {tuple(k)} and value {tuple(v)}; allowed is (T, H, D) and "
            "twice (T, H_kv, D) where H_kv divides H: flatten batch and sequence into T"
        )
    if offsets.ndim != 1 or offsets.dtype != torch.int32:
        raise ValueError(
            f"attend_documents got offsets {tuple(offsets.shape)} of {offsets.dtype}; allowed is (N + 1,) of int32: "
            "use offsets.to(torch.int32)"
        )
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) > 1 or not query.is_floating_point() or (query.is_cuda and query.dtype not in _DTYPES):
        raise ValueError(
            f"attend_documents got {', '.join(sorted(map(str, dtypes)))}; allowed is one dtype for all, bfloat16 or "
            "float16 on a GPU: cast them, or train in bf16"
        )
