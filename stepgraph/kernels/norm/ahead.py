"""Launches of norms recorded instead of made, see `stepgraph.kernels.ahead`."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from stepgraph import compat


@contextlib.contextmanager
def recorded_norms(record: Callable[[compat.TritonSource], None]) -> Iterator[None]:
    """Inside, calls of the CUDA backend on fake tensors launch nothing; ``record`` gets the kernels that they would
    compile. Their plans and memory are not kept."""
    from stepgraph.kernels.norm import planned
    from stepgraph.kernels.norm.triton import launch, plans

    def recorded(self: launch.Launch, stream: int | None, *tensors: torch.Tensor | None) -> None:
        unaligned = tuple(i for i, t in enumerate(tensors) if t is not None and compat.misalignment(t))
        record(self.source(tensors, unaligned))

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")

    def words(device: torch.device, stream: int | None, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, device=device)

    with (
        compat.replaced(launch.Launch, first=recorded),
        compat.replaced(plans, _empty=empty, zeros=words),
        compat.replaced(planned, PLANS={}),
    ):
        yield
