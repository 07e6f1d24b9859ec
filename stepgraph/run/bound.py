"""A captured step bound to the live tensors that it reads and writes."""

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.capture import Traced, gradients
from stepgraph.capture.optimizer import Update
from stepgraph.capture.python.reads import Plain
from stepgraph.capture.state import Watch
from stepgraph.kernels.comm.exchange import Session
from stepgraph.run.program import Accumulators, ProgramRunner


class BoundStep:
    """One form of a captured step. ``watch`` and ``plain`` see whether it must be captured again."""

    def __init__(self, traced: Traced, update: Update | None, session: Session, accumulators: Accumulators):
        self.traced, self.update = traced, update
        self.runner = ProgramRunner(traced.program, session, accumulators)
        self.watch = Watch(traced.slots, update.optimizers if update else ())
        self.plain = Plain(traced.reads)
        self.lrs = {
            int(spec.name.removeprefix("lr.")): spec.tensor
            for step in traced.program.graphs.values()
            for spec in step.inputs
            if spec.kind == "lr"
        }
        self.lr_values: dict[int, float] = {}

    def __call__(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, metrics by name) of one step on the leaves of a batch; gradients land in ``param.grad``."""
        self._set_rates()
        results = self.runner(leaves)
        gradients.land(self.traced.landing, results.gradients)
        if self.update:
            self.update.mark_stepped()
        return results.loss, results.metrics

    def _set_rates(self) -> None:
        groups = self.update.groups if self.update else ()
        for group, tensor in self.lrs.items():
            lr = groups[group]["lr"]
            if isinstance(lr, torch.Tensor):
                tensor.copy_(lr)
                self.lr_values.pop(group, None)
            elif self.lr_values.get(group) != lr:
                tensor.fill_(lr)
                self.lr_values[group] = lr
