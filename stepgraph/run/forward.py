"""Validation through a pipeline: forward and loss of every stage, one after the other, without gradients."""

from typing import Any

import torch
from torch import nn

from stepgraph.capture import flatten_batch
from stepgraph.capture.stages.forward import trace_forward
from stepgraph.capture.trace import LossFn
from stepgraph.kernels.comm.exchange import Session
from stepgraph.parallel.pipeline import StageGraphs, pipeline_of
from stepgraph.run.program import Accumulators, ProgramRunner


class PipelinedLoss:
    """``loss = pipelined(batch)`` of a model whose stages are on several ranks, all of which call it.

    The model is captured as it is now (``eval()`` or not); its parameters are read where they lie. Batches have the
    form of ``batch``. Raises as `stepgraph.capture` does.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, batch: Any):
        step, _ = trace_forward(model, loss_fn, batch)
        program = StageGraphs(step, pipeline_of(model), 1).forward_program()
        self._run = ProgramRunner(program, Session(), Accumulators())

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss on ``batch``, a scalar, on every rank."""
        return self._run(flatten_batch(batch)[0]).loss
