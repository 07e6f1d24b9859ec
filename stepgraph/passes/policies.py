"""What a memory policy would need, without changing the step."""

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from stepgraph.costs.memory import estimate_memory
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.memory.recompute import POLICIES
from stepgraph.passes.options import StepOptions
from stepgraph.passes.runner import run_passes


def peak_bytes_by_policy(program: StepProgram) -> dict[str, int]:
    """Estimated peak bytes of the whole step under each memory policy, the one that recomputes least first.

    ``program``: as captured, before any pass; it is not changed. The exact passes are applied to copies of its graphs.
    """
    peaks = {}
    for policy in POLICIES:
        if policy != "budget":
            options = StepOptions("exact", memory=policy, cuda_graph=False)
            peaks[policy] = peak_bytes([_rewritten(step, options) for step in program.graphs.values()])
    return peaks


def peak_bytes(graphs: Sequence[StepGraph]) -> int:
    """Estimated peak bytes of a step of these graphs: what one does not take of the others' state lies beside it."""
    state = [
        {spec: tensor_bytes(n) for n, spec in zip(g.placeholders(), g.inputs, strict=True) if spec.kind != "batch"}
        for g in graphs
    ]
    whole = {spec: size for sizes in state for spec, size in sizes.items()}
    beside = [sum(size for spec, size in whole.items() if spec not in sizes) for sizes in state]
    return max(estimate_memory(g.graph).peak + size for g, size in zip(graphs, beside, strict=True))


def _rewritten(step: StepGraph, options: StepOptions) -> StepGraph:
    module = fx.GraphModule(step.module, copy.deepcopy(step.graph))
    trial = replace(step, module=module, executable=None, recording=None, log=[])
    run_passes(trial, options)
    return trial
