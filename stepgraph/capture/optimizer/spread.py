"""Muon over sharded matrices: each rank orthogonalizes some of them whole.

The update of ``torch.optim.Muon`` is elementwise except for the orthogonalization, which needs whole matrices. N ranks
that hold the parts of N matrices of one form swap them, in bf16, in which torch orthogonalizes: each rank then has one
matrix whole, works on it, and its parts are sent back. Where a form has fewer matrices left, zeros take their places:
all ranks run one graph. Several such rounds share an exchange, sent while another's matrices are orthogonalized:

    swap k + 1 -> | orthogonalize k -> swap k back -> | update the parameters of k

Momentum stays in the parameters' shards, so checkpoints fit any mesh. The bits are those of one process.
Source: Liu et al., "Muon is Scalable for LLM Training", 2025 (Distributed Muon).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from stepgraph import compat
from stepgraph.capture.roles import declare
from stepgraph.errors import CaptureError

Tensor = torch.Tensor
#: Bytes of whole matrices that a rank gets in one exchange, unless one matrix has more. The pass `orthogonalize` works
#: on those of one form together.
_BUCKET = 128 << 20


class Cut(NamedTuple):
    """A dimension ``dim`` of ``size`` elements, cut into equal parts (the last are padded) for the ``ranks`` of a
    ``group``, which is the mesh's ``axis``."""

    group: dist.ProcessGroup
    axis: str
    ranks: int
    dim: int
    size: int

    def joined(self, parts: Tensor) -> Tensor:
        """The whole of ``parts``, (ranks, *form of one)."""
        return parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1).narrow(self.dim, 0, self.size)

    def apart(self, whole: Tensor) -> Tensor:
        """The inverse of `joined`; padding is zero."""
        if missing := -self.size % self.ranks:
            whole = F.pad(whole, (0, missing) if self.dim else (0, 0, 0, missing))
        return whole.unflatten(self.dim, (self.ranks, -1)).movedim(self.dim, 0)


