"""Frozen linear layers whose weight is stored in fewer bits, and dequantized where it is read.

    y  = x W^T + b      W dequantized in forward
    dx = dy W           W dequantized again in backward: between the two nothing but its bits is kept

W itself gets no gradient. As plain tensors in a parameter and in buffers the bits are inputs of a captured graph, and
both dequantizations nodes of it.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.errors import require_type, require_words, unknown_name
from stepgraph.kernels.fp8.cast import transposed_bytes
from stepgraph.kernels.fp8.product import scaled_product
from stepgraph.kernels.quant.weight import FP8, Fp8Weight, Nf4Weight, QuantizedWeight, cast_rows

Tensor = torch.Tensor


class _Product(torch.autograd.Function):
    """x W^T + b, with W = ``weight(*bits)`` in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Callable[..., Tensor], *bits: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(*bits)
        return F.linear(x, weight(*bits), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        dx = dy @ ctx.weight(*ctx.saved_tensors) if ctx.needs_input_grad[0] else None
        return dx, _sum_rows(dy, ctx.needs_input_grad[1]), None, *(None for _ in ctx.saved_tensors)


class _Fp8Product(torch.autograd.Function):
    """x W^T + b with both sides in fp8, scaled by rows. For dx, whose sums cross the scales of W, dy takes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        rows, given = cast_rows(x)
        y = scaled_product(rows, codes.view(FP8), given, scale, None if bias is None else bias.bfloat16(), True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (codes, scale) = grads, ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            rows, given = cast_rows(dy, scale)
            across = transposed_bytes(codes).view(FP8)
            dx = scaled_product(rows, across, given, scale.new_ones(across.shape[0]), None, True)
            dx = dx.view(*dy.shape[:-1], -1)
        return dx, _sum_rows(dy, ctx.needs_input_grad[1]), None, None


def _sum_rows(dy: Tensor, wanted: bool) -> Tensor | None:
    return dy.reshape(-1, dy.shape[-1]).sum(0) if wanted else None


class QuantizedLinear(QuantizedWeight, nn.Linear):
    """A linear layer with a quantized weight, (out_features, in_features).

    x (..., in_features) in a floating dtype -> (..., out_features) in the same, or in autocast's; the weight is
    dequantized to it. A cast of the module reaches its bias alone.
    """

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Self:
        """``linear``, whose weight is left unchanged, on ``device``; its bias is taken over."""
        new, bias = cls.of_weight(linear.weight.data.to(device)), linear.bias
        new.out_features, new.in_features = new.shape
        held = None if bias is None else nn.Parameter(bias.data.to(device), bias.requires_grad)
        new.register_parameter("bias", held)
        return new

    def forward(self, input: Tensor) -> Tensor:
        """``input`` (..., in_features) times the weight's transpose, plus the bias."""
        kind = input.device.type
        x = input.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else input
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(kind, enabled=False):
            return self._product(x, bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, bits = self._weight(x.dtype)
        return _Product.apply(x, bias, weight, *bits)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class Nf4Linear(QuantizedLinear, Nf4Weight):
    """A linear layer whose weight is in NF4 with double quantization. Its ``state_dict`` has bitsandbytes' names."""


class Fp8Linear(QuantizedLinear, Fp8Weight):
    """A linear layer whose weight is in float8_e4m3fn with a scale for each row.

    A bf16 product on a GPU with fp8 is one in fp8 (sizes are multiples of 16): x, and in backward dy, are cast by rows.
    Elsewhere the weight is dequantized.
    """

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        sizes = x.numel() and self.in_features % 16 == self.out_features % 16 == 0
        if x.is_cuda and x.dtype == torch.bfloat16 and sizes and torch.cuda.get_device_capability(x.device) >= (8, 9):
            return _Fp8Product.apply(x, bias, self.weight, self.weight_scale)
        return super()._product(x, bias)


KINDS: dict[str, type[QuantizedLinear]] = {"nf4": Nf4Linear, "fp8": Fp8Linear}


def quantize_linear(
    model: nn.Module, kind: str, *, skip: Collection[str] = (), device: torch.device | None = None, back: bool = False
) -> list[str]:
    """Quantize and freeze every ``nn.Linear`` in ``model``, except those at the paths ``skip``; returns their paths.

    ``kind``: ``nf4`` or ``fp8``. Each layer in turn is moved to ``device`` and quantized there, and its old weight is
    freed: a GPU holds one of them whole at a time. ``back``: the layer returns to where it was, to be sharded.
    A weight that another module shares (a tied embedding) stays.
    Raises ``ValueError`` where there is nothing to quantize.
    """
    if kind not in KINDS:
        raise unknown_name("quantize", kind, KINDS)
    require_type("model", model, nn.Module, "pass the model whose layers to quantize")
    require_words("skip", skip)
    if unknown := set(skip) - {path for path, _ in model.named_modules()}:
        raise ValueError(f"skip names {min(unknown)!r}, and the model has no such module: use paths of named_modules()")
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    found = [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear and path and path not in skip and held[id(module.weight)] == 1
    ]
    if not found:
        raise ValueError(f"quantize={kind}: {type(model).__name__} has no linear layers besides its head: drop it")
    for path in found:
        parent, _, name = path.rpartition(".")
        holder = model.get_submodule(parent)
        old = getattr(holder, name)
        new = KINDS[kind].of(old, device).train(holder.training)
        setattr(holder, name, new.to(old.weight.device) if back else new)
    return found
