"""Where the time of a step goes: its kernels by name and by kind."""

import re
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from stepgraph.bench.harness import Step
from stepgraph.bench.table import align

STEPS, MOST = 3, 40

#: Pattern in a kernel's name -> its kind; the first that fits. What fits none is "other".
_KINDS = (
    (r"^Memcpy|^Memset", "copies and fills by the driver"),
    (r"flash|fmha|attention|sdpa|mha_", "attention"),
    (r"nvjet|gemm|cutlass|cublas|splitK|gemv|::mm\b|addmm|\bbmm\b", "matrix products"),
    (r"^triton_|^cpp_fused", "Inductor's kernels"),
    (r"multi_tensor_apply|adamw?|foreach", "optimizer and clipping by torch"),
    (r"at::native|^aten::|vectorized_elementwise|elementwise_kernel|reduce_kernel", "torch's other kernels"),
)


def kind_of(name: str) -> str:
    """The kind of work behind a kernel's name."""
    return next(
        (kind for pattern, kind in _KINDS if re.search(pattern, name, re.IGNORECASE)), "other (Triton, stepgraph's own)"
    )


def group_of(name: str) -> str:
    """A kernel's name without what differs between kernels of one sort: template arguments and Inductor's number."""
    name = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    if name.startswith("triton_"):
        return re.sub(r"_\d+$", "", name)
    functor = re.search(r"(\w+)(?:Functor|_kernel_cuda|_kernel_impl)\b", name.partition("<")[2])
    return name.partition("<")[0] + (f"<{functor[0]}>" if functor else "")


def kernel_table(step: Step, device: torch.device, title: str) -> str:
    """Two Markdown tables: ms per step and calls per step by kind, and of the ``MOST`` most expensive kernels, the
    same kernel with other template arguments counted together. On a CPU: operators instead of kernels.

    Kernels that run at once are each counted in full, so the sum may exceed the step.
    """
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
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
