"""The kernels of experts against their references: interpreted, and compiled for sm_90 without spills."""

from pathlib import Path

import pytest
import torch

from stepgraph.kernels.fp8.formats import MOST
from stepgraph.kernels.moe import packed, route, rows, scaled, swiglu
from tests.kernels.moe.test_moe import data, routing
from tests.kernels.strides import padded, swapped
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("moe_child.py")


def row_cases():
    """(name of the kernel's function, arguments, what the reference gives)."""
    cases = []
    # Narrow and odd widths, two blocks of columns, one column; one slot and several; buffers that are longer.
    shapes = [(5, 3, 7, 4), (9, 2, 33, 0), (3, 2, 1100, 1), (700, 2, 1, 3), (1, 1, 16, 0), (0, 2, 8, 3)]
    for i, (tokens, slots, D, longer) in enumerate(shapes):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        _, order, places, _ = routing(tokens, slots, 3, i)
        order = torch.cat([order, order.new_full((longer,), -1)])
        R = len(order)
        x, held = data(tokens, D, seed=1, dtype=dtype), data(R, D, seed=2, dtype=dtype)
        weights = data(tokens, slots, seed=3, dtype=torch.float32).masked_fill(places < 0, torch.nan)
        held = held.index_fill(0, torch.nonzero(order < 0).flatten(), torch.nan)
        for layout in (padded, swapped) if tokens == 9 else (torch.Tensor.clone,):
            gathered = rows.gather_reference(x, places, R)
            cases.append(("gather", (layout(x), places, order, R), gathered))
            cases.append(("combine", (layout(held), places, weights), rows.combine_reference(held, places, weights)))
            cases.append(("combine", (held, places, None), rows.combine_reference(held, places, None)))
            expected = rows.combine_backward_reference(x, held, places, weights)
            cases.append(("combine_backward", (layout(x), layout(held), places, weights, order), expected))
        cases.append(("gather", (x, places, None, R), gathered))
        cases.append(("combine_backward", (x, held, places, weights, None), expected))
    return cases


def sort_cases():
    """Blocks of 256 slots: less than one, all of one, several; one expert, more than are compared at once."""
    cases = []
    for tokens, slots, experts in ((3, 2, 4), (128, 2, 1), (300, 3, 5), (100, 8, 100), (257, 1, 40)):
        chosen = routing(tokens, slots, experts, tokens)[0]
        cases.append(("sort", (chosen, experts), route.reference(chosen, experts)))
    one = torch.full((400, 2), 3, dtype=torch.int32)
    return [*cases, ("sort", (one, 6), route.reference(one, 6)), ("sort", (one, 2), route.reference(one, 2))]


