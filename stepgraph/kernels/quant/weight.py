"""Frozen weights stored in fewer bits, dequantized where they are read."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from stepgraph.kernels.fp8.cast import cast_scaled_rows
from stepgraph.kernels.quant import nf4

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn


class QuantizedWeight(nn.Module):
    """A frozen weight in fewer bits: ``weight``, uint8, and what undoes it in buffers.

    A cast of the module (``.to(torch.bfloat16)``) leaves it as it is.
    """

    kind: str

    def __init__(self, shape: Sequence[int], codes: Tensor, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.shape = tuple(shape)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.dtype = dtype  # that the weight had

    @classmethod
    def of_weight(cls, weight: Tensor) -> Self:
        """``weight``, which is left unchanged, on its device."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in its shape, in ``dtype``, by default its original dtype."""
        weight, bits = self._weight(dtype or self.dtype)
        return weight(*bits)

    def sizes(self) -> tuple[int, int]:
        """Bytes of the weight, before and now."""
        return math.prod(self.shape) * self.dtype.itemsize, sum(t.nbytes for t in (*self.parameters(), *self.buffers()))

    def _weight(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """What makes the weight in ``dtype`` of which tensors."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class Nf4Weight(QuantizedWeight):
    """A weight in NF4 with double quantization, see `nf4`. Its ``state_dict`` has bitsandbytes' names."""

    kind = "nf4"

    def __init__(self, q: nf4.Quantized, shape: Sequence[int], dtype: torch.dtype, block: int = 64):
        super().__init__(shape, q.codes, dtype)
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
    def of_weight(cls, weight: Tensor) -> Self:
        return cls(nf4.quantize(weight), weight.shape, weight.dtype)

    @property
    def quantized(self) -> nf4.Quantized:
        """The weight's bits."""
        nested = (self.nested_absmax, self.nested_quant_map, self.nested_offset)
        return nf4.Quantized(self.weight, self.absmax, self.quant_map, () if nested[0] is None else nested)

    def _weight(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        codes, absmax, table, nested = self.quantized
        return partial(_dequantize, self.block, self.shape, dtype), (codes, absmax, table, *nested)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}absmax", None)
        dtype = str(self.dtype).removeprefix("torch.")
        for name, tensor in nf4.to_state(self.quantized, self.kind, self.block, self.shape, dtype).items():
            destination[f"{prefix}weight.{name}"] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        start = f"{prefix}weight."
        state = {name[len(start) :]: state_dict.pop(name) for name in list(state_dict) if name.startswith(start)}
        codes = state_dict.get(f"{prefix}weight")
        if codes is not None:
            q, plain = nf4.from_state(codes, state)
            if (given := tuple(plain["shape"])) != self.shape:
                raise ValueError(f"{prefix}weight is {given}, the layer {self.shape}: use a checkpoint of this model")
            if type(self._parameters["weight"].data) is not Tensor:
                raise ValueError(f"{prefix}weight is sharded: load the layer's 4-bit state before parallelize")
            device = self.weight.device
            self.block, self.dtype = plain["blocksize"], getattr(torch, plain["dtype"])
            self._keep(nf4.Quantized(q.codes, *(t.to(device) for t in q[1:3]), tuple(t.to(device) for t in q.nested)))
            state_dict[f"{prefix}weight"] = q.codes
            if q.nested:
                state_dict[f"{prefix}absmax"] = q.absmax
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Fp8Weight(QuantizedWeight):
    """A weight in float8_e4m3fn with a scale per row: ``weight_scale``, fp32, the shape without its last dimension."""

    kind = "fp8"

    def __init__(self, rows: Tensor, scale: Tensor, shape: Sequence[int], dtype: torch.dtype):
        super().__init__(shape, rows.view(torch.uint8).view(shape), dtype)
        self.register_buffer("weight_scale", scale.view(shape[:-1]))

    @classmethod
    def of_weight(cls, weight: Tensor) -> Self:
        return cls(*cast_rows(weight), weight.shape, weight.dtype)

    def _weight(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        return partial(_scaled, dtype), (self.weight, self.weight_scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.detach().view(FP8)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.dtype != FP8:
            raise ValueError(f"{prefix}weight is {given.dtype} and the layer holds {FP8}: use a checkpoint in fp8")
        if given is not None:
            state_dict[f"{prefix}weight"] = given.view(torch.uint8)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def cast_rows(x: Tensor, by: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows in fp8, their scales) of ``x`` (..., K), or of ``x * by``, where ``by`` is (K,) fp32."""
    rows, scale, *_ = cast_scaled_rows(x.reshape(-1, x.shape[-1]), FP8, True, False, by)
    return rows, scale


def _dequantize(block: int, shape: Sequence[int], dtype: torch.dtype, *bits: Tensor) -> Tensor:
    codes, absmax, table, *nested = bits
    return nf4.dequantize_4bit(codes, absmax, table, nested, block, shape, dtype)


def _scaled(dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.view(FP8).float() * scale.unsqueeze(-1)).to(dtype)
