"""`capture`: a model's training step as a callable, ``loss = step(batch)``."""

import contextlib
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture import Traced, flatten_batch, gradients, trace_step
from stepgraph.capture.optimizer import AdamWUpdate
from stepgraph.capture.state import Watch, unwrap
from stepgraph.capture.trace import LossFn
from stepgraph.graph.collectives import exchanging
from stepgraph.graph.step_graph import StepGraph
from stepgraph.kernels.comm import copy_collectives, exchange
from stepgraph.passes import Passes, PassReport, StepOptions, prepare, run_passes

#: Batches of other shapes are captured again; so many captures are kept, the least recently used goes first.
MAX_CAPTURES = 8


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    passes: Passes = "default",
    disable: Sequence[str] = (),
    dump: Path | None = None,
) -> "CapturedStep":
    """Capture the training step of ``model`` as one graph and return it as a callable.

    Args:
        model: any ``nn.Module``. It is not changed; calling the step updates its tensors in place.
        loss_fn: ``loss_fn(model, batch)`` returns a floating-point scalar.
        batch: an example: tensors and plain values in dicts, lists and tuples. Another batch of the same form runs
            the same graph; one of another form is captured again (at most ``MAX_CAPTURES`` are kept).
        optimizer: ``torch.optim.AdamW`` or ``stepgraph.MasterAdamW``: clipping and the update become part of the
            graph, and the learning rate is read from ``param_groups`` at every step. Without one, gradients land in
            ``param.grad`` as ``backward()`` leaves them.
        max_grad_norm: clip the step's gradients to this total 2-norm, before they are added to any ``param.grad``.
        accumulate: split the batch's tensors along their first dimension into so many microbatches; the step's loss
            and gradients are those of their mean.
        passes: ``"exact"`` (bitwise equal to eager), ``"default"``, a ``stepgraph.StepOptions``, or a list of names and
            configured passes.
        disable: names of passes to leave out.
        dump: folder for the graph's text before and after each pass.

    Returns:
        A `CapturedStep`.

    Raises:
        stepgraph.CaptureError: the step cannot be captured; the message names module path and source line.
        ValueError: unknown passes, an optimizer that cannot be captured, a batch ``accumulate`` does not divide.
    """
    return CapturedStep(
        model,
        loss_fn,
        batch,
        optimizer,
        max_grad_norm=max_grad_norm,
        accumulate=accumulate,
        passes=passes,
        disable=disable,
        dump=dump,
    )


