"""How ``stepgraph bench norm`` checks a norm against float64, measures time, and the copy bandwidth of comparison.

- ``graph``: kernel time alone. A CUDA graph of many calls, each on inputs and outputs of its own, together larger than
  L2, so that no call finds its data there; replayed back to back, and divided by the calls.
- ``wall``: on a CPU, the median time of calls one after another.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.bench.harness import mark, spans, times
from stepgraph.bench.norm.providers import EPS

Tensor = torch.Tensor

#: Milliseconds of work in one figure; at least ``LEAST_REPEATS`` repeats, however long they take.
MEASURE_MS, LEAST_REPEATS = 30, 10

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


def graph_ms(calls: Sequence[Callable[[], Any]], flush: Tensor | None) -> float:
    """Time of one of ``calls``, ms, in a CUDA graph of them all. The current stream must not be the default one.

    Between replays ``flush`` is read, to evict what too few tensors to fill L2 have left there.
    """
    from stepgraph.kernels.norm.triton import workspace

    device = torch.device("cuda")
    calls[0]()  # whatever is compiled or tuned is now
    workspace.reuse()  # graphs of many shapes use up the memory that is zeroed ahead; each of ours would zero its own
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


#: Largest relative difference from float64, in the Frobenius norm, by the dtype of x.
#: bf16 and fp16: a value rounded once is off by up to 2**-8 = 4e-3 or 2**-11 = 5e-4 of itself, less than half of that
#: in the norm; some kernels also round x * rstd before the weight. fp32: a column summed row by row over 2**20 rows is
#: off by 4e-5. A forgotten term, for example, shows above 1e-1 on these inputs, whose means are not zero.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}

#: Rows are compared in pieces of this many elements, so that float64 copies stay small.
PIECE = 2**25


def make_inputs(m: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """x (M, N), which needs a gradient, and dy (M, N).

    x has a mean, and dy has one and follows x, so that each term of the gradients matters, however long the row. dy is
    small enough for a column's sum over 2**20 rows in fp16.
    """
    x = torch.randn(m, n, dtype=dtype, device=device) + 0.5
    dy = (torch.randn_like(x) + x) / 64
    return x.requires_grad_(), dy


def check_forward(op: str, x: Tensor, params: Sequence[Tensor], y: Tensor) -> str | None:
    """What is wrong with ``y`` (M, N), in one line, or None."""
    if y.shape != x.shape or y.dtype != x.dtype:
        return f"y is {tuple(y.shape)} {y.dtype}, not {tuple(x.shape)} {x.dtype}"
    error = total = 0.0
    with torch.no_grad():
        for rows in _pieces(x):
            exact = _norm(op, x[rows].double(), [p.double() for p in params])
            error += (y[rows].double() - exact).square().sum().item()
            total += exact.square().sum().item()
    return _verdict({"y": (error, total)}, x.dtype)


def check_backward(op: str, x: Tensor, params: Sequence[Tensor], dy: Tensor, grads: Sequence[Tensor]) -> str | None:
    """What is wrong with ``grads``, (dx, dw) or (dx, dw, db), in one line, or None."""
    names = ["dx", "dw", "db"][: len(params) + 1]
    for name, grad, like in zip(names, grads, (x, *params), strict=True):
        if grad.shape != like.shape:
            return f"{name} is {tuple(grad.shape)}, not {tuple(like.shape)}"
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    error = total = terms = size = 0.0
    for rows in _pieces(x):
        exact_x = x[rows].detach().double().requires_grad_()
        exact_params = [p.detach().double().requires_grad_() for p in params]
        g = dy[rows].double()
        dx, *others = torch.autograd.grad(_norm(op, exact_x, exact_params), (exact_x, *exact_params), g)
        for whole, part in zip(sums, others, strict=True):
            whole += part
        error += (grads[0][rows].double() - dx).square().sum().item()
        total += dx.square().sum().item()
        terms += _largest_term(op, exact_x.detach(), g * exact_params[0].detach())
        size += g.square().sum().item()
    # Where rows have few elements dx and dw are zero or nearly so: rounding is relative to the terms that cancel.
    found = {"dx": (error, max(total, terms))}
    for name, grad, exact in zip(names[1:], grads[1:], sums, strict=True):
        found[name] = (grad.double() - exact).square().sum().item(), max(exact.square().sum().item(), size)
    return _verdict(found, x.dtype)


def _pieces(x: Tensor) -> list[slice]:
    step = max(1, PIECE // x.shape[1])
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]


def _norm(op: str, x: Tensor, params: Sequence[Tensor]) -> Tensor:
    shape = x.shape[-1:]
    return F.rms_norm(x, shape, *params, EPS) if op == "rms_norm" else F.layer_norm(x, shape, *params, EPS)


def _largest_term(op: str, x: Tensor, g: Tensor) -> float:
    """Squared norm of rstd * g, the first of the terms that dx is the difference of."""
    centered = x - x.mean(-1, keepdim=True) if op == "layer_norm" else x
    return (g.square() / (centered.square().mean(-1, keepdim=True) + EPS)).sum().item()


def _verdict(found: dict[str, tuple[float, float]], dtype: torch.dtype) -> str | None:
    """``found``: result -> squared norms of its error and of the correct value."""
    tolerance = TOLERANCES[dtype]
    for name, (error, total) in found.items():
        if not error <= tolerance**2 * total:  # NaN is wrong too
            off = (error / total) ** 0.5 if total else float("inf")
            return f"{name} is {off:.1e} away from float64, relative to its norm; tolerance {tolerance:g}"
    return None
