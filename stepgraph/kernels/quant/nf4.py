"""Weights of 4 bits in the format of bitsandbytes, NF4.

    absmax_b = max |w_i| over a block of 64 values
    code_i   = the index of the entry of ``quant_map`` that is nearest to w_i / absmax_b
    w_i      ~ quant_map[code_i] * absmax_b                                  in fp32, rounded once

Two codes share a byte, the first one in its upper half. Double quantization stores the block's absmax in 8 bits:

    offset   = mean of absmax;  nested_absmax_c = max |absmax_b - offset| over 256 blocks
    absmax_b ~ nested_quant_map[byte_b] * nested_absmax_c + offset           in fp32, two roundings

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023; the 8-bit map: Dettmers, "8-Bit
Approximations for Parallelism in Deep Learning", 2015.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stepgraph.kernels.operator import operator
from stepgraph.kernels.quant.formats import BLOCK, NESTED_BLOCK

Tensor = torch.Tensor

#: Values that are quantized at a time, a multiple of `BLOCK`: what bounds the memory of fp32 copies.
_AT_ONCE = 2**24
#: Quantiles of the normal distribution, the outermost ones at -1 and 1.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Quantized(NamedTuple):
    """A weight in 4 bits. ``codes``: (ceil(n / 2), 1) uint8. ``absmax``: of each block, uint8 where it is quantized
    itself, otherwise fp32. ``quant_map``: (16,) fp32. ``nested``: what undoes the second quantization, all fp32,
    ``nested_absmax``, ``nested_quant_map`` (256,) and ``offset``, a scalar; empty without one."""

    codes: Tensor
    absmax: Tensor
    quant_map: Tensor
    nested: tuple[Tensor, ...] = ()


def normal_map() -> Tensor:
    """The 16 values of NF4, ascending, fp32."""
    return torch.tensor(_NF4)


def dynamic_map() -> Tensor:
    """The 256 values of the 8-bit map, ascending, fp32: seven decades of both signs, the larger ones finer."""
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1)
        means = (bounds[:-1] + bounds[1:]) / 2
        positive = (10 ** (decade - 6) * means).tolist()
        values += positive + [-value for value in positive]
    return torch.tensor(sorted(values))


def _nearest(values: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(uint8 indices into ``table``, ascending, the largest magnitude of each block) of flat fp32 ``values``."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / absmax.clamp_min(1e-38)).unsqueeze(1)).clamp(-1, 1)
    bounds = (table[:-1] + table[1:]) / 2
    return torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8).flatten()[: values.numel()], absmax


@torch.no_grad()
def quantize(weight: Tensor, nested: bool = True) -> Quantized:
    """``weight``, of any shape and a floating dtype, in NF4; ``nested``: by double quantization. On the device of
    ``weight``, with the bits of bitsandbytes there."""
    if not weight.is_floating_point() or not weight.numel():
        raise ValueError(f"a {weight.dtype} weight {tuple(weight.shape)} in NF4; allowed is a floating one with values")
    flat, table = weight.detach().reshape(-1), normal_map().to(weight.device)
    parts = [_nearest(part.float(), table, BLOCK) for part in flat.split(_AT_ONCE)]
    codes, absmax = (torch.cat(some) for some in zip(*parts, strict=True))
    codes = torch.nn.functional.pad(codes, (0, codes.numel() % 2), value=7)  # the code of zero
    packed = ((codes[::2] << 4) | codes[1::2]).unsqueeze(1)
    if not nested:
        return Quantized(packed, absmax, table)
    offset, fine = absmax.mean(), dynamic_map().to(weight.device)
    small, largest = _nearest(absmax - offset, fine, NESTED_BLOCK)
    return Quantized(packed, small, table, (largest, fine, offset))


def reference(
    codes: Tensor, absmax: Tensor, quant_map: Tensor, nested: Sequence[Tensor], block: int, shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`dequantize_4bit` in plain torch."""
    if nested:
        largest, fine, offset = nested
        absmax = fine[absmax.int()] * largest.repeat_interleave(NESTED_BLOCK)[: absmax.numel()] + offset
    flat = codes.flatten()
    values = quant_map[torch.stack([flat >> 4, flat & 15], 1).int()].flatten()[: math.prod(shape)]
    scales = absmax.repeat_interleave(block)[: values.numel()]
    return (values * scales).to(dtype).view(shape)


