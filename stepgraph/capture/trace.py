"""Training step -> `StepGraph`, in as many traces as needed; and the graph of only forward and loss, which
validation runs and which shows which block reads which parameter."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture import checks
from stepgraph.capture import guard as conditions
from stepgraph.capture.batch import flatten_batch
from stepgraph.capture.batch_reads import BatchReads
from stepgraph.capture.fake import OpenSizes
from stepgraph.capture.gradients import Share
from stepgraph.capture.guard import Guard
from stepgraph.capture.inputs import Inputs
from stepgraph.capture.known import KnownValues
from stepgraph.capture.launches import recorded_launches
from stepgraph.capture.made_once import is_first_call, left_made, put, refuse_made
from stepgraph.capture.optimizer.host import Host
from stepgraph.capture.optimizer.own_step import Again
from stepgraph.capture.optimizer.update import Optimizers
from stepgraph.capture.python import writes
from stepgraph.capture.python.host_draws import Draws, DrawsFound
from stepgraph.capture.python.replay import FILLS, Replay, ReplayError
from stepgraph.capture.python.torch_random import checked_generators, refusing_seeds
from stepgraph.capture.python.values import fake_inside
from stepgraph.capture.python.watched import Watched
from stepgraph.capture.recorder import RunAgain
from stepgraph.capture.state import OutsideError, Slot, TrainsError, Wrapping, swapped
from stepgraph.capture.step_trace import LossFn, StepTrace
from stepgraph.capture.triangles import write_out_triangles
from stepgraph.errors import CaptureError, MovedError, TraceError
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import Loss, Output, Ratio


@dataclass
class Traced:
    """A captured step and its binding to live tensors.

    ``landing``: the slots whose gradients the program returns, and how to wrap them. ``reads``: what Python read, to be
    compared. ``grow``: by condition, what the host calls before a step that exceeded it is repeated. ``generators``:
    the model's own that operators draw from. ``batch_reads``: what Python read of the batch's values. ``hosts``: what
    calls do on the host for optimizers. ``draws``: random numbers that the host draws. ``replay``: the loss function's
    Python, to run again after each step. ``changes``: whether forward or the loss changed anything in Python.
    ``whole``: the model, with modules outside of it whose state the step changes.
    """

    program: StepProgram
    landing: list[tuple[Slot, Wrapping | None]]
    slots: list[Slot]
    reads: Watched
    grow: dict[str, conditions.Grow]
    generators: list[torch.Generator] = field(default_factory=list)
    batch_reads: BatchReads = field(default_factory=lambda: BatchReads({}))
    hosts: list[Host] = field(default_factory=list)
    draws: Draws = field(default_factory=Draws)
    replay: Replay | None = None
    changes: bool = False
    whole: nn.Module | None = None

    @property
    def step(self) -> StepGraph:
        """The graph that runs forward and backward."""
        return self.program.main

    @property
    def state(self) -> list[torch.Tensor]:
        """The live local tensors of `step`'s inputs, in order, without the batch's."""
        return [spec.tensor for spec in self.step.inputs if spec.tensor is not None]


def trace_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizers | None = None,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    skip_nonfinite: bool = False,
    share: Share | None = None,
    exact: bool = False,
    ones: Sequence[int] = (),
    replays: bool = False,
    shapes: Mapping[str, Sequence[int]] | None = None,
    room: float = math.inf,
    open_sizes: OpenSizes | None = None,
) -> Traced:
    """Capture one training step of ``model``.

    The model's tensors may be real, fake, or on the meta device (these are traced as CPU tensors). Nothing is
    computed and the model is unchanged afterwards; only missing optimizer state is created, as eager's first step
    would. Raises `CaptureError` with module path and source line for code that cannot be captured.

    ``exact``: whether the step is to be bitwise eager's: what is read and cannot be watched is then refused, else
    warned of. ``ones``: places of masks of the batch that are literals of ones, see `masks_of_ones`. ``share``: this
    rank's in a pipeline. The graph of the microbatch is then that of all stages, to be cut; the graph of the update
    that of the parameters that are here, with the others on the meta device. ``replays``: whether what ``loss_fn``
    reads of values may be answered after the step, see `stepgraph.capture.python.replay`. ``shapes``: of whole
    parameters whose shards may be padded, by name. ``room``: bytes of the optimizer's state that may be on the GPU;
    what is beyond goes to host memory. All is traced as on its parameter's device: `Update.settle` puts it where the
    rewritten graphs have it. ``open_sizes``: of the batch's tensors.
    """
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        raise CaptureError("autocast is on around capture, which would reach the optimizer; enter it inside loss_fn")
    checks.refuse_modes()
    leaves, _ = flatten_batch(batch)
    checks.check_modules(model)
    checks.check_signature(loss_fn, model, batch)
    checks.check_batch(leaves)
    checks.check_microbatches(leaves, accumulate)
    checks.check_max_norm(max_grad_norm)
    given = model, loss_fn, batch, optimizer, max_grad_norm, accumulate, Guard(skip_nonfinite), share, exact, ones
    attempt = partial(StepTrace, *given, shapes, room, open_sizes)
    failed: CaptureError | None = None
    lines: frozenset[str] = frozenset()  # they read what the loss depends on, which may be the batch's
    fills = list(FILLS) if replays else []
    while fills:
        try:
            return _traced(partial(attempt, replayed=(fills[0], lines)))
        except (ReplayError, TraceError) as error:  # an operator may not take the numbers that are made up
            source = error.source if isinstance(error, ReplayError) else ""
            if source and source not in lines:
                failed, lines = error, lines | {source}
                continue
            failed = failed or error
        except AssertionError:  # a check of the loss, which the other numbers may pass
            pass
        fills.pop(0)
    try:
        return _traced(attempt)  # all that is read may be the batch's, see `KnownValues`
    except CaptureError as error:
        raise failed or error from None


def _traced(attempt: Callable[..., StepTrace]) -> Traced:
    """The step that ``attempt`` traces. A second try where a random generator moved: another thread may have drawn."""
    try:
        return _found(attempt)
    except MovedError:
        return _found(attempt)


def _found(attempt: Callable[..., StepTrace]) -> Traced:
    """The step that ``attempt`` traces, retried with the findings of earlier attempts."""
    found_out: dict[str, Any] = {}
    trace = first = attempt()
    made_to_train: list[torch.Tensor] = []
    try:
        while True:  # twice or three times if calls of checkpoint must run twice: some, then all
            try:
                program = trace.program()
                break
            except (RunAgain, Again, DrawsFound, OutsideError, TrainsError) as found:
                if isinstance(found, RunAgain):
                    found_out["repeated"] = found.calls
                elif isinstance(found, DrawsFound):
                    found_out["hosted"] = found.hosted
                elif isinstance(found, OutsideError):
                    found_out["outside"] = found_out.get("outside", {}) | trace.outside_with(found)
                elif isinstance(found, TrainsError):
                    made_to_train.append(trace.buffer_of(found).requires_grad_())
                trace = attempt(**found_out)
        generators = checked_generators(program, lambda: attempt(**found_out).program())
        first = trace
        if trace.open_sizes is not None and (trace.changes or trace.kept):
            for change in trace.changes:
                change.put(change.old)
            raise CaptureError("forward or the loss changes something in Python, with sizes that are open")
        moving = trace.prove_replay()
        places = {(id(change.holder), change.key) for change in moving}
        trace.changes = [change for change in trace.changes if (id(change.holder), change.key) not in places]
        while trace.changes or trace.made:
            with writes.after(trace.changes), left_made(trace.made), checks.refusing_kept(trace.kept):
                later = attempt(**found_out)
                after = later.program()
            if trace.made and not later.made and is_first_call(program, after, trace.made, later.slots):
                writes.keep(trace.changes, of_model=True)
                put(trace.made)
                trace, program = later, after
                continue
            same = writes.same(program, after)
            writes.check(trace.changes, later.changes, same)
            refuse_made(() if same else trace.made)
            writes.keep(trace.changes)
            break
        checks.warn_of_kept(trace.kept)
        changes = bool(moving or trace.changes or trace.kept)
    except BaseException:  # those of the user's own code come as they are
        for buffer in made_to_train:
            buffer.requires_grad_(False)
        first.drop_state()
        raise
    passing = [change for change in trace.changes if change.of_model and fake_inside(change.new)]
    watched = trace.reads.watched([*moving, *passing])
    checks.refuse_unseen(watched.unseen, trace.exact)
    if not trace.exact and trace.share is None:
        write_out_triangles(program, trace.slots)
    found = program, trace.landing, trace.slots, watched, trace.conditions.grow
    trace.batch_reads.close()
    checks.check_alike(trace.batch_reads.hold(flatten_batch(trace.batch)[0], trace.accumulate), trace.accumulate)
    replay = trace.replay if trace.replay and (trace.replay.wanted or moving) else None
    hosts = trace.update.hosts if trace.update else []
    return Traced(*found, generators, trace.batch_reads, hosts, trace.draws, replay, changes, trace.reached)


def trace_forward(model: nn.Module, loss_fn: LossFn, batch: Any) -> Traced:
    """``loss_fn(model, batch)`` without gradients as a program of one graph, with a ratio per condition.

    The model may be on the meta device. Nothing is computed, and the model is unchanged afterwards. Raises
    `CaptureError` for code that cannot be captured.
    """
    checks.check_modules(model)
    checks.check_signature(loss_fn, model, batch)
    checks.check_batch(flatten_batch(batch)[0])
    trace = _Forward(model, loss_fn, batch, None, None, 1, Guard(skip_nonfinite=False))
    program = StepProgram.plain(trace.graph())
    return Traced(program, [], trace.slots, trace.reads, trace.conditions.grow)


class _Forward(StepTrace):
    def graph(self) -> StepGraph:
        inputs = Inputs(self.mode, self.home)
        entries = inputs.add_slots(self.slots)
        batch = self._batch_inputs(inputs)
        outputs: list[Output] = [Loss()]

        def traced(*flat: torch.Tensor) -> list[torch.Tensor]:
            with (
                self.recorder.watch_graph(),
                swapped(self.model, self.slots, self._tensors(flat, entries)),
                self.recorder.watch_modules(),
                torch.no_grad(),
                KnownValues() as known,
                recorded_launches(known.note_writes),
                compat.transformers_sees_values(known.knows),
                compat.checks_of_known_values(known.knows),
                refusing_seeds(self.recorder),
                conditions.collected() as self.conditions,
            ):
                loss = checks.without_host_random(
                    self.recorder, lambda: self.loss_fn(self.model, self._batch(flat, batch))
                )
                if not isinstance(loss, torch.Tensor) or loss.ndim:
                    checks.check_loss(loss)
            ratios = self.conditions.each()
            outputs.extend(Ratio(name) for name, _ in ratios)
            return [loss, *(ratio for _, ratio in ratios)]

        return self._graph(traced, inputs, outputs)
