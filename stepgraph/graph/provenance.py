"""Where a node of the graph comes from: module path, phase and source line."""

from typing import NamedTuple

from torch import fx

KEY = "stepgraph"
PHASES = ("forward", "loss", "backward", "optimizer")


class Provenance(NamedTuple):
    """Where a node comes from.

    ``path``: module path as in ``named_modules()``, ``""`` for the model itself. ``phase``: one of ``PHASES``, or
    ``"input"`` for placeholders. ``source``: ``file:line`` of the innermost frame of user code. ``checkpoint``: the
    number of the ``torch.utils.checkpoint`` call the node ran in, if any.
    """

    path: str
    phase: str
    source: str
    checkpoint: int | None = None


def provenance(node: fx.Node) -> Provenance | None:
    """The provenance of ``node``, or None for a node that no pass and no trace attributed."""
    return node.meta.get(KEY)


def set_provenance(node: fx.Node, value: Provenance) -> None:
    """Attribute ``node`` to ``value``."""
    node.meta[KEY] = value


def phase_of(node: fx.Node) -> str:
    """The node's phase, ``"input"`` for placeholders and constants, ``"output"`` for the output node."""
    if node.op in ("placeholder", "get_attr", "output"):
        return "output" if node.op == "output" else "input"
    found = provenance(node)
    return found.phase if found else "unattributed"
