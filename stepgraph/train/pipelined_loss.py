"""Validation through a pipeline: forward and loss of every stage, one after the other, without gradients."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepgraph.capture import flatten_batch
from stepgraph.capture.trace import LossFn
from stepgraph.kernels.comm.exchange import Session
from stepgraph.lower import StepSpec, lower
from stepgraph.parallel import placement_of
from stepgraph.run.program import Accumulators, ProgramRunner
from stepgraph.run.results import Results


class PipelinedLoss:
    """``loss = pipelined(batch)`` of a model whose stages are on several ranks, all of which call it.

    The model is captured as it is now (``eval()`` or not); its parameters are read where they lie. Batches have the
    form of ``batch``. Where experts of any rank need larger buffers, all ranks capture it again with these. Raises as
    `stepgraph.capture` does.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, batch: Any):
        # Its operators as captured: no pass has run on it.
        self._spec = StepSpec(model, loss_fn, None, placement=placement_of(model), passes=(), backward=False)
        self._capture(batch)

    def _capture(self, batch: Any) -> None:
        lowered = lower(replace(self._spec, batch=batch))
        self._grow = lowered.grow
        self._run = ProgramRunner(lowered.program, Session(), Accumulators())

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss on ``batch``, a scalar, on every rank."""
        results = self._run(flatten_batch(batch)[0])
        while exceeded := self._exceeded(results):
            for name, ratio in exceeded.items():
                self._grow[name](ratio)
            self._capture(batch)
            results = self._run(flatten_batch(batch)[0])
        return results.loss

    def _exceeded(self, results: Results) -> dict[str, float]:
        """The conditions that any rank exceeded and their ratios, the same on all ranks."""
        if not self._grow:
            return {}
        nothing = torch.zeros((), dtype=torch.float64, device=results.loss.device)
        ratios = torch.stack([results.ratios.get(name, nothing) for name in self._grow])
        dist.all_reduce(ratios, dist.ReduceOp.MAX)
        return {name: ratio for name, ratio in zip(self._grow, ratios.tolist(), strict=True) if ratio > 1}
