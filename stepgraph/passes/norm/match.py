"""Finds norms in a step graph: forward, and the backward that belongs to it.

A fused operator (``native_layer_norm``, ``_fused_rms_norm``) is known by its name, and its backward by reading its
statistics. A composite norm is proved from its root (see `composite`). Names and types of modules play no part.
"""

import torch
from torch import fx

from stepgraph.graph.facts import argument, getitem_users, packet
from stepgraph.graph.provenance import phase_of
from stepgraph.kernels.norm.spec import default_eps
from stepgraph.passes.norm.composite import ROOTS, Composite, normalized
from stepgraph.passes.norm.found import Found, Gradient, Refused, complete
from stepgraph.passes.norm.values import value_of

aten = torch.ops.aten

_FUSED = {aten._fused_rms_norm: "rms", aten.native_layer_norm: "layer"}
_FUSED_BACKWARD = (aten._fused_rms_norm_backward, aten.native_layer_norm_backward)


def find(graph: fx.Graph) -> list[Found | Refused]:
    """Every norm of ``graph``, and what looked like one but is none, in order."""
    recomputed: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if "recomputes" in node.meta:
            recomputed.setdefault(node.meta["recomputes"], []).append(node)
    by_root: dict[str, Found] = {}
    results: list[Found | Refused] = []
    for node in graph.nodes:
        if phase_of(node) == "optimizer":
            continue
        original = by_root.get(node.meta.get("recomputes"))
        if packet(node) in _FUSED:
            found = _fused(node)
        elif packet(node) in ROOTS and (source := normalized(node)) is not None:
            found = Composite(node, source, recomputed.get(source.name, []), original).match()
        else:
            continue
        if isinstance(found, Found):
            by_root[node.name], found.original = found, original
        results.append(found)
    results = _with_one_owner(results)
    complete([found for found in results if isinstance(found, Found)])
    return results


def _with_one_owner(results: list[Found | Refused]) -> list[Found | Refused]:
    """Each gradient belongs to the first norm that it is one of. Where a norm is computed again in part, its copy
    equals it, and so do their gradients; a copy without outputs of its own is then no norm."""
    owners: dict[fx.Node, Found] = {}
    kept = []
    for found in results:
        if isinstance(found, Found) and found.gradient:
            owner = next((owners[node] for node in found.gradient.results() if node in owners), None)
            if owner is None:
                owners |= dict.fromkeys(found.gradient.results(), found)
            else:
                found.gradient = None
                found.nodes = [node for node in found.nodes if node not in owner.nodes]
                if not found.outputs:
                    continue
        kept.append(found)
    return kept


def _fused(node: fx.Node) -> Found | Refused:
    x, shape, weight = node.args[:3]
    kind, parts = _FUSED[packet(node)], getitem_users(node)
    if len(shape) != 1:
        return Refused(node, f"it normalizes {len(shape)} dimensions at once")
    bias = node.args[3] if kind == "layer" else None
    eps = argument(node, "eps")
    eps = default_eps(value_of(x).dtype) if eps is None else eps
    outputs = [parts[0]] if 0 in parts and parts[0].users else []
    form = f"fused {'layer norm' if kind == 'layer' else 'rms'}"
    found = Found(form, kind, eps, x, weight, bias, 0.0, outputs, node)
    statistics = [part for i, part in parts.items() if i > 0]
    readers = {user for part in statistics for user in part.users}
    if any(packet(r) not in _FUSED_BACKWARD for r in readers):
        return Refused(node, "its statistics are read elsewhere")
    if len(readers) > 1:
        return Refused(node, "it has more than one backward")
    found.nodes = [node, *parts.values()]
    for backward in readers:
        results = getitem_users(backward)
        found.gradient = Gradient(backward.args[0], backward.args[1], None, *(results.get(i) for i in range(3)))
        found.nodes += [backward, *results.values()]
    return found
