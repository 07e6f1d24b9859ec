"""Where a parameter lies on the mesh: which part of it this rank keeps, and how large its local tensor is.

Tensor parallelism splits one dimension evenly. FSDP splits dimension 0 of what is left, in equal shards: where the
rows do not divide, every rank's shard has the size of the largest and the rows beyond the end are zeros that nothing
reads. All ranks then have tensors, graphs and collectives of one shape.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from stepgraph.parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of one parameter.

    ``shape``: of the whole parameter. ``tp_dim``: the dimension that tensor parallelism splits; None: every rank of
    ``tp`` has all of it and sees part of its gradient. ``param_dtype``: its dtype in use. ``reduce_dtype``: that of
    its gradient while it is reduced.
    """

    shape: torch.Size
    mesh: Mesh
    tp_dim: int | None
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def sharded(self) -> bool:
        """Whether FSDP splits it; a scalar stays whole."""
        return len(self.shape) > 0 and self.mesh.axis("dp_shard") is not None

    @cached_property
    def _tp_part(self) -> list[tuple[int, int]]:
        """(start, stop) in each dimension of what tensor parallelism leaves to this rank."""
        part = [(0, size) for size in self.shape]
        if self.tp_dim is not None:
            size = self.shape[self.tp_dim] // self.mesh.spec.tp
            start = self.mesh.place("tp") * size
            part[self.tp_dim] = (start, start + size)
        return part

    @cached_property
    def rows(self) -> int:
        """Rows (dimension 0) that tensor parallelism leaves to this rank: those of the gathered parameter."""
        start, stop = self._tp_part[0]
        return stop - start

    @cached_property
    def _shard_rows(self) -> int:
        return -(-self.rows // self.mesh.spec.dp_shard)

    @cached_property
    def region(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) in each dimension of the part of the whole parameter that this rank keeps, padding left out."""
        part = list(self._tp_part)
        if self.sharded:
            start, stop = part[0]
            first = min(start + self.mesh.place("dp_shard") * self._shard_rows, stop)
            part[0] = (first, min(first + self._shard_rows, stop))
        return tuple(part)

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's tensor, padding included: the same on every rank."""
        sizes = [stop - start for start, stop in self._tp_part]
        return torch.Size([self._shard_rows, *sizes[1:]] if self.sharded else sizes)

    @property
    def padded(self) -> bool:
        """Whether shards hold rows beyond the parameter's end."""
        return self.sharded and self.rows % self.mesh.spec.dp_shard != 0

    def at_rest(self) -> tuple[Placement, ...]:
        """Placements of the stored parameter, its gradient and its optimizer state."""
        tp = Replicate() if self.tp_dim is None else Shard(self.tp_dim)
        return self.mesh.placements(tp=tp, dp_shard=Shard(0) if self.sharded else Replicate(), dp_replicate=Replicate())

    def unreduced(self) -> tuple[Placement, ...]:
        """Placements of the gradient after FSDP's reduce-scatter: what is left is to reduce it over the ranks that
        hold the same shard."""
        tp = Partial("sum") if self.tp_dim is None else Shard(self.tp_dim)
        return self.mesh.placements(
            tp=tp, dp_shard=Shard(0) if self.sharded else Partial("avg"), dp_replicate=Partial("avg")
        )

    def store(self, local: torch.Tensor) -> DTensor:
        """This rank's tensor (``local_shape``) as a DTensor of the whole, padding included."""
        size = list(self.local_shape)
        if self.sharded:
            size[0] *= self.mesh.spec.dp_shard
        if self.tp_dim is not None:
            size[self.tp_dim] *= self.mesh.spec.tp
        return self._wrap(local, torch.Size(size))

    def without_padding(self, stored: DTensor) -> DTensor:
        """``stored`` (the parameter, or a tensor laid out like it) as a DTensor of its true shape, over its memory."""
        return self._wrap(self.own(stored.to_local()), self.shape) if self.padded else stored

    def whole(self, stored: DTensor) -> torch.Tensor:
        """``stored`` whole in the dtype that it is used in, on every rank of the mesh, all of which must call."""
        return self.without_padding(stored.detach().to(self.param_dtype)).full_tensor()

    def _wrap(self, local: torch.Tensor, size: torch.Size) -> DTensor:
        stride = torch.empty(size, device="meta").stride()
        placements = self.at_rest()
        return DTensor.from_local(local, self.mesh.devices, placements, run_check=False, shape=size, stride=stride)

    def own(self, local: torch.Tensor) -> torch.Tensor:
        """The part of this rank's tensor that is not padding: what ``region`` tells of."""
        return local[: self.region[0][1] - self.region[0][0]] if self.padded else local
