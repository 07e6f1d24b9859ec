"""Large matrix products by the fastest of cuBLASLt's algorithms that give the same bits.

Before -> after: ``mm(a, b)`` and ``addmm(bias, a, b)`` in 16 bits on a GPU -> `product`, which times the algorithms for
each shape. Every large product is replaced, even if torch's algorithm is the fastest: all ranks must have the same
graph, whatever they measure. Runs after all passes that look for products.
Tier numerics: that an algorithm gives torch's bits is tested on random operands, not proved.
"""

from dataclasses import dataclass, replace

import torch

from stepgraph.graph.edit import Builder
from stepgraph.graph.edit import replace as replace_node
from stepgraph.kernels.cublas_lt import Problem, choose, unavailable
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph
#: How many shapes the report lists: the ones that gain most.
_NAMED = 5


@dataclass(frozen=True)
class TuneOptions:
    """``least``, ``most``: bounds on the floating-point operations of a product that is replaced. Smaller ones take
    less than 30 microseconds, and timing larger ones takes seconds. ``timed``: whether the step runs on a GPU of this
    process."""

    least: int = 1 << 34
    most: int = 1 << 42
    timed: bool = False


@register(
    "tune_products",
    "numerics",
    options=TuneOptions(),
    after=("fuse_loss", "async_tensor_parallel", "lora", "fp8_matmul"),
    needs_cuda=True,
    from_options=lambda options: None if options.any_length else {},  # each length would be timed again
    for_target=lambda options, target: replace(options, timed=torch.cuda.is_available() and not target.simulated),
    forecast=False,  # which knows one rate for both
)
def tune_products(step: StepGraph, options: TuneOptions, report: PassReport) -> None:
    """Multiply large matrices by the fastest of cuBLASLt's algorithms that give torch's bits."""
    if options.timed and (why := unavailable()):
        report.notes.append(f"torch's algorithms are kept: {why}")
        return
    targets = (aten.mm.default, aten.addmm.default)
    found = step.calling(*targets)
    problems: list[Problem] = []
    for node in found:
        report.matched += 1
        *bias, a, b = node.args
        problem = Problem.of(*(x.meta["val"] for x in (a, b)), bias[0].meta["val"] if bias else None)
        if node.kwargs or problem is None or not options.least <= problem.flops <= options.most:  # addmm may scale
            continue
        replace_node(node, Builder(node, before=node)(ours.product.default, a, b, *bias))
        problems.append(problem)
    report.changed = len(problems)
    report.summary = f"{report.changed} of {report.matched} products"
    if problems and options.timed:
        _report(problems, report)


def _report(problems: list[Problem], report: PassReport) -> None:
    choices = {problem: choose(problem) for problem in dict.fromkeys(problems)}
    faster = {problem: choice for problem, choice in choices.items() if choice.run is not None}
    report.summary += f" of {len(choices)} shapes, {len(faster)} by another algorithm than torch's"
    saved = sum(choices[p].torch_us - choices[p].best_us for p in problems)
    report.summary += f", an estimated {saved / 1e3:.1f} ms per step faster" if faster else ""
    if untimed := sum(not choice.timed for choice in choices.values()):
        report.notes.append(f"{untimed} shapes keep torch's algorithm: too little memory to time them")
    gains = sorted(faster, key=lambda p: problems.count(p) * (faster[p].best_us - faster[p].torch_us))
    for problem in gains[:_NAMED]:
        choice = faster[problem]
        report.notes.append(f"{problem}: {choice.best_us:.0f} us, {choice.torch_us:.0f} by torch's algorithm")
