"""The forecast of a pipeline: the cost of each stage, and the simulated time of every schedule that its model allows.

The microbatch of the whole model is captured once, as in a run, and cut as each schedule requires. Each stage is
rewritten by the passes of a run and costed call by call; these times go into the simulated schedule. Stages of equal
form are rewritten and costed once.
"""

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

from stepgraph import compat, parallel
from stepgraph.config.train import TrainConfig
from stepgraph.costs import links
from stepgraph.costs.hardware import GPUS_PER_NODE, Gpu
from stepgraph.costs.step import graph_cost
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.program import StepProgram
from stepgraph.graph.stages import Cut, pieces_of
from stepgraph.graph.step_graph import Call, Kind, StepGraph
from stepgraph.graph.values import Accumulator, Buffer, Input, OptimizerState, Output, Parameter, Value
from stepgraph.inspect.forecast.forecast import (
    ClusterForecast,
    check_imbalance,
    fake_world,
    region_rows,
    simulated_spec,
    with_room,
)
from stepgraph.lower import copied, rewrite, rewrite_graph, trace
from stepgraph.parallel.pipeline.layout import Pipeline, even_starts
from stepgraph.parallel.pipeline.messages import calls_of, places_of
from stepgraph.parallel.pipeline.schedules import SCHEDULES, check_schedule, rank_of, with_once, work_of
from stepgraph.parallel.pipeline.timeline import PipelineTime, most_in_flight, simulate_schedule
from stepgraph.passes import Target

_STATE = (Parameter, Buffer, Accumulator)


@dataclass(frozen=True)
class StageCost:
    """One stage. ``seconds``: of each kind of call. ``state``: bytes of parameters, their gradients and optimizer
    state, and of parameters that are gathered and gradients that are reduced once per step. ``kept``: bytes that
    forward keeps for one microbatch's backward. ``between``: bytes kept between its two halves, where a schedule cuts
    it. ``working``: bytes of the fullest call in addition to state. ``message``: bytes to the next stage, forward.
    ``regions``: seconds of computing for one microbatch, by the user's regions and phase."""

    blocks: tuple[int, int]
    seconds: dict[Kind, float]
    state: int
    kept: int
    between: int
    working: int
    message: int
    regions: dict[tuple[str, str], float]


@dataclass(frozen=True)
class ScheduleForecast:
    """One schedule. ``ranks``: each rank's peak memory in bytes. ``exposed_s``: seconds that the step waits for
    messages between ranks. ``update_s``: seconds of the optimizer's update, which ``step_s`` includes."""

    name: str
    stages: list[StageCost]
    time: PipelineTime
    ranks: list[int]
    exposed_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.seconds + self.update_s


