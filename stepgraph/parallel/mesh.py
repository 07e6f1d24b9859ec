"""The mesh of a run: ``--mesh fsdp=4,tp=2,ep=2`` to ranks, process groups and their slices.

Experts see the same ranks as another mesh: ``ep`` of them, neighbours, share the experts among them, and what is left
of shards and tensor-parallel ranks (to experts, they too bring tokens of their own) shards each expert's weights.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from stepgraph import compat
from stepgraph.errors import unknown_name


def _axis(*, data: bool = False) -> Any:
    """An axis of the mesh; ``data``: its ranks read data of their own."""
    return field(default=1, metadata={"data": data})


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of a mesh's axes, in the order in which ranks count: the last counts fastest, so that tensor parallelism
    stays among neighbours."""

    dp_replicate: int = _axis(data=True)
    """Ranks that hold the same shards (DDP, the outer axis of HSDP)."""
    dp_shard: int = _axis(data=True)
    """Ranks that shard parameters, gradients and optimizer state (FSDP)."""
    tp: int = _axis()
    """Tensor-parallel ranks."""
    ep: int = field(default=1, metadata={"divides": True})
    """Expert-parallel ranks, among those of the axes above: no axis of its own."""

    def __post_init__(self) -> None:
        inner = self._inner
        if inner % self.ep:
            fits = [n for n in range(1, inner + 1) if inner % n == 0]
            near = [*[n for n in fits if n < self.ep][-1:], *[n for n in fits if n > self.ep][:1]]
            raise ValueError(
                f"mesh {self}: ep={self.ep} does not divide its {inner} ranks of shards and tp; try "
                + " or ".join(f"ep={n}" for n in near)
            )

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """``fsdp=N``, ``ddp=N`` or ``hsdp=REPLICASxSHARDS``, ``tp=N`` and ``ep=N``, joined by commas; ``ValueError``
        else. Without a data-parallel axis, ``ep`` comes with as many shards as it needs."""
        forms = _DATA_FORMS | {name: (name,) for name in (*MODEL_AXES, "ep")}
        found: dict[str, tuple[int, ...]] = {}
        for part in text.split(","):
            form, _, value = part.strip().partition("=")
            if form not in forms:
                raise unknown_name("mesh axis", form, forms)
            if form in found:
                raise ValueError(f"mesh {text!r} names {form} twice; name it once")
            if not re.fullmatch("x".join([r"[1-9]\d*"] * len(forms[form])), value):
                example = "hsdp=2x4 (replicas x shards)" if form == "hsdp" else f"{form}=2"
                raise ValueError(f"mesh {text!r}: {part.strip()!r} has no size above 0; write it as in {example}")
            found[form] = tuple(map(int, value.split("x")))
        if len(found.keys() & _DATA_FORMS.keys()) > 1:
            replicas, shards = found.get("ddp", (2,))[0], found.get("fsdp", (4,))[0]
            raise ValueError(
                f"mesh {text!r} has two data-parallel axes; shards with replicas are hsdp={replicas}x{shards}"
            )
        sizes = {name: n for form, given in found.items() for name, n in zip(forms[form], given, strict=True)}
        if "ep" in found and not found.keys() & _DATA_FORMS.keys():
            sizes["dp_shard"] = sizes["ep"] // math.gcd(sizes["ep"], sizes.get("tp", 1))
        return cls(**sizes)

    def __str__(self) -> str:
        form = "fsdp" if self.dp_replicate == 1 else "ddp" if self.dp_shard == 1 else "hsdp"
        data = f"{form}={'x'.join(str(self.sizes[name]) for name in _DATA_FORMS[form])}"
        others = {name: self.sizes[name] for name in MODEL_AXES} | {"ep": self.ep}
        return ",".join([data, *(f"{name}={size}" for name, size in others.items() if size > 1)])

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, in the order in which ranks count."""
        return {name: getattr(self, name) for name in _AXES}

    @property
    def _inner(self) -> int:
        """Ranks that ``ep`` divides: those of the shards, or of the replicas where nothing is sharded, and of tp."""
        return (self.dp_replicate if self.dp_shard == 1 else self.dp_shard) * self.tp

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The size of every axis of the experts' mesh, in the order in which ranks count."""
        left = self._inner // self.ep
        if self.dp_shard == 1 and self.dp_replicate > 1:
            return {"ep_replicate": left, "ep_shard": 1, "ep": self.ep}
        return {"ep_replicate": self.dp_replicate, "ep_shard": left, "ep": self.ep}

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes.values())

    @property
    def dp(self) -> int:
        """Ranks that read data of their own."""
        return math.prod(self.sizes[name] for name in DATA_AXES)

    def check_world(self, world: int) -> None:
        """``ValueError`` unless the mesh has ``world`` ranks, with the nearest mesh that has."""
        if self.size == world:
            return
        near = _nearest(self, world)
        raise ValueError(
            f"mesh {self} has {self.size} ranks and there {'are' if world > 1 else 'is'} {world} "
            f"process{'es' * (world > 1)}: try --mesh {near}, or start {self.size}"
        )

    def check_divides(self, sizes: dict[str, int], axis: str = "tp") -> None:
        """``ValueError`` unless ``axis`` divides every one of ``sizes`` (name -> size), with values that do."""
        ranks = getattr(self, axis)
        for name, size in sizes.items():
            if size % ranks:
                fits = [n for n in range(1, size + 1) if all(other % n == 0 for other in sizes.values())]
                below = [n for n in fits if n < ranks][-1]
                above = [n for n in fits if n > ranks][:1]
                fix = " or ".join(f"{axis}={n}" for n in (below, *above))
                raise ValueError(f"{axis}={ranks} does not divide {name}={size}; try {fix}")


