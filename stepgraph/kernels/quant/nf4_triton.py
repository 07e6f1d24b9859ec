"""The Triton kernel of `nf4`: each thread reads 4 bytes, of 8 codes, and writes their 8 values.

The eight are looked up one by one and joined in registers, so that the store of a thread is 16 bytes (of bf16) and no
values go through shared memory. The table of 16 values is one cache line.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from stepgraph.kernels.quant.formats import NESTED_BLOCK

Tensor = torch.Tensor
#: Words of 8 values that a program reads at once, one a thread, and how often.
WORDS, STEPS = 128, 4
WARPS = 4

_NESTED_BLOCK = tl.constexpr(NESTED_BLOCK)


@triton.jit
def _value(bits, table, scale, SHIFT: tl.constexpr, to: tl.constexpr):
    return (tl.load(table + ((bits >> SHIFT) & 15)) * scale).to(to)


@triton.jit
def _dequantize_kernel(
    codes, absmax, table, nested_absmax, nested_table, offset, out, words,
    NESTED: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """``STEPS`` times ``WORDS`` words. The first code of a byte is in its upper half, the first byte in the lowest."""
    to = out.dtype.element_ty
    for step in tl.static_range(STEPS):
        word = (tl.program_id(0).to(tl.int64) * STEPS + step) * WORDS + tl.arange(0, WORDS)
        inside = word < words
        bits = tl.load(codes + word, mask=inside, other=0)
        block = word // (BLOCK // 8)
        scale = tl.load(absmax + block, mask=inside, other=0)
        if NESTED:
            coarse = tl.load(nested_absmax + block // _NESTED_BLOCK, mask=inside, other=0.0)
            scale = tl.load(nested_table + scale.to(tl.int32)) * coarse + tl.load(offset)
        a, b = _value(bits, table, scale, 4, to), _value(bits, table, scale, 0, to)
        c, d = _value(bits, table, scale, 12, to), _value(bits, table, scale, 8, to)
        e, f = _value(bits, table, scale, 20, to), _value(bits, table, scale, 16, to)
        g, h = _value(bits, table, scale, 28, to), _value(bits, table, scale, 24, to)
        even = tl.join(tl.join(a, e), tl.join(c, g))
        odd = tl.join(tl.join(b, f), tl.join(d, h))
        eight = tl.reshape(tl.join(even, odd), [WORDS, 8])
        at = word[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(out + at, eight, mask=inside[:, None])


def launch(
    codes: Tensor, absmax: Tensor, quant_map: Tensor, nested: Sequence[Tensor], block: int, shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """As `nf4.dequantize_4bit`."""
    values = math.prod(shape)
    largest, fine, offset = nested or (None, None, None)
    whole = -(-values // 8)
    flat = torch.nn.functional.pad(codes.flatten(), (0, 4 * whole - codes.numel())) if values % 8 else codes.flatten()
    out = codes.new_empty(8 * whole, dtype=dtype)
    # As two roundings: what a fused multiply-add of the nested scale gives has other bits.
    _dequantize_kernel[(triton.cdiv(whole, WORDS * STEPS),)](
        flat.view(torch.int32), absmax, quant_map, largest, fine, offset, out, whole,
        NESTED=bool(nested), BLOCK=block, WORDS=WORDS, STEPS=STEPS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return (out[:values].clone() if values % 8 else out).view(shape)
