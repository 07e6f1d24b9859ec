"""The account of a step: its options, graphs, passes, costs and pipeline, as plain data that JSON can hold.

The page shows nothing else: ``json.loads`` of the block ``account`` in a page returns it.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from stepgraph.config.environment import package_versions
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS_PER_NODE, Gpu, known_gpu
from stepgraph.costs.links import Group
from stepgraph.costs.memory import HELD, KINDS
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import Call, Kind, StepGraph, graph_name
from stepgraph.inspect.account.graph import PHASES, WORK, graph_account
from stepgraph.inspect.forecast.forecast import SETTINGS, model_flops
from stepgraph.inspect.forecast.pipeline import StageCost
from stepgraph.inspect.forecast.tables import time_over_peak
from stepgraph.parallel.pipeline.schedules import rank_of, schedule_named, with_once, work_of
from stepgraph.parallel.pipeline.timeline import PipelineTime, simulate_schedule
from stepgraph.passes import PASSES, PassReport

#: Version of the account's format. A page of another version is not read.
FORMAT = 2
#: Options that a step's graphs depend on: the options of a forecast and some that only a run has.
_OPTIONS = (
    *SETTINGS,
    *("document_mask", "on_nonfinite", "max_grad_norm", "optimizer", "betas", "eps", "weight_decay"),
    *("pipeline", "split"),
)
_STATE = ("parameter", "buffer", "optimizer", "accumulator")


def account_of(
    program: StepProgram,
    config: TrainConfig,
    gpu: Gpu,
    groups: Mapping[str, Group],
    *,
    device: str | None,
    stages: Sequence[StageCost] = (),
) -> dict[str, Any]:
    """The account of ``program``, the step of ``config``, forecast for ``gpu``.

    ``groups``: its process groups, see `links.groups`. ``device``: the device that runs it, None for a forecast.
    ``stages``: with a pipeline, the costs of all stages where they are known.

    ``head``: the step's title, options and versions, ``forecast`` (times only for the ``device`` itself: a CPU's
    measured time is not compared with a GPU's forecast), ``over_peak`` (see `time_over_peak`) and ``measured`` (None
    before a step ran). ``schedule``: calls
    of the graphs in order. ``graphs``: see `graph_account`, and ``other_graphs``: bytes of state that only other graphs
    read, by kind. ``passes``: one report each, with its excerpts. ``phases``, ``kinds``, ``work``: the names that
    graphs refer to by number. ``pipeline``: see `pipeline_account`. ``curves``: [step, value] over a run, by metric.
    """
    calls = program.calls()
    options = {"fused": config.compiles_all, "ran": device is not None}
    graphs = [
        graph_account(step, calls[name], n, gpu, groups, routed=_routed(program, calls[name]), **options)
        for name, (step, n) in zip(program.graphs, program.counted(), strict=True)
    ]
    _state_of_other_graphs(graphs)
    reports = program.reports
    pipeline = pipeline_account(graphs, config, gpu, stages)
    if pipeline:
        step_ns, kept = pipeline["ns"] + pipeline["after_ns"], pipeline["kept"]
    else:
        step_ns, kept = sum(graph["calls"] * graph["step_ns"] for graph in graphs), 0
    ranks = config.mesh_spec.size if config.mesh_spec else 1
    peak = gpu.peak(config.products_dtype)
    times = {
        "step_ms": step_ns / 1e6,
        "compute_ms": sum(graph["calls"] * graph["compute_ns"] for graph in graphs) / 1e6,
        "exposed_ms": sum(g["calls"] * sum(c["exposed"] for c in g["collectives"]) for g in graphs) / 1e6,
        "mfu": model_flops(config) / (step_ns / 1e9) / peak,
        "tokens_per_s": config.tokens_per_step / (step_ns / 1e9),
    }
    head = {
        "title": config.preset,
        "mesh": str(config.mesh_spec) if config.mesh_spec else "",
        "ranks": ranks,
        "gpu": gpu.name,
        "gpu_memory": gpu.memory,
        "device": device,
        "options": {key: _plain(getattr(config, key)) for key in _OPTIONS},
        "model": {key: _plain(value) for key, value in dataclasses.asdict(config.model).items()},
        "versions": package_versions(),
        "tokens": config.tokens_per_step,
        "capture_s": program.capture_s,
        "forecast": (times if device is None or known_gpu(device) is gpu else {})
        | {"peak_bytes": max(sum(peak_of(graph).values()) for graph in graphs) + kept},
        "over_peak": time_over_peak(reports, config.memory, gpu.memory, config.accumulate),
        "measured": None,
    }
    return {
        "format": FORMAT,
        "head": head,
        "phases": PHASES,
        "kinds": KINDS,
        "work": WORK,
        "schedule": [[call.graph, call.microbatch] for call in program.schedule],
        "graphs": graphs,
        "passes": [_pass(report) for report in reports],
        "profile": None,
        "pipeline": pipeline,
        "curves": {},
    }


def _routed(program: StepProgram, call: Call) -> StepGraph | None:
    """The graph of ``program`` that routed the tokens of ``call``, where that is another one."""
    return program.graphs[graph_name(Kind.FORWARD, call.stage)] if call.kind.backward else None


def peak_of(graph: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by kind at the peak of a graph's account."""
    return fullest(graph)[1]


def fullest(graph: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """(the node at the memory peak, the bytes by kind there) of a graph's account."""
    storages, n = graph["storages"], len(graph["nodes"]["name"])
    rows = list(zip(*(storages[key] for key in ("node", "bytes", "kind", "last")), strict=True))
    change = [0] * (n + 1)
    for node, size, _, last in rows:
        if last < n:  # the others are inputs, held throughout
            change[node] += size
            change[last + 1] -= size
    alive = list(itertools.accumulate(change[:n]))
    peak, sizes = alive.index(max(alive)), dict.fromkeys(KINDS, 0) | dict(graph["other_graphs"])
    for node, size, kind, last in rows:
        if last == n or node <= peak <= last:
            sizes[KINDS[kind]] += size
    return peak, sizes


def _state_of_other_graphs(graphs: Sequence[dict[str, Any]]) -> None:
    """Note for each graph the bytes of state, by kind, that only other graphs read."""
    taken = []
    for graph in graphs:
        size = dict(zip(graph["storages"]["node"], graph["storages"]["bytes"], strict=True))
        taken.append({(k, name): size.get(node, 0) for node, k, name in graph["inputs"] if k in _STATE})
    for graph, own in zip(graphs, taken, strict=True):
        other_graphs: dict[str, int] = {}
        for state in taken:
            for (kind, name), size in state.items():
                if (kind, name) not in own:
                    own[kind, name] = 0  # so that it is counted once
                    held = HELD.get(kind, "inputs")
                    other_graphs[held] = other_graphs.get(held, 0) + size
        graph["other_graphs"] = other_graphs


def _pass(report: PassReport) -> dict[str, Any]:
    known = PASSES.get(report.name)
    return dataclasses.asdict(report) | {"line": report.line(), "doc": known.doc if known else ""}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


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
