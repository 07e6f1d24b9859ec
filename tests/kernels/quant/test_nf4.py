"""4-bit weights: against bitsandbytes where it is installed, against its published format, and kernels interpreted."""

from pathlib import Path

import pytest
import torch

from stepgraph.kernels.quant import nf4
from tests.kernels import triton_tools

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 64), (300, 448), (5, 7), (3, 50)]


def weight(shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def dequantize(q, shape, dtype=torch.float32, block=64):
    return nf4.dequantize_4bit(*q, block, shape, dtype)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_bitsandbytes(dtype, nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(nf4.dynamic_map(), functional.create_dynamic_map())
    for shape in SHAPES:
        w = weight(shape, dtype)
        ours = nf4.quantize(w, nested)
        codes, state = functional.quantize_4bit(w, compress_statistics=nested, quant_type="nf4")
        assert torch.equal(ours.codes, codes) and torch.equal(ours.quant_map, state.code)
        if nested:  # between two entries of the map, and of zeros, its CPU and GPU code choose differently
            assert state.absmax.numel() == 1 or (ours.absmax.int() - state.absmax.int()).abs().max() <= 1
            theirs = (state.state2.absmax, state.state2.code, state.offset)
            assert all(map(torch.equal, ours.nested, theirs))
        else:
            theirs = ()
            assert torch.equal(ours.absmax, state.absmax)
        q = nf4.Quantized(codes, state.absmax, state.code, theirs)
        assert torch.equal(dequantize(q, shape, dtype), functional.dequantize_4bit(codes, state))

        # Both read what the other writes.
        names = nf4.to_state(ours, "nf4", 64, shape, str(dtype).removeprefix("torch."))
        assert names.keys() == state.as_dict(packed=True).keys()
        back = functional.QuantState.from_dict({f"a.{k}": v for k, v in names.items()}, device=torch.device("cpu"))
        assert torch.equal(functional.dequantize_4bit(ours.codes, back), dequantize(ours, shape, dtype))
        read, plain = nf4.from_state(codes, state.as_dict(packed=True))
        assert torch.equal(dequantize(read, shape), dequantize(q, shape)) and plain["shape"] == list(shape)


def test_the_published_format():
    """A block whose values are the entries of the table has their indices as codes, the first in the upper half."""
    table = torch.tensor(nf4._NF4)
    q = nf4.quantize(torch.cat([3 * table, torch.zeros(48)]), nested=False)
    assert q.codes.flatten().tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] + [0x77] * 24
    assert q.absmax.tolist() == [3.0]
    assert torch.equal(dequantize(q, (64,))[:16], 3 * table)
    fine = nf4.dynamic_map()
    assert fine.shape == (256,) and torch.equal(fine, fine.sort().values)
    assert (fine[127], fine[255]) == (0.0, 1.0) and fine[0] == pytest.approx(-0.99297, abs=1e-5)


@pytest.mark.parametrize("nested", [True, False])
def test_values_are_near_and_parts_of_a_weight_the_same(nested, monkeypatch):
    w = weight((96, 700))
    q = nf4.quantize(w, nested)
    scale = w.flatten().split(64)
    widest = 0.5 * (nf4._NF4[1] - nf4._NF4[0]) + 0.02 * nested
    error = (dequantize(q, w.shape) - w).flatten().abs().split(64)
    assert all(e.max() <= widest * s.abs().max() for e, s in zip(error, scale, strict=True))
    monkeypatch.setattr(nf4, "_AT_ONCE", 640)
    assert torch.equal(nf4.quantize(w, nested).codes, q.codes)


def test_operator():
    for nested in (True, False):
        for dtype in DTYPES:
            torch.library.opcheck(nf4.dequantize_4bit, (*nf4.quantize(weight((6, 50)), nested), 64, (6, 50), dtype))
    zeros = dequantize(nf4.quantize(torch.zeros(4, 64)), (4, 64))
    assert not zeros.any()


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (6, 52)},
        {"block": 48},
        {"dtype": torch.int32},
        {"nested": []},
        {"absmax": torch.zeros(5)},
        {"codes": torch.zeros(150, 2, dtype=torch.uint8)[:, 0]},
    ],
)
def test_what_does_not_fit_is_refused(change):
    codes, absmax, table, nested = nf4.quantize(weight((6, 50)))
    arguments = dict(codes=codes, absmax=absmax, quant_map=table, nested=list(nested), block=64, shape=(6, 50))
    with pytest.raises(ValueError, match="dequantize_4bit got"):
        nf4.dequantize_4bit(**(arguments | {"dtype": torch.float32} | change))


@pytest.mark.slow
def test_kernel_interpreted(tmp_path):
    """Bitwise the reference: over several programs, part of a word, other blocks, without double quantization."""
    pytest.importorskip("triton")
    cases = [
        (*nf4.quantize(weight(shape, seed=i), nested), 64, shape, DTYPES[i % 3])
        for nested in (True, False)
        for i, shape in enumerate([(64, 64), (3, 50), (5, 7), (70, 130)])
    ]
    codes, absmax, table, nested = nf4.quantize(weight((64, 64)))
    cases.append((codes, absmax[:16], table, (nested[0][:1], *nested[1:]), 256, (64, 64), torch.bfloat16))
    results = triton_tools.interpreted(Path(__file__).with_name("quant_child.py"), tmp_path, cases)
    for case, result in zip(cases, results, strict=True):
        expected = nf4.reference(*case)
        if result.dtype == torch.bfloat16:  # which the interpreter rounds to zero
            expected = (
                (nf4.reference(*case[:-1], torch.float32).view(torch.int32) & -65536).view(torch.float32).bfloat16()
            )
        assert result.is_contiguous() and torch.equal(result, expected)


@pytest.mark.parametrize("nested", [True, False])
def test_kernel_spills_nothing_and_keeps_values_in_registers(nested):
    pytest.importorskip("triton")
    from stepgraph.kernels.quant import nf4_triton as kernels

    kinds = {"codes": "*i32", "absmax": "*u8" if nested else "*fp32", "table": "*fp32", "out": "*bf16", "words": "i32"}
    kinds |= dict.fromkeys(("nested_absmax", "nested_table", "offset"), "*fp32") if nested else {}
    constants = {"NESTED": nested, "BLOCK": 64, "WORDS": kernels.WORDS, "STEPS": kernels.STEPS}
    constants |= {} if nested else dict.fromkeys(("nested_absmax", "nested_table", "offset"))
    aligned = ("codes", "absmax", "table", "out", "words")
    ptx = triton_tools.assert_no_spills(kernels._dequantize_kernel, kinds, constants, kernels.WARPS, aligned)
    assert "st.shared" not in ptx and "st.global.v4.b32" in ptx
