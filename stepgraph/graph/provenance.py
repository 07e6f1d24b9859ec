"""Where a node of the graph comes from (module path, phase, source line), and what it is for (its role)."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

KEY = "stepgraph"
PHASES = ("forward", "loss", "backward", "optimizer")
#: ``gather``: of parameters. ``reduce``: of their gradients. ``activation``: any other collective of forward or
#: backward. ``dispatch``, ``compute``, ``combine``: of experts. ``send``, ``recv``: between the stages of a pipeline.
#: ``collect``, ``return``: of whole matrices, to the rank that orthogonalizes them and back.
ROLES = ("gather", "reduce", "activation", "dispatch", "compute", "combine", "send", "recv", "collect", "return")


class Role(NamedTuple):
    """What a node is for. Capture records it, and passes carry it along.

    ``kind``: one of ``ROLES``. ``parameters``: the fully qualified names of the parameters it concerns, several
    for a bucket, none for activations. ``axis``: the axis of the mesh that it communicates over; ``world``: all ranks.

    A gather's role is that of the collective and of its wait; a reduction's that of the collective, its wait, and all
    that follows up to the optimizer or the output. What comes before a reduction is backward's own work, without a
    role. Replacement nodes keep the role.
    """

    kind: str
    parameters: tuple[str, ...]
    axis: str

    def __str__(self) -> str:
        shown = self.parameters if len(self.parameters) < 3 else (f"{len(self.parameters)} parameters",)
        return " ".join([self.kind, *([", ".join(shown)] if shown else []), "over", self.axis])


class Provenance(NamedTuple):
    """Where a node comes from, and what it is for.

    ``path``: module path as in ``named_modules()``, ``""`` for the model itself. ``phase``: one of ``PHASES``, or
    ``"input"`` for placeholders. ``source``: ``file:line`` of the innermost frame of user code. ``checkpoint``: the
    number of the ``torch.utils.checkpoint`` call the node ran in, if any. ``role``: None for plain computation.
    ``region``: the names that the user's code gave it by `stepgraph.region`, the outermost first, as in
    ``moe/dispatch``; ``""`` outside all.
    """

    path: str
    phase: str
    source: str
    checkpoint: int | None = None
    role: Role | None = None
    region: str = ""

    @property
    def place(self) -> str:
        """The module and the line, for messages."""
        return f"{self.path or 'the model'} ({self.source})"


def provenance(node: fx.Node) -> Provenance | None:
    """The provenance of ``node``, or None for a node that no pass and no trace attributed."""
    return node.meta.get(KEY)


def set_provenance(node: fx.Node, value: Provenance) -> None:
    """Attribute ``node`` to ``value``."""
    node.meta[KEY] = value


def role_of(node: fx.Node) -> Role | None:
    """The role of ``node``; None for plain computation."""
    found = provenance(node)
    return found and found.role


def set_role(node: fx.Node, role: Role | None) -> None:
    """``node``, which has a provenance, is for ``role``."""
    set_provenance(node, provenance(node)._replace(role=role))


def region_of(node: fx.Node) -> str:
    """The region that the user's code gave ``node``, as in ``moe/dispatch``; ``""`` outside all."""
    found = provenance(node)
    return found.region if found else ""


def in_region(node: fx.Node, name: str) -> bool:
    """Whether ``node`` is inside a region ``name``, at any depth: ``dispatch`` and ``moe`` hold ``moe/dispatch``."""
    return f"/{name}/" in f"/{region_of(node)}/"


def together(members: Sequence[Provenance]) -> Provenance:
    """The provenance of what replaces ``members``: the innermost module and region that hold all of theirs, and one
    role for all their parameters, where all have one of a kind."""
    path = _shared([member.path for member in members], ".")
    region = _shared([member.region for member in members], "/")
    roles = [member.role for member in members]
    role = None
    if all(roles) and len({(r.kind, r.axis) for r in roles}) == 1:
        names = dict.fromkeys(name for r in roles for name in r.parameters)
        role = roles[0]._replace(parameters=tuple(names))
    return members[0]._replace(path=path, role=role, region=region)


def _shared(paths: Sequence[str], separator: str) -> str:
    """What all ``paths`` begin with."""
    levels = zip(*(path.split(separator) for path in paths), strict=False)
    return separator.join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, levels))


def phase_of(node: fx.Node) -> str:
    """The node's phase, ``"input"`` for placeholders and constants, ``"output"`` for the output node."""
    if node.op in ("placeholder", "get_attr", "output"):
        return "output" if node.op == "output" else "input"
    found = provenance(node)
    return found.phase if found else "unattributed"
