"""Exposed communication, from traces written by hand."""

import pytest

from stepgraph.bench.train.rank import exposure, kernel_times

GEMM, GATHER = "nvjet_tst_128x256_64x4", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(name, start, end, *, stream=7, cat="kernel", ph="X"):
    return {
        "ph": ph,
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": end - start,
        "args": {"device": 0, "stream": stream},
    }


@pytest.mark.parametrize(
    ("spans", "communication", "exposed", "idle"),
    [
        ([(GEMM, 0, 60), (GATHER, 60, 100)], 40, 40, 0),  # one after the other
        ([(GEMM, 0, 100), (GATHER, 20, 80)], 60, 0, 0),  # hidden
        ([(GEMM, 0, 50), (GATHER, 30, 100)], 70, 50, 0),  # its end stands out
        ([(GATHER, 0, 40), (GEMM, 30, 100)], 40, 30, 0),  # its beginning
        ([(GATHER, 0, 100), (GEMM, 20, 30), (GEMM, 50, 70)], 100, 70, 0),  # both ends and the gap
        ([(GEMM, 0, 40), (GATHER, 60, 100)], 40, 40, 20),  # nothing runs in between
        ([(GEMM, 0, 100)], 0, 0, 0),
        ([(GATHER, 0, 100)], 100, 100, 0),
    ],
)
def test_what_no_kernel_covers_is_exposed(spans, communication, exposed, idle):
    found = exposure([event(name, 1000 * start, 1000 * end) for name, start, end in spans])
    assert found.window_ms == 100
    assert (found.communication_ms, found.exposed_ms, found.idle_ms) == (communication, exposed, idle)
    assert found.share == exposed / 100


def test_streams_count_together():
    trace = [
        *(event(GATHER, 0, 40, stream=20), event("ncclDevKernel_ReduceScatter_Sum_f32", 30, 70, stream=24)),  # 0 to 70
        *(event(GEMM, 10, 20), event("triton_red_fused_3", 15, 50, stream=9)),  # 10 to 50
        event("Memcpy DtoD (Device -> Device)", 65, 100, cat="gpu_memcpy"),
    ]
    found = exposure(trace)
    assert found.communication_ms == pytest.approx(0.070) and found.exposed_ms == pytest.approx(0.010 + 0.015)
    assert found.idle_ms == 0 and found.window_ms == pytest.approx(0.100)


def test_the_order_of_events_is_of_no_matter():
    trace = [event(GATHER, 30, 100), event(GEMM, 0, 50), event(GEMM, 60, 70)]
    assert exposure(trace) == exposure(trace[::-1])
    assert exposure(trace).exposed_ms == pytest.approx(0.040)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
            "ncclKernel_AllReduce_RING",
            "Memcpy PtoP (Device -> Device)",
        ),
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
        *("_send_kernel", "_wait_kernel", "_tell_kernel", "_share_kernel"),  # of experts' rows
    ],
)
def test_what_communicates(name):
    assert exposure([event(GEMM, 0, 50), event(name, 50, 60)]).exposed_ms == pytest.approx(0.010)


def test_events_of_the_host_are_left_out():
    trace = [
        *(event("aten::mm", 0, 1000, cat="cpu_op"), event("cudaGraphLaunch", 0, 500, cat="cuda_runtime")),
        *(event("nccl:all_gather", 0, 900, cat="gpu_user_annotation"), {"ph": "M", "name": "process_name"}),
        *(event(GEMM, 100, 200), event(GATHER, 150, 300)),
    ]
    found = exposure(trace)
    assert (found.window_ms, found.exposed_ms) == (pytest.approx(0.2), pytest.approx(0.1))


def test_a_trace_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"no work on a GPU: profile with ProfilerActivity\.CUDA"):
        exposure([event("aten::mm", 0, 10, cat="cpu_op")])


def test_figures_of_one_step():
    found = exposure([event(GEMM, 0, 3000), event(GATHER, 2000, 4000)]).to_json(2)
    expected = {"window_ms": 2.0, "communication_ms": 1.0, "exposed_ms": 0.5, "idle_ms": 0.0, "share": 0.25}
    assert found == pytest.approx(expected)


def test_kernels_by_time():
    trace = [event(GEMM, 0, 1000), event(GATHER, 0, 2500), event(GEMM, 2000, 3000), event("mul", 0, 10)]
    assert kernel_times(trace, steps=2, most=2) == {GATHER: 1.25, GEMM: 1.0}
    assert list(kernel_times(trace, steps=2)) == [GATHER, GEMM, "mul"]
