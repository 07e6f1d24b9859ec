"""What `Update` asks of each kind of optimizer: its constants, its state, and one update as graph nodes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from stepgraph.capture.optimizer.skip import Skip


@dataclass(frozen=True)
class Member:
    """One parameter of an update, as the trace sees it.

    ``param``, ``grad``, ``state``: local tensors; state by key. ``seen``: steps that the parameter has seen, where the
    host counts them. ``path``: its module.
    """

    param: torch.Tensor
    grad: torch.Tensor
    state: dict[str, torch.Tensor]
    seen: float
    path: str


def count_dtype() -> torch.dtype:
    """The dtype in which torch's optimizers count steps on the host."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


class Rule(ABC):
    """One kind of optimizer. ``constants``: options of a group that the graph has as constants. ``flags``: options
    that must be off. ``complex``: whether parameters may be complex. ``shards``: whether a shard's update needs no
    other."""

    constants: ClassVar[tuple[str, ...]] = ()
    flags: ClassVar[tuple[str, ...]] = ()
    complex: ClassVar[bool] = True
    shards: ClassVar[bool] = True

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the formula holds for these options; the optimizer's own ``step`` is traced for others."""
        return not any(
            any(group[flag] for flag in self.flags)
            or (isinstance(group["lr"], torch.Tensor) and not group.get("fused"))
            for group in optimizer.param_groups
        )

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for options and parameters that cannot be captured."""
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._check_param(name, group, param)

    def _check_param(self, name: str, group: dict[str, Any], param: torch.Tensor) -> None:
        shape = list(param.shape)
        if param.is_complex() and (not self.complex or group.get("fused")):
            option = "(fused=True)" if group.get("fused") else ""
            fix = "use fused=False" if option and self.complex else "give it to AdamW, Adam or SGD without fused=True"
            raise ValueError(f"{name}{option} takes no complex parameters, and one of shape {shape} is complex; {fix}")
        placements = enumerate(getattr(param, "placements", ()))
        if not self.shards and any(p.is_shard() and param.device_mesh.size(axis) > 1 for axis, p in placements):
            raise ValueError(
                f"{name} needs whole matrices, and a parameter of shape {shape} is sharded; use AdamW, Adam or SGD"
            )

    def constants_of(self, group: dict[str, Any]) -> tuple:
        """The options that are constants of the graph: when one changes, the step is captured again."""
        return tuple(group.get(key) for key in self.constants)

    @abstractmethod
    def init_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The tensors of the state that the graph reads and writes, by key; created as in eager's first step."""

    @abstractmethod
    def trace(
        self,
        group: dict[str, Any],
        members: Sequence[Member],
        lr: torch.Tensor,
        attribute: Callable[[str], None],
        skip: Skip,
    ) -> None:
        """Record the update of one group; each result is written into its input, unless ``skip`` leaves it out.

        ``attribute`` is called with the module path of what is recorded next.
        """
