"""Exchanges of tokens' rows: the kernels, interpreted as several ranks, and compiled for sm_90 without spills."""

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("expert_rows_child.py")


@pytest.mark.slow
def test_kernels_interpreted_as_ranks(tmp_path):
    pytest.importorskip("triton")
    assert interpreted(CHILD, tmp_path, []) == "done"


@pytest.mark.parametrize(("element", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("u8", torch.uint8)])
def test_no_configuration_spills(element, dtype):
    pytest.importorskip("triton")
    from stepgraph.kernels.comm import expert_rows_triton as kernels

    kinds = dict.fromkeys(("x", "written", "out"), f"*{element}") | {"addresses": "*i64"}
    kinds |= dict.fromkeys(("order", "to", "came", "counts", "place", "ends", "begins"), "*i32")
    kinds |= dict.fromkeys(("offsets", "there", "back"), "*i32") | {"row": "*i32"}
    tensors = [name for name, kind in kinds.items() if kind.startswith("*")]
    kinds |= dict.fromkeys(("n", "slots", "room", "D", "stride", "ranks", "rank", "first", "P", "E"), "i32")
    whole = (2176 if element == "u8" else 4096, [*tensors, "D", "stride"])
    for D, divided in (whole,) if element == "u8" else ((33, tensors), whole):  # packed rows are of whole 16 bytes
        wide, narrow, taken = (
            dict(zip(("TOKENS", "BLOCK"), kernels.configuration(n, torch.empty(1, D, dtype=dtype)), strict=True))
            for n in (kernels.WIDE[0], kernels.NARROW[0], kernels.TAKEN)
        )
        ways = [(wide, kernels.WIDE), (narrow, kernels.NARROW)][: 1 + (D != 33)]  # products in fp8 have no such rows
        for indirect, (tile, (_, warps, _)) in product((True, False), ways):
            constants = tile | {"INDIRECT": indirect}
            sends = assert_no_spills(kernels._send_kernel, kinds, constants, warps, divided)
            # Rows of whole 16 bytes leave 16 bytes at a time, although addresses come from a table.
            assert ("st.global.v4.b32" in sends) == (D != 33), D
        for zero_rest in (True, False):
            assert_no_spills(kernels._take_kernel, kinds, taken | {"ZERO_REST": zero_rest}, kernels.WARPS, divided)
    if element == "fp32":
        assert_no_spills(kernels._segments_kernel, kinds, {"SEGMENTS": 256}, 4, tensors)
        at_once = {"ROWS": kernels.ROWS, "AHEAD": kernels.AHEAD}
        assert_no_spills(kernels._places_kernel, kinds, at_once, 4, tensors)
        assert_no_spills(kernels._share_kernel, kinds, {"BLOCK": 256}, 4, tensors)
        tells = assert_no_spills(kernels._tell_kernel, kinds, {}, 1, tensors)
        waits = assert_no_spills(kernels._wait_kernel, kinds, {}, 1, tensors)
        assert "atom.global.sys.release.exch.b32" in tells and "atom.global.sys.acquire.exch.b32" in waits
