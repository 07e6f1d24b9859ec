"""Where a parameter lies on the mesh: which part of it this rank keeps, and how large its local tensor is.

A parameter is split along dimensions over axes of the mesh, one split after the other, each of the previous one's
left: tensor parallelism splits one dimension evenly, FSDP then dimension 0 (see `fsdp_dim` for the exceptions).
Shards are equal: where rows do not divide, every rank's shard has the size of the largest and the rows beyond the end
are zeros that nothing reads. All ranks then have tensors, graphs and collectives of one shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from stepgraph.parallel.mesh import Axes
from stepgraph.parallel.pipeline.layout import Pipeline

#: Padding, as a share of a dimension, from which on FSDP splits another one.
_MUCH_PADDING = 0.125


def fsdp_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension of ``shape`` that FSDP splits over ``ranks``: 0, whose shards lie in one piece, or 1 where that
    spares much padding, as for weights of fewer experts than ranks."""
    if len(shape) < 2:
        return 0
    first, second = (-(-size // ranks) * ranks / size - 1 for size in shape[:2])
    return int(first > _MUCH_PADDING and second < first)


def split_sizes(
    shape: Sequence[int], splits: Sequence[tuple[str, int]], sizes: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """The size of each dimension of a rank's part, padding included: at first, and after each split."""
    found = [tuple(shape)]
    for axis, dim in splits:
        left = list(found[-1])
        left[dim] = -(-left[dim] // sizes[axis])
        found.append(tuple(left))
    return found


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of one parameter.

    ``shape``: of the whole parameter. ``splits``: (axis of the mesh, dimension) of each split, in order. Ranks of an
    axis that splits nothing hold the same, and see part of its gradient. ``param_dtype``: its dtype in use.
    ``reduce_dtype``: that of its gradient while it is reduced. ``pipeline``: the stages of the model that it is of, if
    it has stages.
    """

    shape: torch.Size
    mesh: Axes
    splits: tuple[tuple[str, int], ...]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    pipeline: Pipeline | None = None

    @cached_property
    def sharded(self) -> bool:
        """Whether FSDP splits it; a scalar stays whole."""
        return self.mesh.shard in dict(self.splits)

    @property
    def shard_dim(self) -> int:
        """The dimension that FSDP splits."""
        return dict(self.splits)[self.mesh.shard]

    @cached_property
    def _sizes(self) -> list[tuple[int, ...]]:
        return split_sizes(self.shape, self.splits, self.mesh.sizes)

    @cached_property
    def rows(self) -> int:
        """Size of the gathered parameter in `shard_dim`: what other axes than FSDP's leave to this rank."""
        return self._sizes[[axis for axis, _ in self.splits].index(self.mesh.shard)][self.shard_dim]

    @cached_property
    def region(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) in each dimension of the part of the whole parameter that this rank keeps, padding left out."""
        part = [(0, size) for size in self.shape]
        for (axis, dim), sizes in zip(self.splits, self._sizes[1:], strict=True):
            start, stop = part[dim]
            first = min(start + self.mesh.place(axis) * sizes[dim], stop)
            part[dim] = (first, min(first + sizes[dim], stop))
        return tuple(part)

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's tensor, padding included: the same on every rank."""
        return torch.Size(self._sizes[-1])

    @cached_property
    def _stored_shape(self) -> torch.Size:
        """Shape of all ranks' tensors together, padding included."""
        size = list(self.local_shape)
        for axis, dim in self.splits:
            size[dim] *= self.mesh.sizes[axis]
        return torch.Size(size)

    @property
    def padded(self) -> bool:
        """Whether shards hold rows beyond the parameter's end."""
        return self._stored_shape != self.shape

    def at_rest(self) -> tuple[Placement, ...]:
        """Placements of the stored parameter, its gradient and its optimizer state."""
        return self._placements(lambda axis: Replicate())

    def unreduced(self) -> tuple[Placement, ...]:
        """Placements of the gradient after FSDP's reduce-scatter: what is left is to reduce it over the ranks that
        hold the same shard."""
        alone = self.mesh.devices.size() == 1  # in a pipeline without another axis there is nothing to reduce
        averaged = self.mesh.averaged
        return self._placements(lambda axis: Replicate() if alone else Partial("avg" if axis in averaged else "sum"))

    def _placements(self, unsplit: Callable[[str], Placement]) -> tuple[Placement, ...]:
        dims = dict(self.splits)
        return self.mesh.placements(lambda axis: Shard(dims[axis]) if axis in dims else unsplit(axis))

    def store(self, local: torch.Tensor) -> DTensor:
        """This rank's tensor (``local_shape``) as a DTensor of the whole, padding included."""
        return self._wrap(local, self._stored_shape)

    def part(self, whole: torch.Tensor, device: torch.device | str) -> DTensor:
        """This rank's part of ``whole``, a plain tensor that every rank has, as `store` wraps it, on ``device``."""
        local = torch.zeros(self.local_shape, dtype=whole.dtype, device=device)
        self.own(local).copy_(self.cut(whole))
        return self.store(local)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The region of ``whole``, a plain tensor of the parameter's shape, that this rank keeps."""
        return whole[tuple(slice(start, stop) for start, stop in self.region)]

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
        """The part of this rank's tensor that is not padding: what ``region`` describes."""
        return local[tuple(slice(stop - start) for start, stop in self.region)] if self.padded else local
