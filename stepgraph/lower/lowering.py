"""`lower`: trace a step once, cut it into the stages of a pipeline, and run the passes over every graph."""

import copy
import dataclasses
from pathlib import Path

from stepgraph import compat
from stepgraph.capture import Traced, trace_step
from stepgraph.capture.batch import shorter
from stepgraph.capture.fake import OpenSizes
from stepgraph.capture.trace import trace_forward
from stepgraph.errors import first_line, warn_caller
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.lower.gpu_trace import traced_as
from stepgraph.lower.peak import PeakSearch, fitted, peak_search, room_for_state
from stepgraph.lower.spec import StepSpec
from stepgraph.parallel.pipeline import Pipeline, StageGraphs
from stepgraph.passes import (
    Passes,
    StepOptions,
    Target,
    dry_run,
    prepare,
    record_whole,
    run_passes,
    split_at_pipeline_cut,
)


@compat.collector_off()  # once for both parts: it would walk the trace again after each
def lower(spec: StepSpec, target: Target | None = None, *, dump: Path | None = None) -> Traced:
    """Trace the step of ``spec`` once and rewrite it for ``target``: a program and its binding to live tensors.

    ``target``: may be a GPU that is only forecast; None: where the model's tensors are. In a simulated process group
    the program is that of the simulated rank. ``dump``: folder for the graphs' text before and after each pass.
    Raises `CaptureError` for a step that cannot be captured, ``ValueError`` for passes that cannot be right.
    """
    traced = trace(spec, target)
    traced.program = rewrite(traced.program, spec, target, dump=dump)
    return traced


@compat.one_thread()
@compat.gpu_context_once()
def trace(spec: StepSpec, target: Target | None = None, open_sizes: OpenSizes | None = None) -> Traced:
    """The step as captured. In a pipeline the graph of a microbatch has all stages, which `rewrite` cuts.
    ``open_sizes``: of the batch's tensors, with which it is not captured but rehearsed for other sizes."""
    prepare(spec.passes, spec.disable, target or Target(spec.device.type))
    if not spec.backward:
        return trace_forward(spec.model, spec.loss_fn, spec.batch)
    shapes = spec.placement and {name: layout.shape for name, layout in spec.placement.layouts.items()}
    with traced_as(target, spec.device):
        return trace_step(
            *(spec.model, spec.loss_fn, spec.batch, spec.optimizer),
            max_grad_norm=spec.max_grad_norm,
            accumulate=spec.accumulate,
            skip_nonfinite=spec.skip_nonfinite,
            share=spec.pipeline and spec.pipeline.share(),
            exact=spec.is_exact,
            ones=spec.ones,
            replays=spec.replays,
            shapes=shapes,
            room=room_for_state(spec, target),
            open_sizes=open_sizes,
        )


def rewrite(
    program: StepProgram, spec: StepSpec, target: Target | None = None, *, dump: Path | None = None
) -> StepProgram:
    """``program``, as `trace` captured the step of ``spec``, rewritten by its passes; in a pipeline this rank's
    program. The graphs of ``program`` are changed: see `copied`."""
    spec, target = fitted(program, spec, target, _copy_rewritten)
    return rewritten(program, spec, target, dump)


def search_of_peak(program: StepProgram, spec: StepSpec, target: Target) -> PeakSearch | None:
    """The search of `rewrite` under ``memory="peak=..."``; None for other policies. ``program`` is not changed."""
    return peak_search(program, spec, target, _copy_rewritten)


def _copy_rewritten(program: StepProgram, spec: StepSpec, target: Target | None) -> StepProgram:
    return rewritten(copied(program), spec, target)


@compat.one_thread()
@compat.gpu_context_once()
def rewritten(program: StepProgram, spec: StepSpec, target: Target | None, dump: Path | None = None) -> StepProgram:
    """`rewrite` by passes that need no search for a memory policy."""
    if spec.pipeline is not None:
        return _staged(program, spec, spec.pipeline, target, dump)
    several = len(program.graphs) > 1
    for name, graph in program.graphs.items():
        rewrite_graph(graph, spec.passes, spec.disable, target, name, dump and (dump / name if several else dump))
    return program


def _staged(
    program: StepProgram, spec: StepSpec, pipeline: Pipeline, target: Target | None, dump: Path | None
) -> StepProgram:
    """This rank's program of a pipeline. Each of its stages is rewritten whole by the passes that look at forward and
    backward together, then cut into the graphs that the schedule calls, which the other passes rewrite."""

    def apply(graph: StepGraph, passes: Passes, name: str) -> None:
        rewrite_graph(graph, passes, spec.disable, target, name, dump and dump / name.replace(" ", "."))

    micro = program.main
    stages = StageGraphs(micro, pipeline, spec.accumulate)
    if not spec.backward:
        for stage, graph in stages.whole.items():
            apply(graph, spec.passes, f"forward.{stage}")
        return stages.forward_program()
    whole, apart = split_at_pipeline_cut(spec.passes, spec.disable, target or Target.of(micro))
    for stage, graph in stages.whole.items():
        apply(graph, whole, f"stage {stage}")
    pieces, once, update = stages.pieces(), stages.once(), program.graphs["update"]
    for name, graph in pieces.items():
        apply(graph, apart, name)
    for name, graph in once.items():
        apply(graph, spec.passes, name)
    apply(update, spec.passes, "update")
    made = stages.program(pieces | once, update)
    made.log = [report for graph in stages.whole.values() for report in graph.log]
    record_whole(made)
    return made


def rewrite_graph(
    graph: StepGraph,
    passes: Passes,
    disable: tuple[str, ...] = (),
    target: Target | None = None,
    name: str = "",
    dump: Path | None = None,
) -> None:
    """Run ``passes`` over one graph of a program; their reports carry its ``name``."""
    done = len(graph.log)
    for report in run_passes(graph, passes, disable=disable, dump=dump, target=target)[done:]:
        report.graph = name


def copied(program: StepProgram) -> StepProgram:
    """A copy of a captured ``program`` that passes can rewrite: its nodes are copied, its tensors are shared."""
    return StepProgram({name: _copied(graph) for name, graph in program.graphs.items()}, list(program.schedule))


def _copied(step: StepGraph) -> StepGraph:
    module = compat.lazy_graph_module(step.module, copy.deepcopy(step.graph))
    own = {"inputs": list(step.inputs), "outputs": list(step.outputs), "axes": dict(step.axes)}
    return dataclasses.replace(step, module=module, executable=None, recording=None, log=list(step.log), **own)


def learn_lengths(spec: StepSpec) -> bool:
    """Whether a step is to serve batches of any length. Before its first capture, if it is compiled: trace a batch of
    half the length, and so learn what depends on the length. Does nothing for other steps."""
    passes = dry_run(spec.passes, spec.disable, Target(spec.device.type))
    if passes is None:
        return isinstance(spec.passes, StepOptions) and spec.passes.any_length
    other = shorter(spec.batch)
    if other is None:
        return True
    try:
        traced = trace(dataclasses.replace(spec, batch=other))
    except Exception as error:  # it is not the user's batch: a model may refuse it
        why = first_line(error)[:120]
        warn_caller(f"any_length: half the length cannot be traced ({why}), so the first length is compiled separately")
        return True
    for graph in traced.program.graphs.values():
        run_passes(graph, passes)
    return True