def zero_cases():
    cases = []
    for R, F, end in ((70, 5, 33), (64, 300, 64), (40, 8, 0), (33, 9, 32)):
        out, offsets = data(R, F, dtype=torch.float32), torch.tensor([end // 2, end], dtype=torch.int32)
        cases.append(("zero_past", (out, offsets), torch.cat([out[:end], torch.zeros(R - end, F)])))
    return cases


def cast_cases():
    """Experts without rows, with one, with more than a tile, with multiples of 16; odd widths; NaN in rows of none.
    Values of the format, as the interpreter rounds to fp8 in its own way: each column of an expert has the largest."""
    cases = []
    for i, (counts, C, past) in enumerate([((3, 0, 70), 33, 4), ((16,), 64, 0), ((1, 64, 15, 0), 65, 1), ((0,), 8, 5)]):
        form, dtype = (torch.float8_e4m3fn, torch.float8_e5m2)[i % 2], (torch.float32, torch.bfloat16, torch.float16)
        x = data(sum(counts) + past, C, seed=i, dtype=torch.float32).to(form).to(dtype[i % 3])
        offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        x[[start for start, count in zip((0, *offsets.tolist()), counts, strict=False) if count]] = -MOST[form]
        x[sum(counts) :] = torch.nan
        x = swapped(x) if i else padded(x)
        cases.append(("cast_groups", (x, offsets, form), scaled.cast_reference(x, offsets, form)))
    # Packed rows, whose scales are powers of two here, so that no value is rounded.
    values = data(90, 48, dtype=torch.float32).clamp(-4, 4).mul(2).round().div(2)
    values[[0, 5]] = MOST[packed.E4M3]
    scale = torch.tensor([1.0, 0.5, 0.25, 1.0, 0.5]).repeat(18)
    x, offsets = packed.pack(values.to(packed.E4M3), scale), torch.tensor([5, 5, 81], dtype=torch.int32)
    cases.append(("cast_groups", (x, offsets, packed.E4M3), scaled.cast_reference(x, offsets, packed.E4M3)))
    x = values.bfloat16()
    x[:, 7] = MOST[packed.E4M3]
    cases.append(("cast_packed", (swapped(x),), packed.pack(x.to(packed.E4M3), torch.ones(90))))
    return cases


def swiglu_cast_cases():
    """Ends before and behind rows; odd tiles. Zeros but for one gate and up, so that no interpreter rounds."""
    cases = []
    for F, end, keep in ((48, 5, True), (16, 9, False), (1040, 9, True)):
        offsets = torch.tensor([2, end], dtype=torch.int32)
        gate_up, dy = torch.zeros(9, 2 * F), torch.zeros(9, F)
        gate_up[:, 3], gate_up[:, F + 3], dy[:, 3], dy[:, 4] = 200.0, 2.0 ** torch.arange(9), 1.5, 1.0
        gate_up[end:] = torch.nan
        for name, function, given in (
            ("swiglu_cast", swiglu.swiglu_rows_cast, (gate_up,)),
            ("swiglu_cast_backward", swiglu.swiglu_rows_cast_backward, (dy, gate_up)),
        ):
            cases.append((name, (*given, offsets, keep), function(*given, offsets, keep)))
    return cases


def swiglu_cases():
    """Ends before, within and behind a tile; narrow and odd widths, several tiles of columns; one expert, several."""
    cases, dtypes = [], (torch.float32, torch.bfloat16, torch.float16)
    shapes = [(70, 5, 33), (64, 300, 64), (40, 8, 0), (5, 1100, 2), (3000, 1, 2049), (1, 128, 1), (0, 8, 0), (3, 0, 2)]
    for i, (R, F, end) in enumerate(shapes):
        dtype, layout = dtypes[i % 3], padded if i % 2 else torch.Tensor.clone
        gate_up, dy = data(R, 2 * F, seed=i, dtype=dtype), data(R, F, seed=i + 9, dtype=dtype)
        gate_up[end:] = torch.nan
        dy[end:] = torch.nan
        offsets = torch.tensor([end // 2, end][i % 2 :], dtype=torch.int32)
        cases.append(("swiglu", (layout(gate_up), offsets), swiglu.reference(gate_up, offsets)))
        expected = swiglu.backward_reference(dy, gate_up, offsets)
        cases.append(("swiglu_backward", (layout(dy), layout(gate_up), offsets), expected))
    return cases + [(name, (*arguments, False), expected) for name, arguments, expected in cases]


def defined(arguments, result):
    """Of a result all rows or, where the last argument lets the rest hold anything, those in use."""
    if isinstance(arguments[-1], bool) and result.ndim == 2:
        result = result[: arguments[-2][-1]]
    if result.dtype == torch.uint8:  # packed: up to the scale's end
        return result[:, : result.shape[1] - packed.TAIL + 4]
    # fp8: up to the last part's end
    return result[:, : scaled.padded_ends(arguments[1])[-1]].float() if result.itemsize == 1 else result


@pytest.mark.slow
def test_kernels_interpreted(tmp_path):
    pytest.importorskip("triton")
    cases = [*sort_cases(), *zero_cases(), *cast_cases(), *swiglu_cases(), *swiglu_cast_cases(), *row_cases()]
    results = interpreted(CHILD, tmp_path, [(name, *arguments) for name, arguments, _ in cases])
    for (name, arguments, expected), found in zip(cases, results, strict=True):
        expected, found = ((t,) if isinstance(t, torch.Tensor) else t for t in (expected, found))
        for mine, theirs in zip(found, expected, strict=True):
            what = f"{name} {[tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments]}"
            assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), what
            mine, theirs = (defined(arguments, t) for t in (mine, theirs))
            # The interpreter rounds otherwise to 16 bits; products are added up over columns in another order.
            rounds = name.startswith(("combine", "swiglu"))
            tolerance = torch.finfo(mine.dtype).eps if rounds and mine.itemsize == 2 else 0
            tolerance = 1e-5 if rounds and name != "combine" and mine.itemsize == 4 else tolerance
            torch.testing.assert_close(
                mine, theirs, rtol=tolerance, atol=10 * tolerance, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}"
            )


@pytest.mark.parametrize("element", ["fp32", "bf16"])
def test_no_configuration_spills(element):
    pytest.importorskip("triton")
    from stepgraph.kernels.moe import grouped_triton, route_triton, rows_triton, scaled_triton, swiglu_triton

    pointer = f"*{element}"
    kinds = dict.fromkeys(("x", "rows", "out", "dy", "drows", "gate_up", "dgate_up"), pointer)
    kinds |= dict.fromkeys(("places", "order", "starts", "counts", "offsets"), "*i32") | {"chosen": "*i64"}
    kinds |= dict.fromkeys(("weights", "dweights"), "*fp32")
    kinds |= dict.fromkeys(("N", "R", "D", "F", "E", "n", "blocks", "stride", "dy_stride", "experts"), "i32")
    tensors = [name for name, kind in kinds.items() if kind.startswith("*")]
    divided = [*tensors, "D", "stride", "dy_stride"]
    for D, aligned in ((33, tensors), (2048, divided)) if element == "bf16" else ((2048, divided),):
        tokens, block = rows_triton.configuration(D)
        tile = {"TOKENS": tokens, "BLOCK": block}
        plain = kinds | {"K": "i32"}
        assert_no_spills(rows_triton._gather_kernel, plain, tile, rows_triton.WARPS, aligned)
        assert_no_spills(rows_triton._combine_backward_kernel, plain, tile, rows_triton.WARPS, aligned)
        constants = {**tile, "K": 8, "WEIGHTED": True}
        assert_no_spills(rows_triton._combine_kernel, kinds, constants, rows_triton.WARPS, aligned)
    for F, aligned in ((1408, [*tensors, "F"]), (1024, [*tensors, "F"]), (1001, tensors)):
        rows, block = swiglu_triton.configuration(F)
        for kernel in (swiglu_triton._swiglu_rows_kernel, swiglu_triton._swiglu_rows_backward_kernel):
            for zero_rest in (False, True):
                constants = {"ZERO_REST": zero_rest, "ROWS": rows, "BLOCK": block}
                assert_no_spills(kernel, kinds, constants, swiglu_triton.WARPS, aligned)
    wide = {"ROWS": 32, "BLOCK": 256}
    assert_no_spills(rows_triton._zero_kernel, kinds, wide, 8, tensors)
    assert_no_spills(grouped_triton._zero_past_kernel, kinds, wide, grouped_triton.WARPS, tensors)
    sizes = dict.fromkeys(("C", "places", "row_stride", "scale_stride"), "i32")
    casts = {"x": pointer, "offsets": "*i32", "q": "*i32", "scale": "*fp32", "row_scale": "*fp32"} | sizes
    casts["stops"] = "*i32"
    wide = scaled_triton.WIDE
    for experts in (8, 128):
        for x, own in ({"x": "*fp8e4nv"}, {"WIDE": wide[1]}), ({}, {"WIDE": wide[2], "row_scale": None}):
            kinds_of = {name: kind for name, kind in (casts | x).items() if name not in own}
            constants = {"EXPERTS": experts, "MOST": 448.0, "TALL": scaled_triton.TALL, "column_stride": 1} | own
            constants["PTX"] = scaled_triton.PTX[torch.float8_e4m3fn]
            assert_no_spills(scaled_triton._groups_kernel, kinds_of, constants, scaled_triton.WARPS, [*kinds_of])
    to = dict.fromkeys(("dy", "gate_up", "y", "dgate_up"), pointer)
    to |= {"offsets": "*i32", "q": "*fp8e4nv", "scale": "*fp32"}
    to |= dict.fromkeys(("experts", "F", "q_stride", "scale_stride"), "i32")
    itemsize = 2 if element == "bf16" else 4
    for F in (768, 1408, swiglu_triton.LONGEST):
        block, warps = swiglu_triton.cast_configuration(F, itemsize)
        for kernel in (swiglu_triton._swiglu_rows_cast_kernel, swiglu_triton._swiglu_rows_cast_backward_kernel):
            given = {name: kind for name, kind in to.items() if name in kernel.arg_names}
            assert_no_spills(kernel, given, {"MOST": 448.0, "BLOCK": block}, warps, [*given])
    if element == "fp32":
        at = {"BLOCK": route_triton.BLOCK}
        assert_no_spills(route_triton._count_kernel, kinds, {**at, "BINS": 512}, route_triton.WARPS, tensors)
        assert_no_spills(route_triton._scan_kernel, kinds, {"AT_ONCE": 1024}, 4, tensors)
        ahead = {**at, "AHEAD": route_triton.AHEAD}
        assert_no_spills(route_triton._place_kernel, kinds, ahead, route_triton.WARPS, tensors)
