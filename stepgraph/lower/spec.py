"""`StepSpec`: all that a training step is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepgraph.capture.optimizer.update import Optimizers
from stepgraph.capture.step_trace import LossFn
from stepgraph.parallel.pipeline import Pipeline
from stepgraph.parallel.placement import Placement
from stepgraph.passes import Passes, Target, resolve


@dataclass(frozen=True, eq=False)
class StepSpec:
    """A training step: what `stepgraph.capture` is given, with defaults resolved, and where the model is placed.

    ``batch``: an example of the whole batch, which ``accumulate`` microbatches share. ``skip_nonfinite``: leave the
    update out where loss or gradient norm is not finite. ``placement``: as `parallelize` made it; None for a plain
    model. ``passes``, ``disable``: the passes that rewrite the graphs. ``backward``: False for forward and loss alone,
    without gradients or an update. ``replays``: Python in ``loss_fn`` that reads values to store them runs again after
    each step. ``ones``: places in the batch of attention masks that hide nothing, see `masks_of_ones`.
    """

    model: nn.Module
    loss_fn: LossFn
    batch: Any
    optimizer: Optimizers | None = None
    max_grad_norm: float | None = None
    accumulate: int = 1
    skip_nonfinite: bool = False
    placement: Placement | None = None
    passes: Passes = "default"
    disable: tuple[str, ...] = ()
    backward: bool = True
    replays: bool = False
    ones: tuple[int, ...] = ()

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages of the model; None where each rank runs the whole model."""
        return None if self.placement is None else self.placement.pipeline

    @property
    def is_exact(self) -> bool:
        """Whether every pass keeps the bits of eager."""
        return all(p.tier == "exact" for p in resolve(self.passes, self.disable, Target(self.device.type)))

    @property
    def device(self) -> torch.device:
        """Where the model is: the device of its first tensor that is not on the meta device."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return next((t.device for t in [*(t for t in tensors if not t.is_meta), *tensors]), torch.device("cpu"))
