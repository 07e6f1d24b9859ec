"""How ``stepgraph bench norm`` measures time, and the copy bandwidth that it compares with.

- ``do_bench``: ``triton.testing.do_bench``, the median of single calls, each with its launches, from a flushed L2.
- ``graph``: kernel time alone. A CUDA graph of many calls, each on inputs and outputs of its own, together larger than
  L2, so that no call finds its data there; replayed back to back, and divided by the calls.
- ``wall``: on a CPU, the median time of calls one after another.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from stepgraph.bench.device import mark, spans, times

#: Milliseconds of work in one figure; at least ``LEAST_REPEATS`` repeats, however long they take.
WARM_UP_MS, MEASURE_MS, LEAST_REPEATS = 5, 30, 10

#: A graph moves about this much, so that the start of a replay (some 2 us) is below a hundredth of it.
GRAPH_BYTES, MOST_CALLS = 2**30, 128

COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}


def copy_gbps(device: torch.device) -> float:
    """GB/s read and written by ``torch.Tensor.copy_`` of 1 GiB (CPU: 64 MiB), median of 20."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for _ in range(5):
        target.copy_(source)
    return 2 * source.numel() / (median(times(device, lambda: target.copy_(source), 20)) * 1e6)


def calls_in_graph(tensor_bytes: int) -> int:
    """How many calls, each on tensors of ``tensor_bytes`` of its own, a graph holds."""
    return min(MOST_CALLS, max(2, -(-GRAPH_BYTES // (2 * tensor_bytes))))


def do_bench_ms(call: Callable[[], Any]) -> float:
    """Median of ``call``, ms, by ``triton.testing.do_bench``."""
    from triton.testing import do_bench

    return do_bench(call, warmup=WARM_UP_MS, rep=MEASURE_MS, return_mode="median")


def graph_ms(calls: Sequence[Callable[[], Any]], flush: torch.Tensor | None) -> float:
    """Time of one of ``calls``, ms, in a CUDA graph of them all. The current stream must not be the default one.

    Between replays ``flush`` is read, to evict what too few tensors to fill L2 have left there.
    """
    device = torch.device("cuda")
    calls[0]()  # whatever is compiled or tuned is now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        outputs = [call() for call in calls]  # kept, so that no two calls write the same memory

    def replay(times: int) -> list[float]:
        marks = []
        for _ in range(times):  # queued ahead of the device, so that launching a graph is not in its time
            if flush is not None:
                flush.sum()
            marks.append(mark(device))
            graph.replay()
            marks.append(mark(device))
        return spans(marks)[::2]

    replay(2)
    repeats = int(MEASURE_MS / median(replay(3)))
    result = median(replay(max(LEAST_REPEATS, min(200, repeats)))) / len(calls)
    del outputs
    return result


def wall_ms(call: Callable[[], Any]) -> float:
    """Median of ``call``, ms, on a CPU."""
    call()
    found: list[float] = []
    while len(found) < LEAST_REPEATS or (sum(found) < MEASURE_MS and len(found) < 1000):
        found += times(torch.device("cpu"), call, 1)
    return median(found)
