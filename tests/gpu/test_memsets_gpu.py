"""Memsets of recorded CUDA graphs as kernels."""

import ctypes

import pytest
import torch

from stepgraph.run import memsets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def kinds(graph):
    driver, found = memsets._Driver(), []
    for node in driver.nodes("cuGraphGetNodes", ctypes.c_void_p(graph.raw_cuda_graph())):
        kind = ctypes.c_int()
        driver("cuGraphNodeGetType", node, ctypes.byref(kind))
        found.append(kind.value)
    return found


def record(function):
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("element, value", [(1, 0), (1, 200), (2, 0x1234), (4, 0), (4, 0x12345678)])
@pytest.mark.parametrize("count", [1, 3, 100, 1000])
def test_what_a_memset_writes(element, value, count):
    driver = memsets._Driver()
    name = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[element]
    buffer = torch.full((count * element + 8,), 77, dtype=torch.uint8, device="cuda")

    def run():
        buffer.add_(1)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        driver(name, ctypes.c_uint64(buffer.data_ptr()), ctypes.c_uint(value), ctypes.c_size_t(count), stream)
        return buffer + 1

    run()
    torch.cuda.synchronize()
    graph, result = record(run)
    assert kinds(graph).count(2) == 1
    assert memsets.memsets_to_kernels(graph) == 1 and kinds(graph).count(2) == 0
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    expected = torch.tensor(list(value.to_bytes(4, "little")[:element]) * count, dtype=torch.uint8)
    assert torch.equal(buffer[: count * element].cpu(), expected)
    assert buffer[-1].item() == 77 + 1 + 3  # one eager run, three replays; recording does not run
    assert torch.equal(result.cpu(), buffer.cpu() + 1)


def test_products_are_the_same_bit_for_bit():
    torch.manual_seed(0)
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run():
        x = a
        for _ in range(8):
            x = torch.nn.functional.gelu(x @ b * 0.02)
        return x

    expected = run()
    torch.cuda.synchronize()
    plain, kept = record(run)
    graph, changed = record(run)
    count = memsets.memsets_to_kernels(graph)
    assert kinds(graph).count(2) == 0 and kinds(plain).count(2) == count
    for _ in range(20):
        graph.replay()
        plain.replay()
    torch.cuda.synchronize()
    assert torch.equal(changed, expected) and torch.equal(kept, expected)
