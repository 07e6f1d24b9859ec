"""The graph of forward and loss alone: what validation runs, and what shows which block reads which parameter."""

from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture import checks
from stepgraph.capture import guard as conditions
from stepgraph.capture.batch import flatten_batch
from stepgraph.capture.guard import Guard
from stepgraph.capture.inputs import Inputs
from stepgraph.capture.known import KnownValues
from stepgraph.capture.launches import recorded_launches
from stepgraph.capture.python.torch_random import refusing_seeds
from stepgraph.capture.state import swapped
from stepgraph.capture.step_trace import LossFn, StepTrace
from stepgraph.capture.trace import Traced
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import Loss, Output, Ratio


def trace_forward(model: nn.Module, loss_fn: LossFn, batch: Any) -> Traced:
    """``loss_fn(model, batch)`` without gradients as a program of one graph, with a ratio for each condition that
    forward stated.

    The model may be on the meta device. Nothing is computed, and the model is unchanged afterwards. Raises
    `CaptureError` for what cannot be captured.
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
                self.recorder.watch_graph(compat.graph_of_trace()),
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
