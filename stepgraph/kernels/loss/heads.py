"""A language model's head together with the values that a loss needs, one chunk of tokens at a time.

    log_probs = token_log_probs(hidden, head.weight, labels)       # (B, T, D), (V, D), (B, T) -> (B, T)

The logits of one part exist at a time, in the dtype of ``hidden``; the backward computes them again, a product more.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from stepgraph.kernels.loss.tokens import token_gradient_, token_kl_gradient_, token_kl_stats, token_stats

#: Bytes of the logits of a part, and the fewest rows for products that are as fast as over all.
PART_BYTES, FEWEST_ROWS = 5 * 2**28, 2048


def parts_of(rows: int, columns: int, itemsize: int, part_bytes: int = PART_BYTES) -> int:
    """In how many parts of ``part_bytes`` the logits of ``rows`` tokens fit."""
    return max(1, min(math.ceil(rows * columns * itemsize / part_bytes), rows // FEWEST_ROWS))


def token_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None, *,
    scale: float = 1.0, ignore: int = -100, parts: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """``log_softmax(scale * (hidden @ weight.T + bias))`` at ``labels``, without the logits of all tokens in memory.

    Args:
        hidden: (..., D), the input of the head, already shifted: ``hidden[:, :-1]`` for the labels ``ids[:, 1:]``.
        weight: (V, D) in the dtype of ``hidden`` or, under autocast, another; ``bias`` (V,).
        labels: (...) int64 in [0, V). Tokens with ``ignore`` give 0 and no gradient; any other label gives NaN.
        scale: 1 / temperature.
        parts: in how many parts of the tokens; None: as many as keep their logits near a GiB.

    Returns:
        (...) fp32. Gradients reach ``hidden``, ``weight`` and ``bias``; they are deterministic.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return token_log_probs_and_entropies(hidden, weight, labels, bias, scale=scale, ignore=ignore, parts=parts)[0]


def token_log_probs_and_entropies(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None, *,
    scale: float = 1.0, ignore: int = -100, parts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`token_log_probs`, and each token's entropy ``-(p * log p).sum(-1)`` in nats, (...) fp32, of tokens with label
    ``ignore`` too. Gradients flow through both; detach what is only logged."""
    _check(hidden, weight, bias, labels)
    hidden, weight, bias = _under_autocast(hidden, weight, bias)
    found = _LabelHead.apply(hidden, weight, bias, labels, float(scale), ignore, parts)
    return found[0], found[1]


def token_kl(
    student: torch.Tensor, student_weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor,
    student_bias: torch.Tensor | None = None, teacher_bias: torch.Tensor | None = None, *,
    reverse: bool = False, scale: float = 1.0, parts: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """KL(teacher || student) of each token, without the logits of all tokens in memory; KL(student || teacher) if
    ``reverse``.

    Args:
        student, teacher: inputs of the heads, (..., D) each with its own D.
        student_weight, teacher_weight: (V, D), and biases (V,).
        scale: 1 / temperature, of both.
        parts: as in `token_log_probs`.

    Returns:
        (...) fp32, in nats. Gradients flow to student and teacher as required; they are deterministic.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    for hidden, weight, bias in ((student, student_weight, student_bias), (teacher, teacher_weight, teacher_bias)):
        _check(hidden, weight, bias, None)
    if student.shape[:-1] != teacher.shape[:-1] or len(student_weight) != len(teacher_weight):
        raise ValueError(
            f"student {list(student.shape)} of {len(student_weight)} and teacher {list(teacher.shape)} of "
            f"{len(teacher_weight)} tokens; they must share all but their widths"
        )
    of_student = _under_autocast(student, student_weight, student_bias)
    of_teacher = _under_autocast(teacher, teacher_weight, teacher_bias)
    p, q = (of_student, of_teacher) if reverse else (of_teacher, of_student)
    return _DivergingHeads.apply(*p, *q, float(scale), parts)


def _check(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor | None) -> None:
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[1:] or (bias is not None and len(bias) != len(weight)):
        given = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}"
        given += "" if bias is None else f", bias {list(bias.shape)}"
        raise ValueError(f"{given}; they must be (..., D), (V, D) and (V,)")
    if labels is not None and (labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64):
        raise ValueError(
            f"labels {list(labels.shape)} {labels.dtype} for hidden {list(hidden.shape)}; they must be "
            f"{list(hidden.shape[:-1])} torch.int64: shift both, as in hidden[:, :-1] and ids[:, 1:]"
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"hidden {hidden.dtype} and weight {weight.dtype}; cast one, or use autocast")


