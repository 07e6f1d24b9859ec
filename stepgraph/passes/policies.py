"""What a memory policy would need, without changing the step."""

import copy
from dataclasses import replace

from torch import fx

from stepgraph.costs.memory import estimate_memory
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.memory.recompute import POLICIES
from stepgraph.passes.options import StepOptions
from stepgraph.passes.runner import run_passes


def peak_bytes_by_policy(step: StepGraph) -> dict[str, int]:
    """Estimated peak bytes of the whole step under each memory policy, the one that recomputes least first.

    ``step``: as captured, before any pass; it is not changed. The exact passes are applied to a copy of its graph.
    """
    peaks = {}
    for policy in POLICIES:
        if policy != "budget":
            module = fx.GraphModule(step.module, copy.deepcopy(step.graph))
            trial = replace(step, module=module, executable=None, runner=None, log=[])
            run_passes(trial, StepOptions("exact", memory=policy, cuda_graph=False))
            peaks[policy] = estimate_memory(trial.graph).peak
    return peaks
