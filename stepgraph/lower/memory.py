"""The memory that each policy would need for a step, without running it."""

import dataclasses
from collections.abc import Iterator

from stepgraph.costs.memory import peak_bytes
from stepgraph.graph.program import StepProgram
from stepgraph.lower.lowering import copied, rewrite, trace
from stepgraph.lower.spec import StepSpec
from stepgraph.passes import StepOptions, Target


def peak_bytes_by_policy(spec: StepSpec, target: Target | None = None) -> dict[str, int]:
    """Estimated peak bytes of this rank's whole step under each memory policy, the one that recomputes least first.

    ``spec.passes``: the name of a list of passes or a `StepOptions`, of which every option but ``memory`` counts. The
    step is traced once and nothing is compiled. ``target``: None: where the model's tensors are.
    """
    target = dataclasses.replace(target or Target.on(spec.device), simulated=True)
    program = trace(spec, target).program
    return {policy: peak_bytes(made) for policy, made in programs_by_policy(program, spec, target)}


def programs_by_policy(program: StepProgram, spec: StepSpec, target: Target) -> Iterator[tuple[str, StepProgram]]:
    """(memory policy, ``program`` rewritten under it), the policy that recomputes least first. ``program``: as `trace`
    captured the step of ``spec``; it is not changed. ``spec.passes``: see `peak_bytes_by_policy`."""
    options = spec.passes if isinstance(spec.passes, StepOptions) else StepOptions(spec.passes)
    for policy in ("none", "selective", "full"):
        passes = dataclasses.replace(options, memory=policy)
        yield policy, rewrite(copied(program), dataclasses.replace(spec, passes=passes), target)