def _under_autocast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """``tensors`` as a linear layer takes them under the current autocast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [t if t is None else t.to(torch.get_autocast_dtype(device)) for t in tensors]


class _Head:
    """A head (hidden, weight, bias), and its gradients as parts give them."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: Sequence[bool]):
        self.shape, self.x, self.weight, self.bias = hidden.shape, hidden.flatten(0, -2), weight, bias
        self.needs, self.dx, self.dw, self.db = needs, [], None, None

    def bounds(self, parts: int | None) -> list[tuple[int, int]]:
        """The rows of each part."""
        rows = len(self.x)
        step = math.ceil(rows / (parts or parts_of(rows, len(self.weight), self.x.element_size()))) or 1
        return [(first, min(first + step, rows)) for first in range(0, rows, step)] or [(0, 0)]

    def logits(self, first: int, last: int) -> torch.Tensor:
        return F.linear(self.x[first:last], self.weight, self.bias)

    def take(self, first: int, last: int, slopes: torch.Tensor) -> None:
        """Add what the logits' gradient of a part gives."""
        if self.needs[0]:
            self.dx.append(slopes @ self.weight)
        if self.needs[1]:
            x = self.x[first:last]
            self.dw = slopes.t() @ x if self.dw is None else self.dw.addmm_(slopes.t(), x)
        if self.bias is not None and self.needs[2]:
            total = slopes.sum(0, dtype=torch.promote_types(slopes.dtype, torch.float32))
            self.db = total if self.db is None else self.db + total

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        dx = torch.cat(self.dx).view(self.shape) if self.needs[0] else None
        return dx, self.dw, self.db if self.db is None else self.db.to(self.bias.dtype)


class _LabelHead(torch.autograd.Function):
    """(log-probabilities, entropies) of a head's labels."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight, bias, labels, scale, ignore, parts = inputs
        head, flat = _Head(hidden, weight, bias, ()), labels.flatten()
        bounds = head.bounds(parts)
        found = [token_stats(head.logits(a, b), flat[a:b], scale, ignore) for a, b in bounds]
        log_prob, log_sum, entropy, _ = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, bias, labels, log_sum, entropy)
        ctx.constants = scale, ignore, bounds
        return log_prob.view(labels.shape), entropy.view(labels.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: torch.Tensor, entropy_slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, log_sum, entropy = ctx.saved_tensors
        scale, ignore, bounds = ctx.constants
        head = _Head(hidden, weight, bias, ctx.needs_input_grad)
        none = torch.zeros_like(log_sum)
        rows = labels.flatten(), log_sum, entropy, slope.flatten(), none, entropy_slope.flatten(), none
        for first, last in bounds:
            logits = head.logits(first, last)
            token_gradient_(logits, *(t[first:last] for t in rows), scale, ignore)
            head.take(first, last, logits)
        return *head.gradients(), None, None, None, None


class _DivergingHeads(torch.autograd.Function):
    """KL(p || q) of two heads' tokens."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        p, q = _Head(*inputs[:3], ()), _Head(*inputs[3:6], ())
        scale, parts = inputs[6:]
        bounds = p.bounds(parts)
        found = [token_kl_stats(p.logits(a, b), q.logits(a, b), scale) for a, b in bounds]
        kl, *sums = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(*inputs[:6], *sums, kl)
        ctx.constants = scale, bounds
        return kl.view(p.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *heads, p_sum, q_sum, kl = ctx.saved_tensors
        scale, bounds = ctx.constants
        needs = ctx.needs_input_grad
        p, q = _Head(*heads[:3], needs[:3]), _Head(*heads[3:], needs[3:6])
        slope = slope.flatten()
        for first, last in bounds:
            own, other = p.logits(first, last), q.logits(first, last)
            of_p, of_q, rows, slopes = p_sum[first:last], q_sum[first:last], kl[first:last], slope[first:last]
            kept = own.clone() if any(p.needs) and any(q.needs) else own
            if any(p.needs):
                token_kl_gradient_(own, other, of_p, of_q, rows, slopes, scale, True)
                p.take(first, last, own)
            if any(q.needs):
                token_kl_gradient_(other, kept, of_q, of_p, rows, slopes, scale, False)
                q.take(first, last, other)
        return *p.gradients(), *q.gradients(), None, None
