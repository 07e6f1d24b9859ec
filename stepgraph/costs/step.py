"""The cost of a step: of one graph, and of a schedule of calls of several."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stepgraph.costs.hardware import LAUNCH_S, Gpu
from stepgraph.costs.links import Group
from stepgraph.costs.memory import HELD, Moment, memory_over_step
from stepgraph.costs.roofline import Fusion, Roofline
from stepgraph.costs.timeline import Timeline, simulate
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import Accumulator, Buffer, Input, OptimizerState, Parameter

#: Kinds of inputs that a rank holds throughout, whichever graph runs.
_STATE = (Parameter, Buffer, OptimizerState, Accumulator)


@dataclass(frozen=True)
class GraphCost:
    """One call of a graph. ``state``: bytes of the parameters, buffers and optimizer state that it takes. ``flops``:
    that it runs. ``moments``: memory over the call."""

    timeline: Timeline
    moments: list[Moment]
    state: dict[Input, int]
    flops: int


@dataclass(frozen=True)
class StepCost:
    """A step: calls of graphs, one by one. ``moments``: of each graph once, with all of the step's state."""

    timeline: Timeline
    moments: list[Moment]
    flops: int


def graph_cost(
    step: StepGraph,
    gpu: Gpu,
    groups: Mapping[str, Group],
    *,
    fused: bool,
    load: float = 1.0,
    whole: StepGraph | None = None,
) -> GraphCost:
    """The cost of one call of ``step`` on ``gpu``. ``groups``: see `links.groups`. ``fused``: whether a compiler makes
    kernels of several nodes. ``load``: rows that this rank's experts receive over the mean of all ranks. ``whole``:
    the stage that ``step`` is a part of, forward and backward: where a backward's tokens were routed."""
    aliases = Aliases(step.graph)
    fusion = Fusion(step.graph, aliases, fused)
    roofline = Roofline(step.graph, aliases, fusion, gpu, load, None if whole is None else whole.graph, LAUNCH_S)
    return GraphCost(
        timeline=simulate(step.graph, roofline.seconds, gpu, groups, load),
        moments=memory_over_step(step, aliases, fusion),
        state={what: tensor_bytes(node) for node, what in step.bound() if isinstance(what, _STATE)},
        flops=roofline.flops,
    )


def step_cost(calls: Sequence[tuple[GraphCost, int]]) -> StepCost:
    """The cost of a step that calls each graph the given number of times, with the state of all graphs."""
    state = {what: size for graph, _ in calls for what, size in graph.state.items()}
    timelines = [(graph.timeline, n) for graph, n in calls]
    return StepCost(
        Timeline(
            collectives=[c for timeline, n in timelines for c in timeline.collectives * n],
            step_seconds=sum(n * timeline.step_seconds for timeline, n in timelines),
            compute_seconds=sum(n * timeline.compute_seconds for timeline, n in timelines),
            regions=_regions(timelines),
            copies=[c for timeline, n in timelines for c in timeline.copies * n],
        ),
        moments=[_beside(moment, state, graph.state) for graph, _ in calls for moment in graph.moments],
        flops=sum(n * graph.flops for graph, n in calls),
    )


def _regions(timelines: Sequence[tuple[Timeline, int]]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = defaultdict(float)
    for timeline, n in timelines:
        for key, seconds in timeline.regions.items():
            found[key] += n * seconds
    return dict(found)


def _beside(moment: Moment, state: Mapping[Input, int], taken: Mapping[Input, int]) -> Moment:
    sizes = dict(moment.bytes)
    for what, size in state.items():
        if what not in taken:
            sizes[HELD.get(what.kind, "inputs")] += size
    return replace(moment, bytes=sizes)
