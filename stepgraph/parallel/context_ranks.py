"""The ranks of ``cp``, and which tokens each has."""

from typing import Any

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.capture.roles import declare
from stepgraph.models.documents import computed_in
from stepgraph.parallel.mesh import Mesh


class AllGather(torch.autograd.Function):
    """``x`` of each rank of ``group``, one after the other along dimension 0; the gradient is this rank's part of the
    sum of the ranks'. ``kind``, ``axis``: of the collectives' role."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, kind: str, axis: str) -> torch.Tensor:
        ctx.group, ctx.role = group, (kind, axis)
        whole = compat.all_gather(x, group)
        declare(whole, kind, axis)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        part = compat.reduce_scatter(grad.contiguous(), ctx.group)
        declare(part, *ctx.role)
        return part, None, None, None


class ContextRanks:
    """Ranks that share sequences, over ``mesh``. ``chunks``: pieces of a sequence that each rank has."""

    chunks = 1

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, mesh.spec.cp

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks themselves."""
        return self.mesh.context_group

    def places(self, place: torch.Tensor) -> torch.Tensor:
        """(chunks,) int64: the pieces that rank ``place``, a scalar, has."""
        return place.view(1)

    def cast(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        """``xs`` in the dtype that attention computes in under autocast, which so travels."""
        return [x.to(computed_in(x.dtype, x.device)) for x in xs]

    def parts(self, length: int) -> int:
        """How many pieces a sequence has. ``ValueError`` for a ``length`` that they do not divide."""
        parts = self.ranks * self.chunks
        if length % parts:
            form = "" if self.chunks == 1 else f" of context=gather, which cuts sequences into {parts} parts,"
            raise ValueError(
                f"cp={self.ranks}{form} does not divide the sequence length {length}; "
                f"try {length // parts * parts or parts}"
            )
        return parts

    def part(self, x: torch.Tensor, place: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The part of rank ``place`` of ``x`` along ``dim``, its pieces in order."""
        pieces = x.unflatten(dim, (self.parts(x.shape[dim]), -1)).index_select(dim, self.places(place))
        return pieces.flatten(dim, dim + 1)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T / P, ...), the part of each rank -> (B, T, ...) on all, in the order of the tokens; backward sums."""
        came = AllGather.apply(x.contiguous(), self.group, "activation", "cp").unflatten(0, (self.ranks, -1))
        early, *late = came.chunk(self.chunks, 2)  # (P, B, a piece, ...)
        return torch.cat((early, *(pieces.flip(0) for pieces in late))).transpose(0, 1).flatten(1, 2)

    def __deepcopy__(self, memo: dict) -> "ContextRanks":
        return self
