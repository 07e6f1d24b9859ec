"""What one rank holds in memory over the step, by what it is for.

A static count from shapes, each storage freed after its last use: the allocator's rounding, kernels' and collectives'
workspaces and the CUDA context are not in it.
"""

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from stepgraph.costs.fusion import Fusion, is_free, storage
from stepgraph.graph.collectives import stage_of
from stepgraph.graph.facts import Aliases, tensor_bytes
from stepgraph.graph.provenance import phase_of, provenance, role_of
from stepgraph.graph.step_graph import StepGraph

#: ``buckets``: gathered parameters and gradients on their way to be reduced. ``activations``: what forward leaves for
#: backward. ``temporary``: all else that a step makes.
KINDS = ("parameters", "optimizer", "inputs", "gradients", "buckets", "activations", "temporary")

_HELD = {"parameter": "parameters", "optimizer": "optimizer"}


@dataclass(frozen=True)
class Moment:
    """The fullest moment of a stretch of the step: its phase, the block (``""``: none) and bytes by kind."""

    phase: str
    block: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.bytes.values())


def memory_over_step(step: StepGraph, aliases: Aliases, fusion: Fusion) -> list[Moment]:
    """The fullest moment of every stretch of nodes of one phase and repeated block, in order."""
    kind = _kinds(step, aliases)
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    last: dict[fx.Node, int] = {}
    for node, position in aliases.position.items():
        for owner in (storage(aliases, node), *(storage(aliases, source) for source in node.all_input_nodes)):
            last[owner] = position
        if not is_free(node) or node.op == "output":
            for source in node.all_input_nodes:
                readers[storage(aliases, source)].append(node)
    alive = dict.fromkeys(KINDS, 0)
    for node in step.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            alive[kind[node]] += tensor_bytes(node)
    frees: dict[int, list[fx.Node]] = defaultdict(list)
    moments: list[Moment] = []
    blocks: dict[str | None, str] = {}
    for node, position in aliases.position.items():
        if node.op != "call_function":
            continue
        if _allocates(node, aliases) and not _stays_inside(node, readers[node], fusion):
            alive[kind[node]] += tensor_bytes(node)
            frees[last[node]].append(node)
        found = provenance(node)
        path = found.path if found else None
        if path not in blocks:
            blocks[path] = step.block_of(node) or ""
        here = Moment(phase_of(node), blocks[path], dict(alive))
        if not moments or (moments[-1].phase, moments[-1].block) != (here.phase, here.block):
            moments.append(here)
        elif here.total > moments[-1].total:
            moments[-1] = here
        for root in frees.pop(position, ()):
            alive[kind[root]] -= tensor_bytes(root)
    return moments


def _allocates(node: fx.Node, aliases: Aliases) -> bool:
    return storage(aliases, node) is node and not isinstance(node.meta.get("val"), (list, tuple))


def _stays_inside(node: fx.Node, readers: list[fx.Node], fusion: Fusion) -> bool:
    """Whether the result lives in a kernel's registers only."""
    kernel = fusion.kernel(node)
    return bool(readers) and all(reader is not node and fusion.kernel(reader) is kernel for reader in readers)


def _kinds(step: StepGraph, aliases: Aliases) -> dict[fx.Node, str]:
    """The kind of every storage."""
    kinds = {n: _HELD.get(s.kind, "inputs") for n, s in zip(step.placeholders(), step.inputs, strict=True)}
    saved: set[fx.Node] = set()
    into_update: set[fx.Node] = set()
    into_collective: set[fx.Node] = set()
    for node in step.graph.nodes:
        reader, role = phase_of(node), role_of(node)
        collective = role and role.kind == "reduce" and stage_of(node) == "begin"
        for source in node.all_input_nodes:
            root = storage(aliases, source)
            if reader == "backward" and phase_of(root) in ("forward", "loss"):
                saved.add(root)
            if reader == "optimizer" and phase_of(root) == "backward":
                into_update.add(root)
            if reader == "backward" and collective:
                into_collective.add(root)
    for node in step.graph.nodes:
        if node.op == "placeholder" or storage(aliases, node) is not node:
            continue
        roots = [storage(aliases, source) for source in node.all_input_nodes]
        if node.op == "call_function" and roots and all(kinds.get(r) in ("parameters", "gathered") for r in roots):
            kinds[node] = "gathered"
        elif node in into_update:
            kinds[node] = "gradients"
        elif node in into_collective:
            kinds[node] = "buckets"
        else:
            kinds[node] = "activations" if node in saved else "temporary"
    return {
        node: "buckets" if kind == "gathered" else "inputs" if node.op == "get_attr" else kind
        for node, kind in kinds.items()
    }
