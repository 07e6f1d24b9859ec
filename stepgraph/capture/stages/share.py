"""What one rank of a pipeline has of a step, so that capture leaves the rest out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.capture.gradients import AllStages
from stepgraph.capture.state import Slot


@dataclass(frozen=True)
class Share:
    """A rank's share of a model whose stages other ranks have too.

    ``holders``: for each parameter, by name, the ranks of the pipeline that hold it; the first counts its norm.
    ``rank``: this one. ``group``: the ranks of the pipeline. ``tied``: the group of each set of several holders.
    """

    holders: Mapping[str, tuple[int, ...]]
    rank: int
    group: dist.ProcessGroup
    tied: Mapping[tuple[int, ...], dist.ProcessGroup]

    def holds(self, name: str) -> bool:
        """Whether this rank holds the parameter ``name``, and updates it."""
        return self.rank in self.holders[name]

    def whole(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of ``name``, of which ``grad`` is what this rank's stages give: summed over its holders."""
        holders = self.holders[name]
        return compat.all_reduce(grad, "sum", self.tied[holders]) if len(holders) > 1 else grad

    def all_stages(self, slots: Sequence[Slot], reached: Sequence[int]) -> AllStages:
        """``reached``: the model's ``slots`` that have gradients on any rank."""
        counted = [i if self.holders[slots[i].name][0] == self.rank else None for i in reached]
        return AllStages([slots[i].tensor for i in reached], counted, self.group)
