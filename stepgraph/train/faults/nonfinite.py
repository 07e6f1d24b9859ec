"""Handles losses and gradient norms that are not finite: they end the run, or their steps are skipped and counted."""

import contextlib
import math
from pathlib import Path

import torch

from stepgraph.config.train import TrainConfig
from stepgraph.parallel.ranks import Ranks
from stepgraph.train.checkpoint.found import checkpoints, step_of


class NotFiniteError(RuntimeError):
    """A loss or a gradient norm is not finite."""


class Finite:
    """Holds a run to finite losses and norms. ``skipped``: steps that this process has left out."""

    def __init__(self, config: TrainConfig, folder: Path, ranks: Ranks):
        self.config, self.folder, self.ranks = config, folder, ranks
        self.skipped = self.in_a_row = 0

    def accepts(self, step: int, loss: float, grad_norm: float, batch: dict[str, torch.Tensor]) -> bool:
        """Whether the step counts; False if it was left out. Raises `NotFiniteError` where the run is to end, and keeps
        the batch."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        skips = self.config.on_nonfinite == "skip"
        self.skipped, self.in_a_row = self.skipped + skips, self.in_a_row + skips
        if skips and self.in_a_row < self.config.max_skipped:
            return False
        row = f" ({self.in_a_row} consecutive steps left out)" if skips else ""
        updated = step > max(1, self.in_a_row)
        self.require(f"the loss of step {step}{row}", loss, step, batch, updated=updated)
        self.require(f"the gradient norm of step {step}{row}", grad_norm, step, batch, updated=updated)

    def require(
        self, what: str, value: float, step: int, batch: dict[str, torch.Tensor], *, updated: bool = True
    ) -> None:
        """Raise `NotFiniteError`, and keep the batch, if ``value`` is not finite: nothing after it can be of use.

        ``updated``: whether an update came before it, whose learning rate may be to blame.
        """
        if math.isfinite(value):
            return
        rank = f"-rank-{self.ranks.rank}" if self.ranks.world > 1 else ""
        path = self.folder / f"bad-batch-step-{step}{rank}.pt"
        try:
            torch.save({k: v.cpu() for k, v in batch.items()}, path)
            kept = f"is kept in {path}"
        except (OSError, RuntimeError) as failure:  # torch has its own error for a full disk
            with contextlib.suppress(OSError):
                path.unlink()
            kept = f"could not be kept ({' '.join(str(failure).split())[:100]})"
        raise NotFiniteError(f"{what} is {value}; its batch {kept}; {self._advice(step, updated)}")

    def _advice(self, step: int, updated: bool) -> str:
        if not updated:
            there = self.config.init_from_hf
            return (
                f"no update came before it: look at {f'the weights in {there}' if there else 'the model'}, or the batch"
            )
        return f"{self._again(step)} with a lower --lr"

    def _again(self, step: int) -> str:
        """How to continue: from the newest checkpoint whose weights gave a finite loss in a later step. Skipped steps
        gave none and changed no weights."""
        step -= max(0, self.in_a_row - 1)
        saved = {step_of(path): path for path in checkpoints(self.folder / "checkpoints") if not path.suffix}
        sound = [at for at in saved if at < step - 1]
        return f"--resume {saved[max(sound)]}" if sound else "start again"
