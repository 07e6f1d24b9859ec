"""`capture`: a model's training step as a callable, ``loss = step(batch)``."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import fx, nn

from stepgraph import compat
from stepgraph.capture import Traced, checks, flatten_batch
from stepgraph.capture.batch import (
    batch_sizes,
    first_places,
    form,
    leaves_by_name,
    mask_names,
    masks_of_ones,
    share_of_labels,
    shared_memory,
)
from stepgraph.capture.optimizer import Update
from stepgraph.capture.optimizer.update import Optimizers
from stepgraph.capture.step_trace import LossFn
from stepgraph.costs.memory import peak_bytes
from stepgraph.errors import CaptureError, require_words, warn_caller
from stepgraph.graph.program import StepProgram
from stepgraph.graph.report import PassReports
from stepgraph.graph.step_graph import Call, StepGraph
from stepgraph.kernels.comm.exchange import Session
from stepgraph.lower import Lengths, StepSpec, learn_lengths, rewrite, trace
from stepgraph.parallel import check_collectives, check_model, leave_padding_out, placement_of
from stepgraph.parallel.pipeline import Pipeline, check_schedule
from stepgraph.passes import Passes, Target, for_labels, resolve
from stepgraph.passes.compile.helpers import drop_helpers
from stepgraph.passes.waiting import Waiting
from stepgraph.run.bound import BoundStep, ExceededError
from stepgraph.run.forms import Forms
from stepgraph.run.memory import Memory
from stepgraph.run.saved import key
from stepgraph.run.saved.store import Outcome, Rewriting, store_of
from stepgraph.run.spans import Spans
from stepgraph.verify import Case, VerifyReport, verify

T = TypeVar("T")
TreeSpec = compat.pytree.TreeSpec


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizers | None = None,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    on_nonfinite: Literal["update", "skip"] = "update",
    passes: Passes = "default",
    disable: Sequence[str] = (),
    dump: Path | str | None = None,
    saved: Path | str | None = None,
    replay: bool = False,
) -> "CapturedStep":
    """Capture the training step of ``model`` as one graph and return it as a callable.

    Args:
        model: any ``nn.Module``. It is not changed; calling the step updates its tensors in place.
        loss_fn: ``loss_fn(model, batch)`` returns a floating-point scalar.
        batch: an example: tensors and plain values in dicts, lists, tuples and dataclasses. Another batch of the same
            form runs the same graph; one of another form is captured again (64 forms are kept).
        optimizer: any ``torch.optim.Optimizer``, or a list of them: clipping and the update, which its ``step()``
            computes, become part of the graph, and learning rates are read from ``param_groups`` at every step.
            Without one, gradients accumulate in ``param.grad``, as with ``backward()``.
        max_grad_norm: clip the step's gradients to this total 2-norm, before they are added to any ``param.grad``.
        accumulate: number N of microbatches into which the batch's tensors are split along their first dimension. The
            loss and the gradients are means over microbatches. One graph computes a microbatch, a second one updates.
            A later batch that N does not divide is split into the fewest microbatches no larger than the first ones.
        on_nonfinite: ``"update"`` applies every step. With ``"skip"`` a step whose loss or gradient norm is not finite
            on any rank changes no parameter, buffer or optimizer state. The device decides, without a host sync, and
            sets ``metrics["skipped"]``, a bool scalar. The step's batch and random numbers are consumed.
        passes: ``"exact"`` (bitwise equal to eager), ``"default"``, a ``stepgraph.StepOptions``, or a list of names and
            configured passes.
        disable: names of passes to leave out.
        dump: folder for the graph's text before and after each pass.
        saved: after the trace, load the rewritten and compiled step from this folder, or save it there if it is not
            there yet; ``"auto"``: the user's cache. A saved step is code: do not name a folder that you do not trust.
            ``step.saved`` says what happened.
        replay: let ``loss_fn`` read values in Python that it only stores (``seen.append(accuracy.item())``). The
            capture uses placeholder numbers; after a call, ``step.after()`` reruns that Python with the step's values.

    Returns:
        A `CapturedStep`.

    Raises:
        stepgraph.CaptureError: the step cannot be captured; the message names module path and source line.
        ValueError: an unknown pass or option, an optimizer that cannot be captured, a batch that ``accumulate`` does
            not divide. What ``loss_fn`` itself raises while it is traced is raised unchanged.
    """
    optimizer = compat.accelerated_inside(optimizer, accumulate)
    checks.check_arguments(model, loss_fn, batch, optimizer)
    require_words("disable", disable)
    for name, folder in (("dump", dump), ("saved", saved)):  # a file as ``saved`` costs a warning
        named = folder is None or isinstance(folder, str | Path)
        if not named or folder == "" or (name == "dump" and folder is not None and Path(folder).is_file()):
            raise ValueError(f"{name}={folder!r} is not a folder; use the path of one, which may be new")
    skip_nonfinite = checks.skips_nonfinite(on_nonfinite, optimizer)
    spec = StepSpec(
        model,
        loss_fn,
        batch,
        optimizer,
        # The norm must be known: an infinite limit leaves gradients as they are.
        max_grad_norm=math.inf if max_grad_norm is None and skip_nonfinite else max_grad_norm,
        accumulate=accumulate,
        skip_nonfinite=skip_nonfinite,
        placement=placement_of(model),
        passes=tuple(passes) if isinstance(passes, Iterable) and not isinstance(passes, str) else passes,
        disable=tuple(disable),
        replays=replay,
    )
    return CapturedStep(spec, dump, saved)


class CapturedStep:
    """A training step: ``loss = step(batch)``.

    ``metrics``: tensors of the latest call, by name: those of `metric`; ``grad_norm``, a scalar, when gradients are
    clipped; ``skipped``, a bool scalar, with ``on_nonfinite="skip"``; ``repeated``, with expert parallelism, how
    often the step was repeated, each time with larger buffers for experts.
    ``saved``: whether the step's latest form was loaded or compiled, if a folder of saved steps was given.
    """

    def __init__(self, spec: StepSpec, dump: Path | str | None, saved: Path | str | None):
        batch = spec.batch
        # Forms are captured with their calls' batches; an example would stay.
        self.spec = replace(spec, batch=None, passes=for_labels(spec.passes, lambda: share_of_labels(batch)))
        self.dump = None if dump is None else Path(dump)
        self.metrics: dict[str, torch.Tensor] = {}
        if self.pipeline is not None:
            check_schedule(self.pipeline.name, self.pipeline.ranks, spec.accumulate)
        self._modules = list(spec.model.modules())
        self._update = Update(spec.optimizer) if spec.optimizer is not None else None
        if spec.placement is not None:
            for optimizer in self._update.optimizers if self._update else ():
                leave_padding_out(optimizer, spec.model)
        self._forms, self._lengths = Forms(), None
        leaves, structure = flatten_batch(batch)
        checks.check_microbatches(leaves, spec.accumulate)
        self._is_exact = self.spec.is_exact
        facts = partial(self._facts, batch)
        masks = mask_names(batch) if self._is_exact else ()
        first = spec.placement is not None and check_model(spec.model, leaves_by_name(batch), masks, facts)
        self._largest = [size // spec.accumulate for size in batch_sizes(leaves)]
        self._session, self._memory = Session(), Memory()
        self._store = None if saved is None else store_of(saved, dump is not None)
        self.saved = Outcome()
        self._mesh = next((p.device_mesh for p in spec.model.parameters() if hasattr(p, "device_mesh")), None)
        self._current = self._bind(batch, self._signature(batch, leaves, structure))
        if first:
            self._agree(self._current, batch)

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages of the model; None where each rank runs the whole model."""
        return self.spec.pipeline

    @property
    def program(self) -> StepProgram:
        """The graphs of the latest call and the schedule that ran them. RuntimeError where capturing again failed."""
        if self._current is None:
            raise RuntimeError("the step was dropped to be captured again, and that failed: call the step again first")
        return self._current.traced.program

    @property
    def saves(self) -> bool:
        """Whether it loads and saves its forms; not if a rank dumps graphs, which needs passes that run."""
        return self._store is not None

    @property
    def spans(self) -> Spans | None:
        """With a pipeline, what this rank computed in the latest step and when; ``spans.seconds()`` waits for that
        step's end. None without one."""
        return self._current.runner.spans

    def where(self) -> str:
        """The pipeline call that runs now, such as ``forward.1 of microbatch 3``; "" without a pipeline."""
        call, _ = self._now()
        return "" if call is None or self.pipeline is None else str(call)

    def awaited(self) -> str:
        """The stage of a pipeline whose message this process, or its GPU, waits for now, such as ``stage 1 on rank 4``;
        "" while it waits for none."""
        _, received = self._now()
        return "" if received is None else self.pipeline.sender(received)

    def passed(self) -> int:
        """How many calls of the latest step the GPU is known to have passed; 0 on a CPU."""
        self._now()
        bound = self._current
        return bound.runner.passed.count if bound is not None and bound.runner.passed is not None else 0

    def _now(self) -> tuple[Call | None, Call | None]:
        """(the call that runs, the call that received what it waits for). Another thread may ask, also while the step
        is captured again. A GPU's stream is behind the process, which launches."""
        if (bound := self._current) is None:
            return None, None
        runner = bound.runner
        pending = runner.passed.pending() if runner.passed is not None else None
        return pending or (runner.now, runner.waits.receive)

    @property
    def graphs(self) -> dict[str, StepGraph]:
        """The step's graphs by name: ``step``, or with ``accumulate`` above 1 ``microbatch`` and ``update``."""
        return self.program.graphs

    @property
    def graph(self) -> StepGraph:
        """The graph that runs forward and backward."""
        return self.program.main

    @property
    def report(self) -> PassReports:
        """Reports of the passes applied to the graphs, one graph after the other: ``print(step.report)``."""
        return PassReports(self.program.reports)

    def __repr__(self) -> str:
        model = type(self.spec.model).__name__
        if self._current is None:
            return f"CapturedStep of {model}: dropped, the next call captures it again"
        counts = (f"{phase} {n:,}" for phase, n in self.program.count_by_phase().items())
        reports = self.report
        return (
            f"CapturedStep of {model}, captured in {self.program.capture_s:.1f} s\n"
            f"  nodes after passes: {', '.join(counts)}\n"
            f"  {sum(report.acted for report in reports)} of {len(reports)} passes changed the graph (step.report)"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """``copy.deepcopy`` and ``pickle``: CaptureError."""
        raise CaptureError(
            "a captured step runs on the tensors of its own model, and cannot be copied or pickled: copy the model, "
            "build an optimizer of the copy, and call stepgraph.capture with them"
        )

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one step on ``batch``, update the state in place, and return the loss, a detached scalar.

        Raises `stepgraph.CaptureError` if a batch of another form, or a change that Python sees, cannot be captured.
        """
        _refuse_modes()
        leaves, spec = flatten_batch(batch)
        (loss, self.metrics), repeated = self._until_it_fits(lambda: self._run(batch, leaves, spec))
        if self._current.traced.grow:
            self.metrics["repeated"] = torch.tensor(repeated)
        return loss

    def _run(self, batch: Any, leaves: Sequence[Any], spec: TreeSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self._update:
            self._update.check_gradients()
        self._current = self._bound_to(batch, leaves, spec)
        return self._current(leaves)

    def _until_it_fits(self, run: Callable[[], T]) -> tuple[T, int]:
        """(what ``run`` gives, how often it was repeated): after a step that exceeds its room, the host grows that and
        drops the captures with less room."""
        for repeated in itertools.count():
            try:
                return run(), repeated
            except ExceededError as exceeded:
                exceeded.grow()
                self._forms.drop_exceeded(exceeded.ratios)
            self._current = None  # its memory is free for the next capture

    def verify(self, batch: Any, *, locate: bool = False) -> VerifyReport:
        """Compare the step with eager on ``batch``, both from the current state, which is restored afterwards.

        Parameters, buffers, gradients, the optimizer's state and every generator of random numbers are kept on the
        host until then. With an optimizer in the graph, gradients show in its state and in ``grad_norm``.

        Args:
            batch: as for a call of the step; on ranks, each rank's own, and all ranks verify together.
            locate: if they differ, also find the first node or pass that differs, at the cost of up to one capture
                for each pass.

        Returns:
            A `VerifyReport`: ``bitwise``, ``loss``, ``largest`` difference; as text, one screen.

        Raises:
            stepgraph.CaptureError: as a call of the step.
        """
        _refuse_modes()
        if self.pipeline is not None:
            raise ValueError("verify compares with eager, which runs whole models: verify on a mesh without pp")
        current, metrics = self._current, self.metrics
        try:
            with Waiting(what="comparing the step with eager"):
                return self._until_it_fits(lambda: self._verify(batch, locate))[0]
        finally:
            self._current = current if current in self._forms else self._forms.latest
            self.metrics = metrics

    def _verify(self, batch: Any, locate: bool) -> VerifyReport:
        bound = self._bound_to(batch, *flatten_batch(batch))
        case = Case(
            replace(self.spec, batch=batch, ones=self._ones, accumulate=bound.traced.program.microbatches), bound
        )
        return verify(case, locate)

    @property
    def after(self) -> Callable[[], None]:
        """Rerun the Python of ``loss_fn`` once with the latest call's values: see ``replay`` of `capture`."""
        return (self._current and self._current.after) or (lambda: None)

    @property
    def stores(self) -> bool:
        """Whether `after` has something to run."""
        return self._current is not None and self._current.after is not None

    def from_now(self) -> Callable[[], str | None]:
        """Reports later what has changed since now in the Python values read at the capture of the latest call's
        form; None for nothing."""
        return self._current.plain.from_now()

    def release(self) -> None:
        """Drop the step's CUDA graphs, which hold memory, and NCCL's kernels: communicators close only when these are
        gone. Later calls record again."""
        for bound in self._forms:
            bound.runner.release()

    @contextlib.contextmanager
    def watched(self, on_node: Callable[[str, fx.Node], None]) -> Iterator[None]:
        """Inside, the forms of the step that are captured run node by node, without replaying CUDA graphs.

        ``on_node(graph, node)`` is called before each node runs; a piece that Inductor compiled is one node.
        """
        runners = [bound.runner for bound in self._forms]
        for runner in runners:
            runner.on_node = on_node
        try:
            yield
        finally:
            for runner in runners:
                runner.on_node = None

    def _bound_to(self, batch: Any, leaves: Sequence[Any], spec: TreeSpec) -> BoundStep:
        """The form of the step for ``batch``, captured again where what it was specialized on has changed."""
        if self._update:
            self._update.check_hooks()
        signature = self._signature(batch, leaves, spec)
        bound = self._forms.of(signature, leaves) or self._bind(batch, signature)
        if self.spec.placement is not None and not bound.agreed:
            self._agree(bound, batch)
        return bound

    def _agree(self, bound: BoundStep, batch: Any) -> None:
        """Compare what ranks communicate in ``bound``."""
        check_collectives(self.spec.model, bound.traced.program, partial(self._facts, batch))
        bound.agreed = True

    def _facts(self, batch: Any) -> dict[str, str]:
        """What the collectives of a step may depend on, as text, by name."""
        passes = resolve(self.spec.passes, self.spec.disable, Target.on(self.spec.device))
        found = {f"the version of {name}": version for name, version in key.versions().items()}
        found |= {f"the pass {p.name}": repr(p.options) for p in passes} | {"accumulate": repr(self.spec.accumulate)}
        for name, leaf in leaves_by_name(batch).items():
            found[name] = f"{leaf.dtype}{[*leaf.shape]}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        return found | {f"torch's {name}": value for name, value in key.settings(compiles=True).items()}

    def _signature(self, batch: Any, leaves: Sequence[Any], spec: TreeSpec) -> tuple:
        """Everything outside the tensors' values that the graph was specialized on; in an exact step which attention
        masks hide nothing too, as eager sees it."""
        self._ones = masks_of_ones(batch, self.spec.accumulate, self._mesh) if self._is_exact else ()
        places = (*first_places(leaves), *shared_memory(leaves))
        forms = type(batch), *map(form, leaves), *places, self._ones
        training = tuple([module.training for module in self._modules])
        return forms, spec, training, self._update and self._update.constants(), compat.open_around()

    def _microbatches(self, batch: Any) -> int:
        """``accumulate``; for a batch that it does not divide, such as an epoch's last, the fewest microbatches that
        are no larger than the first batch's."""
        accumulate = self.spec.accumulate
        sizes = batch_sizes(flatten_batch(batch)[0])
        if all(size % accumulate == 0 for size in sizes) or len(sizes) != len(self._largest):
            return accumulate
        fits = (
            n
            for n in range(1, math.gcd(*sizes) + 1)
            if all(size % n == 0 and size // n <= most for size, most in zip(sizes, self._largest, strict=True))
        )
        count = next(fits, accumulate)  # where none fits, the trace says what does not divide
        if count != accumulate:
            warn_caller(
                f"accumulate={accumulate} does not divide a batch of {sizes[0]}: it is captured separately, as "
                f"{count} microbatches of {sizes[0] // count}; drop_last=True in the data loader leaves it out"
            )
        return count

    @compat.collector_off()  # once for all parts: it would walk the trace again after each
    def _bind(self, batch: Any, signature: tuple) -> BoundStep:
        try:
            with Waiting(why=_of_another_form(batch), first_s=1.0) if self._forms else Waiting():
                return self._captured(batch, signature)
        finally:
            drop_helpers()

    def _captured(self, batch: Any, signature: tuple) -> BoundStep:
        self._forms.make_room(batch, signature)
        spec = replace(self.spec, batch=batch, ones=self._ones, accumulate=self._microbatches(batch))
        if not self._forms and learn_lengths(spec):
            self._lengths = Lengths()
        traced = trace(spec) if self._lengths is None else self._lengths.traced(spec, signature)
        apply = partial(self._rewrite, spec)
        if self._store is None:
            apply(traced)
        else:
            passes = resolve(spec.passes, spec.disable, Target.on(spec.device))
            rewriting = Rewriting(apply, passes, spec.device, spec.pipeline)
            self.saved = self._store.rewrite(traced, rewriting, together=not self._forms)
        if self._update:
            self._update.settle(traced.program, traced.slots)
        bound = BoundStep(traced, self._update, self._session, self._memory)
        self._forms.keep(signature, bound)
        if self._lengths is not None:
            self._lengths.keep(bound)
            reports = traced.program.reports
            for report in [r for r in reports if r.name == "inductor"] or reports[-1:]:
                report.notes += [self._lengths.note] if self._lengths.note else []
        return bound

    def _rewrite(self, spec: StepSpec, traced: Traced) -> None:
        traced.program = rewrite(traced.program, spec, dump=self.dump)
        _warn_of_memory(traced.program, Target.on(spec.device).memory)


def _of_another_form(batch: Any) -> str:
    """What lines begin with while ``batch`` is captured in the midst of a run."""
    tensors = ((name, leaf) for name, leaf in leaves_by_name(batch).items() if isinstance(leaf, torch.Tensor))
    name, first = next(tensors, ("", None))
    return "a different form of batch: " if first is None else f"a different form of batch, {name} {[*first.shape]}: "


def _refuse_modes() -> None:
    checks.refuse_modes()
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        raise CaptureError(
            "autocast is on around the call of a captured step, whose casts are fixed; enter it inside loss_fn"
        )


def _warn_of_memory(program: StepProgram, memory: float | None) -> None:
    """Warn where ``program`` needs more than the ``memory`` of its GPU (None: unknown), even if a compiler joins all
    the operators that it can."""
    if memory is not None and (peak := peak_bytes(program, fused=True)) > memory:
        warn_caller(
            f"the step needs an estimated {peak / 2**30:.1f} GiB and the GPU has {memory / 2**30:.1f} GiB: make the "
            "batch smaller or recompute, as with passes=stepgraph.StepOptions(memory='full'); stepgraph.forecast says "
            "what fits"
        )
