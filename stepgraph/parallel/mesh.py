"""The mesh of a run: ``--mesh fsdp=4,cp=2,tp=2,ep=2`` to ranks, process groups and their slices.

Ranks of ``cp`` share sequences. Each has tokens of its own, so that to parameters they are ranks like those of
different data: ``fsdp=4,cp=2`` shards over all 8, ``ddp=4,cp=2`` has 8 replicas.

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
from stepgraph.errors import require_type, unknown_name

#: More than any cluster has; torch and its stores know ranks and lists of them.
MOST_RANKS = 1 << 20


def _axis(*, data: bool = False) -> Any:
    """An axis of the mesh; ``data``: its ranks read data of their own."""
    return field(default=1, metadata={"data": data})


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of a mesh's axes in rank order: the last varies fastest, so that tensor parallelism
    stays among neighbours."""

    pp: int = _axis()
    """Ranks of a pipeline: each has stages of the model, and all read the same data."""
    dp_replicate: int = _axis(data=True)
    """Ranks that hold the same shards (DDP, the outer axis of HSDP); without shards, those of ``cp`` included."""
    dp_shard: int = _axis(data=True)
    """Ranks that shard parameters, gradients and optimizer state (FSDP), those of ``cp`` included."""
    tp: int = _axis()
    """Tensor-parallel ranks."""
    ep: int = field(default=1, metadata={"divides": True})
    """Expert-parallel ranks, among the ranks of the axes above: no axis of its own."""
    cp: int = field(default=1, metadata={"divides": True})
    """Context-parallel ranks, neighbours among shards or, without shards, replicas: no axis of its own."""

    def __post_init__(self) -> None:
        inner = self._inner
        if self.size > MOST_RANKS:
            raise ValueError(f"mesh {self} has {self.size:,} ranks, and {MOST_RANKS:,} is the most: use a smaller one")
        if self._shards % self.cp:
            raise ValueError(f"cp={self.cp} does not divide the {self._shards} ranks that include it; use a multiple")
        if inner % self.ep:
            fits = [n for n in range(1, inner + 1) if inner % n == 0]
            near = [*[n for n in fits if n < self.ep][-1:], *[n for n in fits if n > self.ep][:1]]
            raise ValueError(
                f"mesh {self}: ep={self.ep} does not divide its {inner} ranks of shards and tp; try "
                + " or ".join(f"ep={n}" for n in near)
            )

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """``fsdp=N``, ``ddp=N`` or ``hsdp=REPLICASxSHARDS``, ``cp=N``, ``tp=N`` and ``ep=N``, joined by commas;
        ``ValueError`` else. Without a data-parallel axis, ``ep`` comes with as many shards as it needs."""
        forms = _DATA_FORMS | {name: (name,) for name in (*MODEL_AXES, "cp", "ep")}
        require_type("mesh", text, str, "write it as in 'fsdp=2'")
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
        cp = sizes.get("cp", 1)
        if "ep" in found and not found.keys() & _DATA_FORMS.keys():
            sizes["dp_shard"] = sizes["ep"] // math.gcd(sizes["ep"], sizes.get("tp", 1) * cp)
        if cp > 1:
            inner = "dp_replicate" if "ddp" in found else "dp_shard"
            sizes[inner] = sizes.get(inner, 1) * cp
        return cls(**sizes)

    def __str__(self) -> str:
        form = "fsdp" if self.dp_replicate == 1 else "ddp" if self.dp_shard == 1 else "hsdp"
        shown = [self.sizes[name] for name in _DATA_FORMS[form]]
        data = f"{form}={'x'.join(map(str, [*shown[:-1], shown[-1] // self.cp]))}"
        others = {"cp": self.cp} | {name: self.sizes[name] for name in MODEL_AXES} | {"ep": self.ep}
        return ",".join([data, *(f"{name}={size}" for name, size in others.items() if size > 1)])

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, in the order in which ranks count."""
        return {name: getattr(self, name) for name in _AXES}

    @property
    def _inner(self) -> int:
        """Ranks that ``ep`` divides: shards, or replicas where nothing is sharded, times tp."""
        return self._shards * self.tp

    @property
    def _shards(self) -> int:
        """Ranks that ``cp`` divides: shards, or replicas where nothing is sharded."""
        return self.dp_replicate if self.dp_shard == 1 else self.dp_shard

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The size of every axis of the experts' mesh, in the order in which ranks count."""
        left = self._inner // self.ep
        if self.dp_shard == 1 and self.dp_replicate > 1:
            return {"ep_replicate": left, "ep_shard": 1, "ep": self.ep}
        return {"ep_replicate": self.dp_replicate, "ep_shard": left, "ep": self.ep}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def dp(self) -> int:
        """Ranks that read their own data."""
        return math.prod(self.sizes[name] for name in DATA_AXES) // self.cp

    def check_world(self, world: int) -> None:
        """``ValueError`` unless the mesh has ``world`` ranks; it names the nearest mesh that does."""
        if self.size == world:
            return
        near = _nearest(self, world)
        raise ValueError(
            f"mesh {self} has {self.size} ranks and there {'are' if world > 1 else 'is'} {world} "
            f"process{'es' * (world > 1)}: try the mesh {near}, or start {self.size} (torchrun --nproc-per-node "
            f"{self.size}, or stepgraph train --nproc {self.size})"
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


#: Axes whose ranks read their own data, and axes whose ranks share it, each in the order in which ranks count.
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
    return replace(near, cp=_divisor(near._shards, spec.cp), ep=_divisor(near._inner, spec.ep))


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` up to ``limit``."""
    return max(n for n in range(1, min(limit, number) + 1) if number % n == 0)


class Axes:
    """Ranks along named axes, with their process groups: built on every rank, in the same order, under an initialized
    process group.

    ``sizes``: of the axes. ``devices``: the ``DeviceMesh`` of those above 1 (at least one), whose names are ``names``.
    Axes that count fastest come first in it: where two split a dimension, as ``tp`` and ``dp_shard`` do, FSDP splits
    what the other left, and a gather is contiguous. ``shard``: the axis of FSDP. ``averaged``: axes over whose ranks
    gradients are averaged; over others they are summed, and then divided by ``divisor``.
    """

    sizes: dict[str, int]
    names: tuple[str, ...]
    devices: DeviceMesh
    shard: str
    averaged: tuple[str, ...] = ()
    divisor: int = 1
    _slices: dict[str, DeviceMesh]
    _coordinate: dict[str, int]

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
    """The mesh of a run. ``spec``: its sizes. ``devices`` has no ``pp``: it covers the ranks that share a stage.
    ``stage_group``: their process group. ``context_group``: the ranks that share this one's sequences; None without
    ``cp``. ``experts``: the mesh as experts see it; None without ``ep``."""

    shard, averaged = "dp_shard", ("dp_replicate", "dp_shard")

    def __init__(self, spec: MeshSpec, device_type: str):
        require_type("spec", spec, MeshSpec, "use MeshSpec.parse('fsdp=2')")
        if not dist.is_initialized():
            raise ValueError(
                f"mesh {spec} needs process groups and none are open: use stepgraph.parallel.started, or call "
                "torch.distributed.init_process_group first"
            )
        spec.check_world(dist.get_world_size())
        self.spec, self.sizes = spec, spec.sizes
        names = tuple(name for name in reversed(spec.sizes) if spec.sizes[name] > 1 and name != "pp")
        self.names = names or ("dp_shard",)
        every = (*self.names, "pp") if spec.pp > 1 else self.names
        grid = _device_mesh(device_type, spec.sizes, every)
        with compat.single_gloo_thread():
            rest = spec.size // spec.pp
            self.stage_group = _own_group(spec, "stage", rest, 1) if spec.pp > 1 else dist.group.WORLD
            self.context_group = _own_group(spec, "cp", spec.cp, spec.tp) if spec.cp > 1 else None
        # Slices are made here, once: torch 2.11 cannot make them during a trace.
        self.devices = grid[self.names] if spec.pp > 1 else grid
        shown = every if spec.pp == 1 else (*names, "pp")  # a pipeline alone has no other axis
        self._slices = {name: grid if len(every) == 1 else grid[name] for name in shown}
        self._coordinate = dict(zip(every, grid.get_coordinate(), strict=True))
        self.experts = ExpertAxes(spec, device_type) if spec.ep > 1 else None

    @property
    def dp_place(self) -> int:
        """This rank's place among the ``spec.dp`` that read data of their own; ranks of ``cp`` have the same."""
        return self._token_place // self.spec.cp

    @property
    def cp_place(self) -> int:
        """This rank's place along ``cp``: which part of the sequences it has."""
        return self._token_place % self.spec.cp

    @property
    def _token_place(self) -> int:
        """This rank's index along the axes that split the batch or its sequences."""
        place = 0
        for name in DATA_AXES:
            place = place * self.spec.sizes[name] + self.place(name)
        return place


class ExpertAxes(Axes):
    """The mesh as experts see it, of the ranks that share a stage: ``ep``, then what shards or replicates their
    weights.

    Each rank's loss is its own, and an expert gets gradients of the tokens of all ranks: the mean over data-parallel
    ranks is the sum, divided by their number.
    """

    shard = "ep_shard"

    def __init__(self, spec: MeshSpec, device_type: str):
        self.sizes, self.divisor = spec.expert_sizes, spec.dp * spec.cp
        self.names = tuple(name for name in reversed(self.sizes) if self.sizes[name] > 1)
        every = (*self.names, "pp") if spec.pp > 1 else self.names
        grid = _device_mesh(device_type, {"pp": spec.pp} | self.sizes, every)
        self.devices = grid[self.names] if spec.pp > 1 else grid
        self._slices = {name: grid if len(every) == 1 else grid[name] for name in self.names}
        self._coordinate = dict(zip(every, grid.get_coordinate(), strict=True))


def _device_mesh(device_type: str, sizes: dict[str, int], names: tuple[str, ...]) -> DeviceMesh:
    """The ``DeviceMesh`` of the axes ``names``, the ones that count fastest first. ``sizes``: of all, in the order of
    ranks.

    Its collectives are safe while several are in flight: one axis over all ranks would otherwise have the default
    process group, with as many threads as whoever opened it gave it. That of experts, whose exchanges overlap other
    collectives, never is another mesh's.
    """
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    ranks = ranks.permute(*reversed(range(ranks.ndim))).reshape([sizes[name] for name in names])
    several = device_type == "cpu" and compat.several_gloo_threads(dist.group.WORLD)
    with compat.single_gloo_thread():
        if len(names) == 1 and (several or names == ("ep",)):
            return DeviceMesh.from_group(dist.new_group(), device_type, mesh_dim_names=names)
        return DeviceMesh(device_type, ranks, mesh_dim_names=names)


def _own_group(spec: MeshSpec, name: str, ranks: int, stride: int) -> dist.ProcessGroup:
    """This rank's among the groups of ``ranks`` ranks that are ``stride`` apart. Every rank makes all of them."""
    every = torch.arange(spec.size).view(-1, ranks, stride).transpose(1, 2).reshape(-1, ranks).tolist()
    return dist.new_subgroups_by_enumeration(every, group_desc=name)[0]