#: Axes whose ranks read data of their own, and those whose ranks share it, each in the order in which ranks count.
_AXES = tuple(axis.name for axis in fields(MeshSpec) if "data" in axis.metadata)
DATA_AXES = tuple(axis.name for axis in fields(MeshSpec) if axis.metadata.get("data"))
MODEL_AXES = tuple(name for name in _AXES if name not in DATA_AXES)
#: What the text calls the data-parallel axes; every other axis has its own name.
_DATA_FORMS = {"fsdp": ("dp_shard",), "ddp": ("dp_replicate",), "hsdp": ("dp_replicate", "dp_shard")}


def _nearest(spec: MeshSpec, world: int) -> MeshSpec:
    """A mesh of ``world`` ranks as near to ``spec`` as can be: model axes kept or made divisors, then the replicas."""
    found, left = {}, world
    for name in reversed(MODEL_AXES):
        found[name] = _divisor(left, spec.sizes[name])
        left //= found[name]
    if spec.dp_shard == 1 and spec.dp_replicate > 1:
        near = MeshSpec(dp_replicate=left, **found)
    else:
        replicate = _divisor(left, spec.dp_replicate)
        near = MeshSpec(dp_replicate=replicate, dp_shard=left // replicate, **found)
    return replace(near, ep=_divisor(near._inner, spec.ep))


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` up to ``limit``."""
    return max(n for n in range(1, min(limit, number) + 1) if number % n == 0)


class Axes:
    """The ranks of a run along named axes, with their process groups: built on every rank, in the same order, under an
    initialized process group.

    ``devices``: the ``DeviceMesh`` of the axes above 1 (at least one), those that count fastest first: where two split
    a dimension, as ``tp`` and ``dp_shard`` do, FSDP splits what the other left, and a gather over it is contiguous.
    ``shard``: the axis of FSDP. ``averaged``: axes over whose ranks gradients are averaged; over those of others they
    are summed, and then divided by ``divisor``.
    """

    def __init__(
        self, sizes: dict[str, int], device_type: str, *, shard: str, averaged: tuple[str, ...] = (), divisor: int = 1
    ):
        self.sizes, self.shard, self.averaged, self.divisor = sizes, shard, averaged, divisor
        ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
        ranks = ranks.permute(*reversed(range(ranks.ndim)))
        self.names = tuple(name for name in reversed(sizes) if sizes[name] > 1) or (shard,)
        ranks = ranks.reshape([sizes[name] for name in self.names])
        with compat.single_gloo_thread():
            self.devices = _device_mesh(device_type, ranks, self.names)
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

    def __deepcopy__(self, memo: dict) -> "Axes":
        return self  # process groups belong to the process, whatever copies of a model there are

    def placements(self, of: Callable[[str], Placement]) -> tuple[Placement, ...]:
        """What ``of`` says of each of the mesh's axes, in their order."""
        return tuple(map(of, self.names))


class Mesh(Axes):
    """A mesh with its process groups. ``spec``: its sizes. ``experts``: the mesh as experts see it; None without ep."""

    def __init__(self, spec: MeshSpec, device_type: str):
        spec.check_world(dist.get_world_size())
        self.spec = spec
        super().__init__(spec.sizes, device_type, shard="dp_shard", averaged=DATA_AXES)
        self.experts: Axes | None = None
        if spec.ep > 1:
            # Each rank's loss is its own, and an expert gets gradients of the tokens of all ranks that share it.
            self.experts = Axes(spec.expert_sizes, device_type, shard="ep_shard", divisor=spec.dp)

    @property
    def dp_place(self) -> int:
        """This rank's place among the ``spec.dp`` ranks that read data of their own."""
        place = 0
        for name in DATA_AXES:
            place = place * self.spec.sizes[name] + self.place(name)
        return place


def _device_mesh(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A ``DeviceMesh`` whose collectives are safe while several are in flight: one axis over all ranks would otherwise
    have the default process group, with as many threads as whoever opened it gave it. That of experts, whose exchanges
    run beside other collectives, never is another mesh's."""
    several = device_type == "cpu" and compat.several_gloo_threads(dist.group.WORLD)
    if len(names) == 1 and (several or names == ("ep",)):
        return DeviceMesh.from_group(dist.new_group(), device_type, mesh_dim_names=names)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names)
