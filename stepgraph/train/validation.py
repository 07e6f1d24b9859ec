"""The validation loss of a run: eager, or through the stages of a pipeline."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from stepgraph.capture.trace import LossFn
from stepgraph.parallel import pipeline_of
from stepgraph.run import PipelinedLoss

Batch = dict[str, torch.Tensor]


class Validation:
    """The losses of ``model`` on fixed ``batches``, in evaluation mode and without gradients."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, batches: Sequence[Batch], device: torch.device):
        self.model, self.loss_fn, self.batches, self.device = model, loss_fn, batches, device
        self._pipelined: PipelinedLoss | None = None

    @torch.no_grad()
    def losses(self) -> Iterator[tuple[float, Batch]]:
        """Each batch's loss, and the batch. All ranks of a pipeline ask together."""
        self.model.eval()
        for batch in self.batches:
            yield self._loss({k: v.to(self.device) for k, v in batch.items()}).item(), batch
        self.model.train()

    def _loss(self, batch: Batch) -> torch.Tensor:
        if pipeline_of(self.model) is None:
            return self.loss_fn(self.model, batch)
        if self._pipelined is None:
            self._pipelined = PipelinedLoss(self.model, self.loss_fn, batch)
        return self._pipelined(batch)
