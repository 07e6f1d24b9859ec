"""The mesh of a run: ``--mesh fsdp=4,tp=2`` to ranks, process groups and their slices."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stepgraph.errors import unknown_name

_AXES = ("fsdp", "hsdp", "ddp", "tp")


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of a mesh. ``dp_replicate``: data-parallel ranks that hold the same shards (DDP, the outer axis of HSDP);
    ``dp_shard``: ranks that shard parameters, gradients and optimizer state (FSDP); ``tp``: tensor-parallel ranks.

    Ranks count ``tp`` fastest and ``dp_replicate`` slowest, so that tensor parallelism stays among neighbours.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """``fsdp=N``, ``ddp=N`` or ``hsdp=REPLICASxSHARDS``, and ``tp=N``, joined by commas; ``ValueError`` else."""
        sizes: dict[str, tuple[int, ...]] = {}
        for part in text.split(","):
            axis, _, value = part.strip().partition("=")
            if axis not in _AXES:
                raise unknown_name("mesh axis", axis, _AXES)
            if axis in sizes:
                raise ValueError(f"mesh {text!r} names {axis} twice; name it once")
            form = r"[1-9]\d*x[1-9]\d*" if axis == "hsdp" else r"[1-9]\d*"
            if not re.fullmatch(form, value):
                example = "hsdp=2x4 (replicas x shards)" if axis == "hsdp" else f"{axis}=2"
                raise ValueError(f"mesh {text!r}: {part.strip()!r} has no size above 0; write it as in {example}")
            sizes[axis] = tuple(map(int, value.split("x")))
        if len(sizes.keys() & {"fsdp", "ddp", "hsdp"}) > 1:
            replicas, shards = sizes.get("ddp", (2,))[0], sizes.get("fsdp", (4,))[0]
            raise ValueError(
                f"mesh {text!r} has two data-parallel axes; shards with replicas are hsdp={replicas}x{shards}"
            )
        replicate, shard = sizes.get("hsdp", (sizes.get("ddp", (1,))[0], sizes.get("fsdp", (1,))[0]))
        return cls(replicate, shard, sizes.get("tp", (1,))[0])

    def __str__(self) -> str:
        return ",".join([self._dp_text(self.dp_shard), *([f"tp={self.tp}"] if self.tp > 1 else [])])

    def _dp_text(self, shards: int) -> str:
        if self.dp_replicate == 1:
            return f"fsdp={shards}"
        return f"ddp={self.dp_replicate}" if self.dp_shard == 1 else f"hsdp={self.dp_replicate}x{shards}"

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read data of their own."""
        return self.dp_replicate * self.dp_shard

    def check_world(self, world: int) -> None:
        """``ValueError`` unless the mesh has ``world`` ranks, with the nearest mesh that has."""
        if self.size == world:
            return
        near = _nearest(self, world)
        raise ValueError(
            f"mesh {self} has {self.size} ranks and there {'are' if world > 1 else 'is'} {world} "
            f"process{'es' * (world > 1)}: try --mesh {near}, or start {self.size}"
        )

    def check_divides(self, sizes: dict[str, int]) -> None:
        """``ValueError`` unless ``tp`` divides every one of ``sizes`` (name -> size), with values that do."""
        for name, size in sizes.items():
            if size % self.tp:
                fits = [n for n in range(1, size + 1) if all(other % n == 0 for other in sizes.values())]
                below = [n for n in fits if n < self.tp][-1]
                above = [n for n in fits if n > self.tp][:1]
                fix = " or ".join(f"tp={n}" for n in (below, *above))
                raise ValueError(f"tp={self.tp} does not divide {name}={size}; try {fix}")


def _nearest(spec: MeshSpec, world: int) -> MeshSpec:
    """A mesh of ``world`` ranks as near to ``spec`` as can be: ``tp`` kept or made a divisor, then the replicas."""
    tp = max(n for n in range(1, min(spec.tp, world) + 1) if world % n == 0)
    dp = world // tp
    if spec.dp_shard == 1 and spec.dp_replicate > 1:
        return MeshSpec(dp, 1, tp)
    replicate = max(n for n in range(1, min(spec.dp_replicate, dp) + 1) if dp % n == 0)
    return MeshSpec(replicate, dp // replicate, tp)


class Mesh:
    """A mesh with its process groups: built on every rank, in the same order, under an initialized process group.

    ``spec``: its sizes. ``devices``: the ``DeviceMesh`` of the axes above 1 (at least one), in the order ``tp``,
    ``dp_shard``, ``dp_replicate``: where both ``tp`` and ``dp_shard`` split a dimension, FSDP then splits what tensor
    parallelism left, and a gather over ``dp_shard`` is contiguous.
    """

    def __init__(self, spec: MeshSpec, device_type: str):
        spec.check_world(dist.get_world_size())
        self.spec = spec
        sizes = {"tp": spec.tp, "dp_shard": spec.dp_shard, "dp_replicate": spec.dp_replicate}
        self.names = tuple(name for name, size in sizes.items() if size > 1) or ("dp_shard",)
        ranks = torch.arange(spec.size).view(spec.dp_replicate, spec.dp_shard, spec.tp).permute(2, 1, 0)
        ranks = ranks.reshape([sizes[name] for name in self.names])
        self.devices = DeviceMesh(device_type, ranks, mesh_dim_names=self.names)
        # Slices are made here, once: torch 2.11 cannot make them during a trace.
        single = len(self.names) == 1
        self._slices = {name: self.devices if single else self.devices[name] for name in self.names}
        coordinate = self.devices.get_coordinate()
        self._coordinate = dict(zip(self.names, coordinate, strict=True))

    def axis(self, name: str) -> DeviceMesh | None:
        """The one-dimensional mesh of this rank's peers along ``name``; None where the mesh lacks it."""
        return self._slices.get(name)

    def place(self, name: str) -> int:
        """This rank's place along ``name``; 0 where the mesh lacks it."""
        return self._coordinate.get(name, 0)

    @property
    def dp_place(self) -> int:
        """This rank's place among the ``spec.dp`` ranks that read data of their own."""
        return self.place("dp_replicate") * self.spec.dp_shard + self.place("dp_shard")

    def __deepcopy__(self, memo: dict) -> "Mesh":
        return self  # process groups belong to the process, whatever copies of a model there are

    def placements(self, **by_axis: object) -> Sequence[object]:
        """``by_axis`` in the order of the mesh's axes, those it lacks left out."""
        return tuple(by_axis[name] for name in self.names)