@dataclass(frozen=True, kw_only=True)
class PipelineForecast(ClusterForecast):
    """``schedules``: by name, the ones that the model's blocks and microbatches allow; ``chosen`` is the run's."""

    chosen: str
    schedules: dict[str, ScheduleForecast]
    refused: dict[str, str]

    @property
    def best(self) -> ScheduleForecast:
        """The fastest schedule that fits the GPU's memory, or the fastest of all if none fits."""
        fitting = [found for found in self.schedules.values() if self.fits(found)]
        return min(fitting or self.schedules.values(), key=lambda found: found.step_s)

    def fits(self, found: ScheduleForecast) -> bool:
        """Whether every rank's memory suffices."""
        return max(found.ranks) <= self.gpu.memory

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values; bytes and seconds. ``spans``: [rank, kind, stage, microbatch, start, end];
        microbatch is None for work done once for all."""
        return super().to_json() | {
            "chosen": self.chosen,
            "best": self.best.name,
            "refused": self.refused,
            "schedules": {
                name: {
                    "step_s": found.step_s,
                    "bubble": found.time.bubble,
                    "exposed_s": found.exposed_s,
                    "update_s": found.update_s,
                    "tokens_per_s": self.config.tokens_per_step / found.step_s,
                    "mfu": self.mfu_of(found.step_s),
                    "peak_bytes": found.ranks,
                    "stages": [asdict(stage) | {"regions": region_rows(stage.regions)} for stage in found.stages],
                    "spans": [[span.rank, *span.work, span.start, span.end] for span in found.time.spans],
                }
                for name, found in self.schedules.items()
            },
        }


def forecast_pipeline(config: TrainConfig, gpu: Gpu, imbalance: float = 1.0) -> PipelineForecast:
    """The forecast of ``config``'s step in its pipeline on ``gpu``, by every schedule that fits model and microbatches.

    ``imbalance``: with ``ep``, rows that the most loaded rank's experts receive over the mean, in every layer and
    microbatch: each stage is forecast by that rank, as in `forecast`, with the room that training would have grown to.

    Raises ``ValueError`` for a configuration that cannot be right, and inside a process group.
    """
    start = time.perf_counter()
    check_imbalance(imbalance, config.mesh_spec)
    config = with_room(config, imbalance)
    with fake_world(config) as mesh:
        return _forecast(config, gpu, mesh, imbalance, start)


@contextlib.contextmanager
def simulated_stage(
    config: TrainConfig, gpu: Gpu, stage: int = 0
) -> Iterator[tuple[StepProgram, dict[str, links.Group], list[StageCost]]]:
    """The program of the first rank that has ``stage`` of ``config``'s pipeline on ``gpu``, rewritten; its process
    groups, open inside; and the cost of every stage. Raises ``ValueError`` as `forecast_pipeline` does, and for a
    stage that is not there."""
    spec, schedule = config.mesh_spec, SCHEDULES[config.pipeline_schedule]
    if not 0 <= stage < spec.pp * schedule.chunks:
        raise ValueError(
            f"stage={stage} of a pipeline of {spec.pp * schedule.chunks} stages: use 0 to "
            f"{spec.pp * schedule.chunks - 1}"
        )
    rank = rank_of(schedule, spec.pp, stage) * (spec.size // spec.pp)
    with fake_world(config, rank) as mesh:
        spec, target = simulated_spec(config, mesh), Target.forecast(gpu)
        program, pipeline = trace(spec, target).program, spec.pipeline
        in_flight = most_in_flight(pipeline.name, pipeline.ranks, config.accumulate)
        costs = _stages(program, pipeline.starts, in_flight, config, gpu)
        staged = rewrite(program, spec, target)
        yield staged, links.groups_of(node for graph in staged.graphs.values() for node in graph.graph.nodes), costs


def _forecast(config: TrainConfig, gpu: Gpu, mesh: parallel.Mesh, imbalance: float, start: float) -> PipelineForecast:
    spec, target = simulated_spec(config, mesh), Target.forecast(gpu)
    program, pipeline = trace(spec, target).program, spec.pipeline
    micro, update = program.main, program.graphs["update"]
    rewrite_graph(update, config, target=target)
    update_s = graph_cost(update, gpu, links.groups_of(update.graph.nodes), fused=config.compiles_all)
    cuts: dict[tuple, list[StageCost]] = {}
    found, refused = {}, {}
    for name, schedule in SCHEDULES.items():
        try:
            check_schedule(name, pipeline.ranks, config.accumulate)
            own = name == pipeline.name or schedule.chunks == pipeline.schedule.chunks
            starts = pipeline.starts if own else even_starts(micro, pipeline.ranks, name)
        except ValueError as problem:
            refused[name] = str(problem)
            continue
        in_flight = most_in_flight(name, pipeline.ranks, config.accumulate)
        if (starts, in_flight) not in cuts:
            cuts[starts, in_flight] = _stages(program, starts, in_flight, config, gpu, imbalance)
        found[name] = _run(name, cuts[starts, in_flight], pipeline, config, gpu, update_s.timeline.step_seconds)
    plan_s = time.perf_counter() - start
    run = {"config": config, "gpu": gpu, "capture_s": program.capture_s, "plan_s": plan_s, "imbalance": imbalance}
    return PipelineForecast(**run, chosen=pipeline.name, schedules=found, refused=refused)


def _bytes(step: StepGraph, *kinds: type[Input]) -> int:
    return sum(map(tensor_bytes, step.placeholders(*kinds)))


def _value_bytes(step: StepGraph, values: Collection[Output]) -> int:
    return sum(tensor_bytes(node) for node, what in step.bound() if what in values)


def _stages(
    program: StepProgram, starts: tuple[int, ...], in_flight: int, config: TrainConfig, gpu: Gpu, load: float = 1.0
) -> list[StageCost]:
    """The cost of every stage. ``load``: rows that a rank's experts receive over the mean of its stage's ranks."""
    target, update = Target.forecast(gpu), program.graphs["update"]
    per_byte = _bytes(update, OptimizerState) / max(1, _bytes(update, Parameter))  # of state, per byte of parameters
    cut = Cut(copied(program).main, starts)  # which separates a tied embedding's gradients
    ends = [*starts[1:], len(program.main.blocks)]
    found: list[StageCost] = []
    known: dict[tuple, StageCost] = {}
    for stage in range(len(starts)):
        step = cut.graph_of(stage)
        form = _form(step)
        if form in known:
            found.append(replace(known[form], blocks=(starts[stage], ends[stage])))
            continue
        step.in_flight, step.stage = in_flight, stage
        rewrite_graph(step, config, target=target)
        for graph in step.once.values():
            rewrite_graph(graph, config, target=target)
        gathered = {what for graph in step.once.values() for what in graph.outputs}
        state = _bytes(step, *_STATE) + round(per_byte * _bytes(step, Parameter)) + _value_bytes(step, gathered)
        seconds, working = {}, 0
        regions: dict[tuple[str, str], float] = defaultdict(float)
        pieces = pieces_of(step, stage, halves=True)
        for kind, piece in (pieces | step.once).items():
            groups = links.groups_of(piece.graph.nodes)
            cost = graph_cost(piece, gpu, groups, fused=config.compiles_all, load=load, whole=step)
            seconds[kind] = cost.timeline.step_seconds
            for key, time_s in cost.timeline.regions.items() if kind not in step.once else ():
                regions[key] += time_s
            peak = max((moment.total for moment in cost.moments), default=0)
            working = max(working, peak - _bytes(piece, *_STATE) - _value_bytes(piece, gathered))
        seconds[Kind.BACKWARD] = seconds[Kind.BACKWARD_INPUT] + seconds[Kind.BACKWARD_WEIGHT]
        message = sum(map(tensor_bytes, cut.message(stage + 1, True))) if stage + 1 < len(starts) else 0
        kept, between = _kept(pieces, stage)
        blocks = starts[stage], ends[stage]
        known[form] = StageCost(blocks, seconds, state, kept, between, working, message, dict(regions))
        found.append(known[form])
    return found


def _form(step: StepGraph) -> tuple:
    """Equal for stages that cost the same: what they call, in order, on values of which form; what they return."""
    nodes = (
        (node.op, str(node.target) if node.op == "call_function" else "", _sizes(node)) for node in step.graph.nodes
    )
    kinds = Counter(what.kind for what in step.outputs)
    return (*nodes, *sorted(kinds.items()))


def _sizes(node: fx.Node) -> tuple:
    tensors = [t for t in compat.pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    return tuple((tuple(t.shape), t.dtype) for t in tensors)


def _kept(pieces: Mapping[Kind, StepGraph], stage: int) -> tuple[int, int]:
    """(bytes that forward keeps for its stage's backward, bytes that backward's first half keeps for its second)."""
    late = {spec.what for spec in pieces[Kind.BACKWARD_WEIGHT].inputs}
    kept = between = 0
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT):
        graph = pieces[kind].graph
        aliases, values = Aliases(graph), defaultdict(set)
        for node, what in pieces[kind].returned():
            if isinstance(what, Value) and what.stage == stage:
                values[aliases.root(node)].add(what)
        made = {node: names for node, names in values.items() if node.op == "call_function"}
        kept += sum(map(tensor_bytes, made)) if kind is Kind.FORWARD else 0
        between += sum(tensor_bytes(node) for node, names in made.items() if names & late)
    return kept, between


def _run(
    name: str, stages: list[StageCost], pipeline: Pipeline, config: TrainConfig, gpu: Gpu, update_s: float
) -> ScheduleForecast:
    schedule, ranks = SCHEDULES[name], pipeline.ranks
    where = [rank_of(schedule, ranks, stage) for stage in range(len(stages))]
    gathered, reduced = ([i for i, s in enumerate(stages) if kind in s.seconds] for kind in (Kind.GATHER, Kind.REDUCE))
    orders = with_once(work_of(name, ranks, config.accumulate), gathered, reduced)
    seconds = {(kind, i): s for i, stage in enumerate(stages) for kind, s in stage.seconds.items()}
    # Neighbours in a pipeline are one stage's number of ranks apart.
    link = gpu.nvlink if config.mesh_spec.size <= GPUS_PER_NODE else gpu.network
    sends: dict[tuple[bool, int], float] = {}
    for i, stage in enumerate(stages):
        sends[True, i] = sends[False, i + 1] = stage.message / link
    timed = simulate_schedule(orders, where, seconds, sends)
    without = simulate_schedule(orders, where, seconds, dict.fromkeys(sends, 0.0))
    symmetric = config.stage_sends == "symmetric"
    calls = calls_of(orders, where, symmetric)
    boxes = _box_bytes(calls, where, stages) if symmetric else 0
    peaks = [_peak([i for i, r in enumerate(where) if r == rank], stages, timed) + boxes for rank in range(ranks)]
    return ScheduleForecast(name, stages, timed, peaks, timed.seconds - without.seconds, update_s)


def _box_bytes(calls: list[list[Call]], where: list[int], stages: list[StageCost]) -> int:
    """Bytes on each rank for messages over symmetric memory, of the rank that needs most."""
    room = Counter()
    for channel, places in places_of(calls, where).items():
        room[channel.receiver] += places
    return max(room.values()) * max(stage.message for stage in stages)


def _peak(own: list[int], stages: list[StageCost], timed: PipelineTime) -> int:
    """Bytes of a rank at its fullest: state, what is kept for all microbatches in flight, and the fullest call."""
    kept = timed.most_kept({i: (stages[i].kept, stages[i].between) for i in own})
    # The fullest call's own microbatch is among the ones in flight.
    return sum(stages[i].state for i in own) + kept + max(max(0, stages[i].working - stages[i].kept) for i in own)
