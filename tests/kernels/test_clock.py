"""The kernel that notes a GPU's time, compiled for sm_90; it is run in tests/gpu/test_pipeline_gpu.py."""

import pytest

from tests.kernels.triton_tools import assert_no_spills


def test_it_reads_the_clock_that_all_processors_share():
    pytest.importorskip("triton")
    from stepgraph.kernels import clock_triton

    text = assert_no_spills(clock_triton._note_kernel, {"moments": "*i64", "number": "i32"}, {}, 1, ["moments"])
    assert "%globaltimer" in text and "st.global.b64" in text
