"""The target of a node that launches the model's own Triton kernel."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from stepgraph import compat


class Place(NamedTuple):
    """Stands among a launch's arguments for one of the node's tensors."""

    index: int


class Launch:
    """A launch of ``kernel`` on ``grid`` as the model wrote it, without its tensors, which the node gives it in order.

    ``kernel``: with the decorators that the model calls it through: tuning and heuristics happen at the launch, as in
    eager. ``args``, ``kwargs``: its arguments, with a `Place` for each tensor. ``tensors``: what the trace has seen of
    these. ``writes``: which of them the kernel writes.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        writes: Sequence[int],
    ):
        self.kernel, self.grid = kernel, grid
        self.args, self.kwargs = list(args), dict(kwargs)
        self.forms = [_form(tensor) for tensor in tensors]
        self.writes = tuple(writes)
        self.__name__ = compat.triton_kernel_name(kernel)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch the kernel; nothing for fake tensors, since it gives no result.

        Raises ``RuntimeError`` if a tensor lies in memory otherwise than traced: its strides are numbers among the
        arguments.
        """
        if any(map(compat.is_fake, tensors)):
            return
        for i, (tensor, traced) in enumerate(zip(tensors, self.forms, strict=True)):
            if _form(tensor) != traced:
                raise RuntimeError(
                    f"tensor {i} of the launch of {self.__name__} is {_form(tensor)}, traced was {traced} "
                    "(dtype, shape, strides); leave out the pass inductor"
                )

        def fill(value: Any) -> Any:
            return tensors[value.index] if isinstance(value, Place) else value

        args, kwargs = compat.pytree.tree_map(fill, (self.args, self.kwargs), is_leaf=_is_place)
        self.kernel.run(*args, grid=self.grid, warmup=False, **kwargs)

    def __str__(self) -> str:
        return f"triton.{self.__name__}"

    @property
    def tunes(self) -> bool:
        """Whether the first launch measures several forms of the kernel."""
        return compat.triton_kernel_tunes(self.kernel)


def _is_place(value: Any) -> bool:
    return isinstance(value, Place)


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    strides = tuple(s if size > 1 else 0 for size, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.dtype, tuple(tensor.shape), strides


def traced_launch(
    kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Launch, list[torch.Tensor]]:
    """(the launch, its tensors in order) of a model's ``kernel[grid](*args, **kwargs)``."""
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> Place:
        tensors.append(tensor)
        return Place(len(tensors) - 1)

    held = compat.pytree.tree_map_only(torch.Tensor, take, (list(args), dict(kwargs)))
    written = compat.triton_writes(kernel, args, kwargs)
    writes = [i for i, tensor in enumerate(tensors) if written is None or any(tensor is w for w in written)]
    return Launch(kernel, grid, *held, tensors, writes), tensors