def cuts_of(param: Tensor, shape: Sequence[int] | None) -> tuple[Cut, ...]:
    """How ``param`` lies on its mesh, the first cut first. ``shape``: of the whole matrix where shards are padded."""
    placements = getattr(param, "placements", ())
    if not placements:
        return ()
    found, sizes, mesh = [], list(param.shape if shape is None else shape), param.device_mesh
    names = mesh.mesh_dim_names or [f"dim_{i}" for i in range(mesh.ndim)]
    for i, placement in enumerate(placements):
        ranks = mesh.size(i)
        if ranks == 1 or placement.is_replicate():
            continue
        if type(placement) is not Shard or (shape is None and sizes[placement.dim] % ranks):
            raise CaptureError(
                f"Muon.step needs equal shards, and a parameter of shape {list(param.shape)} is placed as {placement} "
                f"over {ranks} ranks; use stepgraph.parallel.parallelize, which pads, or AdamW for this one"
            )
        found.append(Cut(mesh.get_group(i), names[i], ranks, placement.dim, sizes[placement.dim]))
        sizes[placement.dim] = -(-sizes[placement.dim] // ranks)
    return tuple(found)


class Matrix(NamedTuple):
    """A matrix that is updated: this rank's part of it, of its gradient and its momentum, and its ``cuts``."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    cuts: tuple[Cut, ...]

    @property
    def shape(self) -> list[int]:
        """The shape of the whole matrix."""
        first = {cut.dim: cut.size for cut in reversed(self.cuts)}
        return [first.get(dim, size) for dim, size in enumerate(self.param.shape)]


class Spread:
    """The update of one parameter group. ``options``: of torch's ``muon``. ``of_all``: called before what all share."""

    def __init__(self, options: Mapping[str, Any], of_all: Callable[[], None]):
        self.options, self.of_all = options, of_all

    def update(self, matrices: Sequence[Matrix]) -> None:
        """Update all; exchanges of one bucket run while another is worked on."""
        active: list[Iterator[None]] = []
        for bucket in _buckets(matrices):
            active.insert(0, self._steps(bucket))
            active = self._advanced(active)
        while active:
            active = self._advanced(active)

    def _advanced(self, active: list[Iterator[None]]) -> list[Iterator[None]]:
        """The newest first: it sends before the others compute."""
        return [steps for steps in active if next(steps, self) is not self]

    def _steps(self, rounds: list[list[Matrix]]) -> Iterator[None]:
        """Update the matrices of a bucket; each step but the last begins an exchange."""
        cuts = rounds[0][0].cuts
        held = [[*map(self._direction, matrices)] for matrices in rounds]
        self.of_all()
        for parts, (first, *_) in zip(held, rounds, strict=True):
            parts += [torch.zeros_like(parts[0])] * (math.prod(cut.ranks for cut in first.cuts) - len(parts))
        for level in reversed(range(len(cuts))):
            sent = [[*zip(*_chunks(parts, cuts[level].ranks), strict=True)] for parts in held]
            held = yield from self._swapped(sent, cuts[level], "collect")
            self.of_all()
            held = [[m[0].cuts[level].joined(part) for part in parts] for parts, m in zip(held, rounds, strict=True)]
        held = [[compat.orthogonalized(whole.contiguous(), self.options)] for (whole,) in held]
        for level, cut in enumerate(cuts):
            apart = [[m[0].cuts[level].apart(part) for part in parts] for parts, m in zip(held, rounds, strict=True)]
            back = yield from self._swapped(apart, cut, "return")
            self.of_all()
            held = [[part[i] for i in range(cut.ranks) for part in parts] for parts in back]
        for matrices, parts in zip(rounds, held, strict=True):
            for matrix, part in zip(matrices, parts, strict=False):
                matrix.param.mul_(1 - self.options["lr"] * self.options["weight_decay"])
                matrix.param.add_(part, alpha=-compat.muon_rate(self.options, matrix.shape))

    def _direction(self, matrix: Matrix) -> Tensor:
        """What is orthogonalized, this rank's part, in bf16."""
        if matrix.grad.dtype == torch.bfloat16 and not self.options["nesterov"]:
            raise CaptureError(
                "Muon.step with nesterov=False writes what it orthogonalizes into a bf16 momentum, which shards cannot "
                "equal; use fp32 parameters or nesterov=True"
            )
        matrix.momentum.lerp_(matrix.grad, 1 - self.options["momentum"])
        if self.options["nesterov"]:
            return matrix.grad.lerp(matrix.momentum, self.options["momentum"]).bfloat16()
        return matrix.momentum.bfloat16()

    def _swapped(self, rounds: list[list[Any]], cut: Cut, kind: str) -> Generator[None, None, list[list[Tensor]]]:
        """For each round what came, of the parts that went: element r, a tensor, of each goes to rank r."""
        parts = [part for of_round in rounds for part in of_round]
        flat = torch.cat([part[r].reshape(-1) for r in range(cut.ranks) for part in parts]).view(cut.ranks, -1)
        begun = compat.begin_all_to_all(flat, cut.group)
        yield
        came = torch.ops._c10d_functional.wait_tensor(begun)
        declare(came, kind, cut.axis)
        pieces = iter(came.split([part[0].numel() for part in parts], 1))
        return [[next(pieces).unflatten(1, part[0].shape) for part in of_round] for of_round in rounds]


def momentum_alone(
    _: Callable, params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], **options: Any
) -> None:
    """torch's ``muon`` without orthogonalization: the same state from the same numbers, in a tenth of the nodes."""
    for param, grad, momentum in zip(params, grads, momenta, strict=True):
        momentum.lerp_(grad, 1 - options["momentum"])
        param.mul_(1 - options["lr"] * options["weight_decay"])
        param.add_(momentum, alpha=-compat.muon_rate(options, param.shape))


def _chunks(parts: list[Tensor], n: int) -> list[list[Tensor]]:
    """``parts`` in ``n`` equal runs: one for each rank."""
    each = len(parts) // n
    return [parts[i * each : (i + 1) * each] for i in range(n)]


def _buckets(matrices: Sequence[Matrix]) -> list[list[list[Matrix]]]:
    """Rounds of as many matrices of one form as ranks share it, in buckets that are sent together."""
    forms: dict[tuple, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        forms[matrix.cuts, matrix.param.shape, matrix.param.dtype].append(matrix)
    found: dict[tuple, list[list[list[Matrix]]]] = defaultdict(list)
    for (cuts, *_), alike in forms.items():
        n = math.prod(cut.ranks for cut in cuts)
        buckets = found[tuple(cut.group for cut in cuts)]
        for start in range(0, len(alike), n):
            size = 2 * math.prod(alike[start].shape)
            if not buckets or size + sum(2 * math.prod(r[0].shape) for r in buckets[-1]) > _BUCKET:
                buckets.append([])
            buckets[-1].append(alike[start : start + n])
    return [bucket for buckets in found.values() for bucket in buckets]