class CapturedStep:
    """A training step: ``loss = step(batch)``.

    ``graph``: the `StepGraph` of the latest call. ``report``: reports of its passes. ``metrics``: tensors of the
    latest call, ``grad_norm`` among them when gradients are clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        optimizer: torch.optim.Optimizer | None,
        *,
        max_grad_norm: float | None,
        accumulate: int,
        passes: Passes,
        disable: Sequence[str],
        dump: Path | None,
    ):
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.max_grad_norm, self.accumulate = max_grad_norm, accumulate
        self.passes = passes if isinstance(passes, str | StepOptions) else list(passes)
        self.disable, self.dump = tuple(disable), dump
        self.metrics: dict[str, torch.Tensor] = {}
        self._modules = list(model.modules())
        self._update = AdamWUpdate(optimizer) if optimizer is not None else None
        self._bound: OrderedDict[tuple, _Bound] = OrderedDict()
        leaves, spec = flatten_batch(batch)
        self._current = self._bind(batch, self._signature(leaves, spec))

    @property
    def graph(self) -> StepGraph:
        """The graph of the latest call."""
        return self._current.traced.step

    @property
    def report(self) -> list[PassReport]:
        """Reports of the passes applied to it."""
        return self.graph.log

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one step on ``batch``; returns the loss, a detached scalar. State is updated in place."""
        leaves, spec = flatten_batch(batch)
        signature = self._signature(leaves, spec)
        bound = self._bound.get(signature)
        if bound is not None and bound.watch.sees_change():
            del self._bound[signature]
            bound = None
        if bound is None:
            with _no_autocast():
                bound = self._bind(batch, signature)
        self._bound.move_to_end(signature)
        self._current = bound
        loss, self.metrics = bound.run(leaves)
        return loss

    def _signature(self, leaves: Sequence[Any], spec: Any) -> tuple:
        """Everything outside the tensors' values that the graph was specialized on."""
        forms = tuple(_form(leaf) for leaf in leaves)
        training = tuple([module.training for module in self._modules])
        return forms, spec, training, self._update and self._update.constants()

    def _bind(self, batch: Any, signature: tuple) -> "_Bound":
        if len(self._bound) >= MAX_CAPTURES:
            warnings.warn(
                f"{MAX_CAPTURES} forms of the step are captured already; dropping the least recently used. Pad batches "
                "to few shapes, and let schedules change the learning rate alone: betas, eps and weight decay are "
                "constants.",
                stacklevel=3,
            )
            self._bound.popitem(last=False)
        prepare(self.passes, self.disable, _device_of(self.model))
        traced = trace_step(
            self.model,
            self.loss_fn,
            batch,
            self.optimizer,
            max_grad_norm=self.max_grad_norm,
            accumulate=self.accumulate,
        )
        run_passes(traced.step, self.passes, disable=self.disable, dump=self.dump)
        bound = self._bound[signature] = _Bound(traced, self._update)
        return bound


class _Bound:
    """A graph bound to the live tensors it reads and writes."""

    def __init__(self, traced: Traced, update: AdamWUpdate | None):
        self.traced, self.update = traced, update
        self.state = traced.state
        self.lrs = {
            int(spec.name.removeprefix("lr.")): tensor
            for spec, tensor in zip(traced.step.inputs, self.state, strict=False)
            if spec.kind == "lr"
        }
        self.lr_values: dict[int, float] = {}
        self.exchanging = exchanging(traced.step.graph)
        self.watch = Watch(traced.slots, update.optimizer if update else None)

    def run(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for group, tensor in self.lrs.items():
            lr = self.update.optimizer.param_groups[group]["lr"]
            if isinstance(lr, torch.Tensor):
                tensor.copy_(lr)
                self.lr_values.pop(group, None)
            elif self.lr_values.get(group) != lr:
                tensor.fill_(lr)
                self.lr_values[group] = lr
        flat = [*self.state, *(tensor for i in self.traced.tensor_leaves for tensor in unwrap(leaves[i])[0])]
        with torch.no_grad(), _no_autocast(), compat.below_autograd():
            try:
                exchange.fence(self.exchanging)
                results = self.traced.step.runner(flat)
            except BaseException:  # what the step began would be taken for what the next one begins
                copy_collectives.abandon(self.exchanging)
                raise
        loss, metrics, grads = None, {}, []
        for spec, value in zip(self.traced.step.outputs, results, strict=True):
            if spec.kind == "loss":
                loss = value
            elif spec.kind == "metric":
                metrics[spec.name] = value
            else:
                grads.append(value)
        gradients.land(self.traced.landing, grads)
        if self.update:
            compat.mark_stepped(self.update.optimizer)
        return loss, metrics


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is: where its first tensor is."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _form(leaf: Any) -> Any:
    """What of a leaf of the batch the graph was specialized on: a tensor's form, any other value itself."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    inner, wrapping = unwrap(leaf)
    plain = tuple((t.shape, t.dtype, t.device, t.stride()) for t in inner)
    return plain if wrapping is None else (plain, wrapping.kind, wrapping.context, *wrapping.others.values())


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """The graph holds its casts; an autocast around the call must not add others."""
    on = [d for d in ("cuda", "cpu") if torch.is_autocast_enabled(d)]
    with contextlib.ExitStack() as stack:
        for device in on:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
