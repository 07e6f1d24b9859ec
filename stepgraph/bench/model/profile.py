"""Where a step's time goes: kernels by name and kind, and the limit set by its products and attention."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from stepgraph.bench.harness import CapturedStep, Step
from stepgraph.bench.rows import align
from stepgraph.costs.hardware import known_gpu
from stepgraph.costs.roofline import limits

STEPS, MOST = 3, 40

#: Kind -> pattern of its kernels' names; the first that fits. What fits none is `OTHER`. Inductor names a kernel by its
#: sort and the operators in it, so that what it fused has the kind of its most telling operator.
_KINDS = {
    "copies": r"^Memcpy|^Memset",
    "attention": r"flash|fmha|attention|sdpa|mha_",
    "products": r"nvjet|gemm|gemv|cutlass|cublas|xmma|convolution|splitK|::(mm|addmm|bmm)\b|^_product\b|^triton_tem",
    "optimizer": r"multi_tensor|adam|foreach|^triton_for|addcdiv|lerp|(?<!r)sqrt|vector_norm",
    "loss": r"cross_entropy|log_softmax|nll_loss|logsumexp|^_kernel$|^_(kl_|stats|parts|gradient)",
    "norm": r"(?<!vector_)norm|rsqrt|welford|^(sums|forward|backward|add_slots)_(pair_)?(rows_)?kernel",
    "experts": r"^_(count|scan|place|gather|zero|zero_past|combine|swiglu_rows)_(backward_)?kernel",
    "embedding": r"^_(chunk|join)_kernel|embedding|index_put|indexing_backward",
    "reduction": r"^triton_(red|per)_|reduce_kernel|::sum\b|::mean\b",
    "elementwise": r"^triton_poi_|elementwise|at::native|^cpp_fused|^aten::",
}
OTHER = "other"


class Kernel(NamedTuple):
    """A kernel's or copy's name and when it ran, in microseconds."""

    name: str
    start_us: float
    end_us: float


def kind_of(name: str) -> str:
    """The kind of work behind a kernel's name."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def group_of(name: str) -> str:
    """A kernel's name without what differs between kernels of one sort: template arguments and Inductor's number."""
    name = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    if name.startswith("triton_"):
        return re.sub(r"_\d+$", "", name)
    functor = re.search(r"(\w+)(?:Functor|_kernel_cuda|_kernel_impl)\b", name.partition("<")[2])
    return name.partition("<")[0] + (f"<{functor[0]}>" if functor else "")


def profiled(step: Step, device: torch.device) -> profile:
    """A profile of ``STEPS`` steps."""
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    return profiler


def kernels_of(profiler: profile) -> list[Kernel]:
    """What ran on a GPU."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def limits_ms(step: Step, device: torch.device) -> dict[str, float] | None:
    """ms of the products and of the attention of ``step`` at the rates measured on such a GPU; None for a GPU whose
    rates are not known, and for a step that was not captured."""
    gpu = known_gpu(torch.cuda.get_device_name(device))
    if gpu is None or not isinstance(step, CapturedStep):
        return None
    return {kind: 1000 * seconds for kind, seconds in limits(step.step.graph.graph, gpu).items()}


def where(kernels: Sequence[Kernel], step_ms: float, limit: Mapping[str, float] | None) -> dict[str, dict[str, float]]:
    """Where a step of ``step_ms`` spends its time, ``STEPS`` of which ran ``kernels``. ``ms``: by kind, kernels that
    run at once each in full, and ``host gaps``, in which none runs; ``limit``: of products and attention."""
    kinds: dict[str, float] = defaultdict(float)
    busy_us, end = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        kinds[kind_of(kernel.name)] += (kernel.end_us - kernel.start_us) / 1000 / STEPS
        busy_us += max(0.0, kernel.end_us - max(kernel.start_us, end))
        end = max(end, kernel.end_us)
    found = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return {"ms": found | {"host gaps": max(0.0, step_ms - busy_us / 1000 / STEPS)}, "limit": dict(limit or {})}


def kernel_table(profiler: profile, device: torch.device, title: str) -> str:
    """Two Markdown tables: ms per step and calls per step by kind, and of the ``MOST`` most expensive kernels, the
    same kernel with other template arguments counted together. On a CPU: operators instead of kernels.

    Kernels that run at once are each counted in full, so the sum may exceed the step.
    """
    cuda = device.type == "cuda"
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.key_averages():
        if cuda and (event.device_type.name != "CUDA" or event.is_user_annotation):
            continue
        spent_us = event.self_device_time_total if cuda else event.self_cpu_time_total
        for table, name in ((kinds, kind_of(event.key)), (groups, group_of(event.key))):
            table[name][0] += spent_us / 1000 / STEPS
            table[name][1] += event.count / STEPS
    whole = sum(ms for ms, _ in kinds.values())
    lines = [f"# {title}: {whole:.4g} ms of {'kernels' if cuda else 'operators'} a step, over {STEPS} steps", ""]
    for heading, table in (("kind", kinds), (f"the {MOST} most expensive", groups)):
        ranked = sorted(table.items(), key=lambda item: -item[1][0])[:MOST]
        cells = [
            [f"`{name[:110]}`", f"{ms:.3f}", f"{ms / whole:.1%}" if whole else "", f"{calls:.4g}"]
            for name, (ms, calls) in ranked
        ]
        lines += [*align([heading, "ms", "share", "calls"], cells), ""]
    return "\n".join(lines)
