"""Frozen linear layers whose weight is stored in fewer bits, and dequantized where it is read.

    y  = x W^T + b      W dequantized in forward
    dx = dy W           W dequantized again in backward: between the two nothing but its bits is kept

W itself gets no gradient. As plain tensors in a parameter and in buffers the bits are inputs of a captured graph, and
both dequantizations nodes of it.
"""

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.errors import unknown_name
from stepgraph.kernels.fp8.cast import cast_scaled_rows
from stepgraph.kernels.fp8.product import scaled_product
from stepgraph.kernels.quant import nf4

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn


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
        rows, given = _cast(x)
        y = scaled_product(rows, codes.view(FP8), given, scale, None if bias is None else bias.bfloat16(), True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (codes, scale) = grads, ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            rows, given = _cast((dy * scale).bfloat16())
            across = codes.t().contiguous().view(FP8)
            dx = scaled_product(rows, across, given, scale.new_ones(across.shape[0]), None, True)
            dx = dx.view(*dy.shape[:-1], -1)
        return dx, _sum_rows(dy, ctx.needs_input_grad[1]), None, None


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows in fp8, their scales) of ``x`` (..., K)."""
    rows, scale, *_ = cast_scaled_rows(x.reshape(-1, x.shape[-1]), FP8, True, False)
    return rows, scale


def _sum_rows(dy: Tensor, wanted: bool) -> Tensor | None:
    return dy.reshape(-1, dy.shape[-1]).sum(0) if wanted else None


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in fewer bits: ``weight``, uint8, and what undoes it in buffers.

    x (..., in_features) in a floating dtype -> (..., out_features) in the same, or in autocast's; the weight is
    dequantized to it. A cast of the module (``.to(torch.bfloat16)``) reaches its bias alone.
    """

    kind: str

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, codes: Tensor, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_parameter("bias", bias)
        self.dtype = dtype  # that the weight had

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Self:
        """``linear``, whose weight stays as it is, on ``device``; its bias is taken over."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (out_features, in_features) in ``dtype``, by default that which it had."""
        weight, bits = self._weight(dtype or self.dtype)
        return weight(*bits)

    def _weight(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """What makes the weight in ``dtype`` of which tensors."""
        raise NotImplementedError

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class Nf4Linear(QuantizedLinear):
    """In NF4 with double quantization (`stepgraph.kernels.quant.nf4`). Its ``state_dict`` has bitsandbytes' names."""

    kind = "nf4"

    def __init__(
        self, q: nf4.Quantized, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None = None, block: int = 64
    ):
        super().__init__(shape, bias, q.codes, dtype)
        self.block = block
        self._keep(q)

    def _keep(self, q: nf4.Quantized) -> None:
        names = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "nested_offset")
        for name, tensor in zip(names, (q.absmax, q.quant_map, *(q.nested or (None,) * 3)), strict=True):
            self._parameters.pop(name, None)
            if name == "absmax" and q.nested:  # a byte for 64 values: FSDP shards it as it does the codes
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor, persistent=False)

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Self:
        shape = (linear.out_features, linear.in_features)
        return cls(nf4.quantize(linear.weight.data.to(device)), shape, linear.weight.dtype, _on(linear.bias, device))

    @property
    def quantized(self) -> nf4.Quantized:
        """The weight's bits."""
        nested = (self.nested_absmax, self.nested_quant_map, self.nested_offset)
        return nf4.Quantized(self.weight, self.absmax, self.quant_map, () if nested[0] is None else nested)

    def _weight(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        codes, absmax, table, nested = self.quantized
        shape = (self.out_features, self.in_features)
        return partial(_dequantize, self.block, shape, dtype), (codes, absmax, table, *nested)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}absmax", None)
        shape, dtype = (self.out_features, self.in_features), str(self.dtype).removeprefix("torch.")
        for name, tensor in nf4.to_state(self.quantized, self.kind, self.block, shape, dtype).items():
            destination[f"{prefix}weight.{name}"] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        start = f"{prefix}weight."
        state = {name[len(start) :]: state_dict.pop(name) for name in list(state_dict) if name.startswith(start)}
        codes = state_dict.get(f"{prefix}weight")
        if codes is not None:
            q, plain = nf4.from_state(codes, state)
            if tuple(plain["shape"]) != (self.out_features, self.in_features):
                raise ValueError(
                    f"{prefix}weight is {tuple(plain['shape'])}, the layer {(self.out_features, self.in_features)}: "
                    "give a checkpoint of this model"
                )
            if type(self._parameters["weight"].data) is not Tensor:
                raise ValueError(f"{prefix}weight is sharded: load the layer's 4-bit state before parallelize")
            device = self.weight.device
            self.block, self.dtype = plain["blocksize"], getattr(torch, plain["dtype"])
            self._keep(nf4.Quantized(q.codes, *(t.to(device) for t in q[1:3]), tuple(t.to(device) for t in q.nested)))
            state_dict[f"{prefix}weight"] = q.codes
            if q.nested:
                state_dict[f"{prefix}absmax"] = q.absmax
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Fp8Linear(QuantizedLinear):
    """In float8_e4m3fn with a scale for each row, (out_features,) fp32, in the buffer ``weight_scale``.

    A bf16 product on a GPU with fp8 is one in fp8 (sizes are multiples of 16): x, and in backward dy, are cast by rows.
    Elsewhere the weight is dequantized.
    """

    kind = "fp8"

    def __init__(self, rows: Tensor, scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None):
        super().__init__(tuple(rows.shape), bias, rows.view(torch.uint8), dtype)
        self.register_buffer("weight_scale", scale)

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Self:
        return cls(*_cast(linear.weight.data.to(device)), linear.weight.dtype, _on(linear.bias, device))

    def _weight(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        return partial(_scaled, dtype), (self.weight, self.weight_scale)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        sizes = x.numel() and self.in_features % 16 == self.out_features % 16 == 0
        if x.is_cuda and x.dtype == torch.bfloat16 and sizes and torch.cuda.get_device_capability(x.device) >= (8, 9):
            return _Fp8Product.apply(x, bias, self.weight, self.weight_scale)
        return super()._product(x, bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.detach().view(FP8)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.dtype != FP8:
            raise ValueError(f"{prefix}weight is {given.dtype} and the layer holds {FP8}: give a checkpoint in fp8")
        if given is not None:
            state_dict[f"{prefix}weight"] = given.view(torch.uint8)
        super()._load_from_state_dict(state_dict, prefix, *rest)


KINDS: dict[str, type[QuantizedLinear]] = {"nf4": Nf4Linear, "fp8": Fp8Linear}


def quantize_linear(
    model: nn.Module,
    kind: str,
    *,
    skip: Collection[str] = (),
    device: torch.device | None = None,
    back: bool = False,
) -> list[str]:
    """Replace the frozen form of every ``nn.Linear`` in ``model`` but those at the paths ``skip``; their paths.

    ``kind``: ``nf4`` or ``fp8``. One after another goes to ``device`` and is quantized there, and its old weight is
    freed: a GPU holds one of them whole at a time. ``back``: the layer returns to where it was, to be sharded.
    A weight that another module shares (a tied embedding) stays.
    Raises ``ValueError`` where there is nothing to quantize.
    """
    if kind not in KINDS:
        raise unknown_name("quantize", kind, KINDS)
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


def _on(bias: Tensor | None, device: torch.device | None) -> Tensor | None:
    return None if bias is None else nn.Parameter(bias.data.to(device), bias.requires_grad)


def _dequantize(block: int, shape: tuple[int, int], dtype: torch.dtype, *bits: Tensor) -> Tensor:
    codes, absmax, table, *nested = bits
    return nf4.dequantize_4bit(codes, absmax, table, nested, block, shape, dtype)


def _scaled(dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.view(FP8).float() * scale.unsqueeze(1)).to(dtype)
