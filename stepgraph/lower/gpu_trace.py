"""What torch composes differently on a CPU than on a GPU, traced on a CPU as the forecast's GPU would run it.

Attention with dropout or with values of another width is one kernel on a GPU; on a CPU it is products and a softmax of
every score, as on both where its mask has a gradient. With another mask it is an operator that passes know. Dropout
keeps a boolean for each element on a GPU, and a number on a CPU.
Source: torch's ``attention.cpp``, ``cuda/sdp_utils.cpp`` and ``Dropout.cpp`` in ``aten/src/ATen/native``.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph import compat
from stepgraph.capture.formulas import EagerFormulas
from stepgraph.costs.attention import Case
from stepgraph.passes import Target
from stepgraph.passes.attention.backends import refusal, torch_order

aten = torch.ops.aten


@contextlib.contextmanager
def traced_as(target: Target | None, device: torch.device) -> Iterator[None]:
    """Inside, a step on ``device`` is traced as on ``target`` where that is a GPU that is only simulated."""
    if target is None or not target.simulated or target.device != "cuda" or device.type == "cuda":
        yield
        return
    plain, attention = F.scaled_dot_product_attention, _Attention(target.capability)

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = attention(*args, **kwargs)
        return plain(*args, **kwargs) if made is None else made

    with (
        compat.replaced(EagerFormulas, instead={plain: attention, F.dropout: _dropout}),
        compat.replaced_functions(F, scaled_dot_product_attention=attend),  # multi-head attention runs below the mode
    ):
        yield


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor | None:
    plain = not inplace and not compat.is_traceable_wrapper_subclass(input)
    return torch.native_dropout(input, p, True)[0] if plain and training and 0 < p < 1 and input.numel() else None


class _Attention:
    """The kernel that torch takes on a GPU of ``capability``; None where there is none, and for plain attention, whose
    operator on a CPU the pass ``attention`` replaces."""

    def __init__(self, capability: tuple[int, int] | None):
        self.capability = capability

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        q, k, v, mask = query, key, value, attn_mask
        if mask is None and not dropout_p and q.shape[-1] == v.shape[-1]:
            return None
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            return None
        if any(x.ndim != 4 or not x.numel() or compat.is_traceable_wrapper_subclass(x) for x in (q, k, v)):
            return None
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=q.dtype, device=q.device))
        case = Case(*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:], v.shape[3], is_causal, q.dtype)
        backend = self._backend(case, mask)
        if backend == "flash2":
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        kernel = aten._scaled_dot_product_cudnn_attention
        if backend == "efficient":
            if case.width % 8 or case.value_width % 8 or case.dtype is torch.float64:
                return None
            if enable_gqa:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            kernel = aten._scaled_dot_product_efficient_attention
        if mask is not None:
            mask = mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
        return kernel(q, k, v, mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]

    def _backend(self, case: Case, mask: torch.Tensor | None) -> str:
        strict = torch.are_deterministic_algorithms_enabled()
        for backend in torch_order(self.capability):
            takes = mask is None or backend == "cudnn"
            if takes and refusal(backend, case, self.capability, strict) is None:
                return backend
        return "efficient"
