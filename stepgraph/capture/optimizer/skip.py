"""Lets a condition skip the writes of an update, so that what they would change keeps every bit."""

from typing import Any

import torch


class Skip:
    """Whether a step's update is left out. ``flag``: a bool scalar that the graph computes; None: it never is.

    A flag that a count on the host needs (``step`` of optimizers without a fused kernel) is copied there, for which the
    host waits.
    """

    def __init__(self, flag: torch.Tensor | None = None):
        self.flag = flag
        self._made: dict[Any, torch.Tensor] = {}

    def write(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Write ``new`` into ``old``, unless the update is left out."""
        old.copy_(self.kept(old, new))

    def kept(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What is to be written into ``old``: ``new``, or itself; in the dtype that both promote to."""
        return new if self.flag is None else torch.where(self._on(old.device), old, new)

    def found_inf(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The argument that makes torch's fused kernels write nothing where it is 1; none where they always write."""
        return {} if self.flag is None else {"found_inf": self._on(device, torch.float32)}

    def advance(self, device: torch.device) -> torch.Tensor | None:
        """What a count of steps grows by, fp32: 0 or 1. None: always 1."""
        if self.flag is None:
            return None
        key = device, "advance"
        if key not in self._made:
            self._made[key] = 1 - self._on(device, torch.float32)
        return self._made[key]

    def _on(self, device: torch.device, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        key = device, dtype
        if key not in self._made:
            self._made[key] = self.flag.to(device, dtype)
        return self._made[key]
