"""A step in progress, and its metrics on their way to the host."""

from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.run.spans import Spans


class Figures:
    """Numbers of a step, on their way to the host: a copy that begins when they are there. To read the tensors of a GPU
    themselves would wait for the next step too, which is launched by then."""

    def __init__(self, *figures: torch.Tensor):
        self._host = [figure.detach().to("cpu", non_blocking=True) for figure in figures]
        self._there = torch.cuda.Event(enable_timing=True) if any(figure.is_cuda for figure in figures) else None
        if self._there:
            self._there.record()

    def read(self) -> list[Any]:
        """The numbers, as lists where they are vectors; waits until they are there."""
        if self._there:
            self._there.synchronize()
        return [figure.tolist() for figure in self._host]

    def ms_since(self, before: "Figures | None") -> float | None:
        """Milliseconds on the GPU from the numbers ``before`` to these, both there; None without a GPU or ``before``.

        The host reads the numbers of one step while it launches the next, so the time between two reads is not that of
        a step."""
        if self._there is None or before is None or before._there is None:
            return None
        return before._there.elapsed_time(self._there)


@dataclass
class Launched:
    """A step that was launched; its loss and metrics may still be on their way."""

    step: int
    tokens: int  # seen so far
    figures: Figures  # the loss, the gradient norm and, of layers with experts, their loads
    metrics: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    lr: float
    data_ms: float  # that the loop waited for the batch
    spans: Spans | None  # what this rank of a pipeline computes, and when
