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
        self._repairs = lowered.repairs
        self._run = ProgramRunner(lowered.program, Session(), Accumulators())

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss on ``batch``, a scalar, on every rank."""
        results = self._run(flatten_batch(batch)[0])
        while unfit := self._unfit(results):
            for name, level in unfit.items():
                self._repairs[name](level)
            self._capture(batch)
            results = self._run(flatten_batch(batch)[0])
        return results.loss

    def _unfit(self, results: Results) -> dict[str, float]:
        """The levels of conditions that were above 1 on any rank, alike on all."""
        if not self._repairs:
            return {}
        nothing = torch.zeros((), dtype=torch.float64, device=results.loss.device)
        levels = torch.stack([results.levels.get(name, nothing) for name in self._repairs])
        dist.all_reduce(levels, dist.ReduceOp.MAX)
        return {name: level for name, level in zip(self._repairs, levels.tolist(), strict=True) if level > 1}
