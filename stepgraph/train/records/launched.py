"""A step under way, and its numbers on their way to the host."""

from dataclasses import dataclass

import torch

from stepgraph.run.spans import Waits


class Figures:
    """Numbers of a step, on their way to the host: a copy that begins when they are there. To read the tensors of a GPU
    themselves would wait for the next step too, which is launched by then."""

    def __init__(self, *figures: torch.Tensor):
        self._host = [figure.detach().to("cpu", non_blocking=True) for figure in figures]
        self._there = torch.cuda.Event() if any(figure.is_cuda for figure in figures) else None
        if self._there:
            self._there.record()

    def read(self) -> list[float]:
        """The numbers; waits until they are there."""
        if self._there:
            self._there.synchronize()
        return [figure.item() for figure in self._host]


@dataclass
class Launched:
    """A step that was launched; its loss and metrics may still be on their way."""

    step: int
    tokens: int  # seen so far
    figures: Figures  # the loss and the gradient norm
    metrics: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    lr: float
    data_ms: float  # that the loop waited for the batch
    waits: Waits  # for other stages of a pipeline