def _check(
    codes: Tensor, absmax: Tensor, _: Tensor, nested: Sequence[Tensor], block: int, shape: Sequence[int],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    values = math.prod(shape)
    blocks = -(-values // max(block, 1))
    right = (
        (absmax.dtype, len(nested)) in ((torch.uint8, 3), (torch.float32, 0))
        and (not nested or nested[0].numel() == -(-blocks // NESTED_BLOCK))
        and (codes.dtype, codes.numel(), absmax.numel()) == (torch.uint8, (values + 1) // 2, blocks)
        and codes.is_contiguous() and absmax.is_contiguous()
        and block >= 32 and block & (block - 1) == 0
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
    )  # fmt: skip
    if not right:
        raise ValueError(
            f"dequantize_4bit got {values} values of {dtype}, codes {codes.dtype} {tuple(codes.shape)}, absmax "
            f"{absmax.dtype} {tuple(absmax.shape)} with {len(nested)} nested tensors, block {block}; allowed are "
            "contiguous uint8 codes of half as many bytes, an absmax for each block, in uint8 with the three of "
            "`Quantized.nested` or in fp32 with none, a block of a power of two from 32 on, and fp32, bf16 or fp16: "
            "quantize the weight again"
        )


@operator(
    lambda codes, *rest: codes.new_empty(rest[-2], dtype=rest[-1]), launch="quant.nf4_triton:launch", check=_check
)
def dequantize_4bit(
    codes: Tensor, absmax: Tensor, quant_map: Tensor, nested: Sequence[Tensor], block: int, shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The values of a matrix in 4 bits: ``shape``, contiguous, in ``dtype`` (fp32, bf16 or fp16), the same bits on
    every device.

    codes: uint8, two codes a byte, of the values in their order, in any shape, contiguous. absmax: of each ``block``
    values (a power of two, 32 or more), contiguous: uint8 with double quantization, otherwise fp32. quant_map: (16,)
    fp32, what each code is. nested: as in `Quantized`. Raises ``ValueError`` for other sizes and dtypes.
    """
    return reference(codes, absmax, quant_map, nested, block, shape, dtype)


#: In names of the state dict, what marks the values that are not tensors.
STATE = "quant_state.bitsandbytes__"


def to_state(quantized: Quantized, kind: str, block: int, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """What bitsandbytes' ``state_dict`` has besides the codes, by its names. ``kind``: nf4 or fp4. ``dtype``: what the
    weight had before, as in ``bfloat16``."""
    q = quantized
    plain: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": list(shape)}
    state = {"absmax": q.absmax, "quant_map": q.quant_map}
    if q.nested:
        largest, fine, offset = q.nested
        state |= {"nested_absmax": largest, "nested_quant_map": fine}
        plain |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset.item()}
    return state | {STATE + kind: torch.tensor(list(json.dumps(plain).encode()), dtype=torch.uint8)}


def from_state(codes: Tensor, state: dict[str, Tensor]) -> tuple[Quantized, dict[str, Any]]:
    """The inverse of `to_state`, and the values that are not tensors. ``ValueError`` for another format."""
    packed = [name for name in state if name.startswith(STATE)]
    if len(packed) != 1 or not {"absmax", "quant_map"} <= state.keys():
        raise ValueError(f"a 4-bit weight with {', '.join(sorted(state))}; needed are absmax, quant_map and {STATE}nf4")
    plain = json.loads(bytes(state[packed[0]].tolist()))
    if plain.get("nested_blocksize", NESTED_BLOCK) != NESTED_BLOCK:
        raise ValueError(f"nested_blocksize {plain['nested_blocksize']} is not supported, only {NESTED_BLOCK}")
    nested: tuple[Tensor, ...] = ()
    if "nested_absmax" in state:
        offset = torch.tensor(float(plain["nested_offset"]), device=codes.device)
        nested = state["nested_absmax"], state["nested_quant_map"], offset
    packed_codes = codes.contiguous().view(torch.uint8).view(-1, 1)
    return Quantized(packed_codes, state["absmax"], state["quant_map"], nested), plain
