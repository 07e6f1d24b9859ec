"""The forecast schedule of a pipeline: when each of its ranks computes, from the forecast of one rank's stages."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS_PER_NODE, Gpu
from stepgraph.graph.step_graph import Call, Kind
from stepgraph.inspect.forecast.pipeline import StageCost
from stepgraph.parallel.pipeline.schedules import rank_of, schedule_named, with_once, work_of
from stepgraph.parallel.pipeline.timeline import PipelineTime, simulate_schedule


def pipeline_account(
    graphs: Sequence[Mapping[str, Any]], config: TrainConfig, gpu: Gpu, costs: Sequence[StageCost] = ()
) -> dict[str, Any] | None:
    """The pipeline of a rank with ``graphs`` (accounts, see `graph_account`); None without one.

    ``costs``: of every stage. A running rank knows only the costs of its own stages. Without ``costs``, the other
    stages get the mean of these, as the cut makes stages even, and ``assumed`` is true.

    ``schedule``: its name. ``ranks``: their number; ``rank``: this rank. ``stages``: the rank of each stage.
    ``spans``: [rank, kind, stage, microbatch, start, end] of every computation, ns; the microbatch is None for work
    done once for all microbatches. ``ns``: the end of the last one; ``after_ns``: time of the update and the rest.
    ``bubble``: see `PipelineTime.bubble`; ``waiting``: each rank's share. ``in_flight``: the most microbatches that
    each stage keeps values of at a time. ``kept``: bytes that this rank keeps for all microbatches of its stages except
    the current one. ``measured``: ``spans`` and ``ns`` of a step that ran, None before.
    """
    spec = config.mesh_spec
    if spec is None or spec.pp == 1:
        return None
    name = config.pipeline_schedule
    schedule = schedule_named(name)
    stages = [rank_of(schedule, spec.pp, stage) for stage in range(spec.pp * schedule.chunks)]
    seconds = {(kind, i): time for i, cost in enumerate(costs) for kind, time in cost.seconds.items()}
    seconds = seconds or _seconds(graphs, len(stages))
    # Neighbours in a pipeline are one stage's number of ranks apart.
    link = gpu.nvlink if spec.size <= GPUS_PER_NODE else gpu.network
    sent = max((sum(graph["storages"]["bytes"]) for graph in graphs if Kind(graph["kind"]).sends), default=0)
    sends = {(forward, stage): sent / link for forward in (True, False) for stage in range(len(stages))}
    gathered, reduced = ([stage for kind, stage in seconds if kind == once] for once in (Kind.GATHER, Kind.REDUCE))
    orders = with_once(work_of(name, spec.pp, config.accumulate), gathered, reduced)
    timed = simulate_schedule(orders, stages, seconds, sends)
    own = sorted({graph["stage"] for graph in graphs if _call(graph).computes})
    kept = {stage: _kept(graphs, stage) for stage in own}
    after = (graph for graph in graphs if graph["kind"] in (Kind.SHARE_LOSS, Kind.UPDATE))
    return {
        "schedule": name,
        "ranks": spec.pp,
        "rank": stages[own[0]],
        "stages": stages,
        "assumed": not costs,
        "spans": spans_of(timed),
        "measured": None,
        "ns": round(timed.seconds * 1e9),
        "after_ns": sum(graph["step_ns"] for graph in after),
        "bubble": timed.bubble,
        "waiting": [1 - timed.busy(rank) / timed.seconds for rank in range(spec.pp)],
        "in_flight": [timed.most_in_flight(stage) for stage in range(len(stages))],
        "kept": timed.most_kept(kept) - max(sizes[0] for sizes in kept.values()),
    }


def spans_of(time: PipelineTime) -> list[list[Any]]:
    """[rank, kind, stage, microbatch, start, end] of every computation, ns."""
    return [[s.rank, *s.work, round(s.start * 1e9), round(s.end * 1e9)] for s in time.spans]


def _call(graph: Mapping[str, Any]) -> Call:
    return Call(Kind(graph["kind"]), graph["stage"])


def _seconds(graphs: Sequence[Mapping[str, Any]], stages: int) -> dict[tuple[str, int], float]:
    """Seconds of each kind of call of each stage."""
    known: dict[str, dict[int, float]] = defaultdict(dict)
    for graph in graphs:
        if _call(graph).computes:
            known[graph["kind"]][graph["stage"]] = graph["step_ns"] / 1e9
    return {
        (kind, stage): found.get(stage, sum(found.values()) / len(found))
        for kind, found in known.items()
        for stage in range(stages)
    }


def _kept(graphs: Sequence[Mapping[str, Any]], stage: int) -> tuple[int, int]:
    """Bytes that ``stage`` keeps for the backward of one microbatch, and between its halves where it has two."""
    own = {graph["kind"]: graph for graph in graphs if graph["stage"] == stage and _call(graph).computes}
    late = {name for _, _, name in own[Kind.BACKWARD_WEIGHT]["inputs"]} if Kind.BACKWARD_WEIGHT in own else set()
    kept = between = 0
    for kind in [kind for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT) if kind in own]:
        graph = own[kind]
        sizes = dict(zip(graph["storages"]["node"], graph["storages"]["bytes"], strict=True))
        inputs = {node for node, _, _ in graph["inputs"]}
        saved = {(node, name) for node, _, name, keeps in graph["outputs"] if keeps == stage and node not in inputs}
        kept += sum(sizes.get(node, 0) for node in {node for node, _ in saved}) if kind is Kind.FORWARD else 0
        between += sum(sizes.get(node, 0) for node in {node for node, name in saved if name in late})
    return kept, between
