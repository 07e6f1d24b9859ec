"""One rank's memory over the step: how much, and what for.

A static count from shapes, each storage freed after its last use: it leaves out the allocator's rounding, the
CUDA context, and all workspaces but attention's.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from stepgraph.costs.attention import transient_bytes
from stepgraph.costs.roofline import Fusion, is_free
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import stage_of
from stepgraph.graph.facts import aten, packet
from stepgraph.graph.host_copies import device_bytes, on_host
from stepgraph.graph.program import StepProgram, ValueKey
from stepgraph.graph.provenance import phase_of, provenance, role_of
from stepgraph.graph.step_graph import Call, StepGraph
from stepgraph.graph.values import Accumulator, BatchLeaf, Input, Loss, OptimizerState, Parameter, Value

#: ``buckets``: gathered parameters and gradients on their way to be reduced. ``activations``: what forward leaves for
#: backward. ``temporary``: all else that a step makes.
KINDS = ("parameters", "optimizer", "inputs", "gradients", "buckets", "activations", "temporary")

#: Kinds of a graph's inputs that are not ``inputs``.
HELD = {Parameter.kind: "parameters", OptimizerState.kind: "optimizer", Accumulator.kind: "gradients"}

_SUMS = (aten.sum, aten.mean, aten.amax, aten.linalg_vector_norm)


def lifetimes(
    graph: fx.Graph, aliases: Aliases, fusion: Fusion | None = None
) -> Iterator[tuple[fx.Node, bool, list[fx.Node]]]:
    """(node, whether its result is memory of its own, the nodes whose memory is free after it), in order.

    With a ``fusion``, what stays in a kernel's registers takes no memory, and what it is computed from lies there until
    that kernel's last node; but what a sum reads only until then, as its kernel comes early.
    """
    last = aliases.last_use()
    inside = _inside(graph, aliases, fusion) if fusion else set()
    for node in reversed(aliases.position):
        if node in inside and packet(node) not in _SUMS:
            for source in map(aliases.root, node.all_input_nodes):
                last[source] = max(last[source], last[node])
    frees: dict[int, list[fx.Node]] = defaultdict(list)
    for node, position in aliases.position.items():
        if node.op != "call_function":
            continue
        # What an operator returns in a list belongs to the getitems.
        listed = isinstance(node.meta.get("val"), (list, tuple))
        made = aliases.root(node) is node and not listed and not on_host(node) and node not in inside
        if made:
            frees[last[node]].append(node)
        yield node, made, frees.pop(position, [])


def _inside(graph: fx.Graph, aliases: Aliases, fusion: Fusion) -> set[fx.Node]:
    """The nodes whose result only nodes of their own kernel read."""
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if not is_free(node) or node.op == "output":
            for source in node.all_input_nodes:
                readers[aliases.root(source)].append(node)
    return {
        node
        for node, found in readers.items()
        if all(reader is not node and fusion.kernel(reader) is fusion.kernel(node) for reader in found)
    }


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes the graph needs. ``inputs``: state and batch, held throughout. ``peak``: most bytes alive at once, inputs
    counted. ``saved``: bytes that forward leaves alive for backward."""

    inputs: int
    peak: int
    saved: int


def estimate_memory(graph: fx.Graph, *, fused: bool = False) -> MemoryEstimate:
    """Peak memory of running ``graph`` in order, one operator at a time; ``fused``: as a compiler joins them."""
    aliases = Aliases(graph)
    fusion = Fusion(graph, aliases, fused) if fused else None
    kept = {
        aliases.root(node)
        for node in graph.nodes
        if phase_of(node) in ("forward", "loss") and any(phase_of(user) == "backward" for user in node.users)
    }
    peak = alive = inputs = sum(device_bytes(n) for n in graph.nodes if n.op in ("placeholder", "get_attr"))
    saved = most_saved = 0
    for node, made, freed in lifetimes(graph, aliases, fusion):
        if made:
            alive += device_bytes(node)
            saved += device_bytes(node) * (node in kept)
            most_saved = max(most_saved, saved)
        peak = max(peak, alive + transient_bytes(node))
        for root in freed:
            alive -= device_bytes(root)
            saved -= device_bytes(root) * (root in kept)
    return MemoryEstimate(inputs, peak, most_saved)


def peak_bytes(program: StepProgram, *, fused: bool = False) -> int:
    """Estimated peak bytes of the calls of ``program``, one by one. Next to what a call needs lie the state
    that only other graphs take, and the values that calls have given and later ones are still to read. ``fused``: see
    `estimate_memory`."""
    state = {name: _state_bytes(step) for name, step in program.graphs.items()}
    whole = {spec: size for sizes in state.values() for spec, size in sizes.items()}
    needs = {
        name: estimate_memory(step.graph, fused=fused).peak
        - sum(map(device_bytes, step.placeholders(Value)))
        + sum(size for spec, size in whole.items() if spec not in state[name])
        for name, step in program.graphs.items()
    }
    last, peak = program.last_reads(), 0
    held: dict[ValueKey, _Memory] = {}
    for place, call in enumerate(program.schedule):
        peak = max(peak, needs[call.graph] + sum(dict(held.values()).values()))
        made = _made(program, call, held)
        for _, what in program.graphs[call.graph].bound():
            if isinstance(what, Value) and last[value := program.value_key(what, call)] == place:
                held.pop(value, None)
        held |= {value: memory for value, memory in made.items() if value in last}
    return peak


#: A name for the memory of values, and its bytes: views of one tensor share it.
_Memory = tuple[tuple[str, str, int | None], int]


def state_bytes(program: StepProgram) -> int:
    """Bytes of the state of ``program``, which exists for the whole step."""
    return sum({what: size for step in program.graphs.values() for what, size in _state_bytes(step).items()}.values())


def _state_bytes(step: StepGraph) -> dict[Input, int]:
    """Bytes of each input that exists for the whole step."""
    return {what: device_bytes(node) for node, what in step.bound() if not isinstance(what, BatchLeaf | Value | Loss)}


def _made(program: StepProgram, call: Call, held: Mapping[ValueKey, _Memory]) -> dict[ValueKey, _Memory]:
    """The memory of the values that ``call`` gives, except views of state. ``held``: the memory of the values that it
    may read."""
    step = program.graphs[call.graph]
    aliases, found = Aliases(step.graph), {}
    inputs = dict(step.bound())
    for node, what in step.returned():
        root = aliases.root(node)
        given = inputs.get(root)
        if given is None:
            memory = (call.graph, root.name, call.microbatch), device_bytes(root)
        else:
            memory = held.get(program.value_key(given, call)) if isinstance(given, Value) else None
        if memory is not None and isinstance(what, Value):
            found[program.value_key(what, call)] = memory
    return found


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
    kind = kinds_of(step, aliases)
    alive = dict.fromkeys(KINDS, 0)
    for node in step.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            alive[kind[node]] += device_bytes(node)
    moments: list[Moment] = []
    blocks: dict[str | None, str] = {}
    for node, made, freed in lifetimes(step.graph, aliases, fusion):
        if made:
            alive[kind[node]] += device_bytes(node)
        found = provenance(node)
        path = found.path if found else None
        if path not in blocks:
            blocks[path] = step.block_of(node) or ""
        here = Moment(phase_of(node), blocks[path], alive | {"temporary": alive["temporary"] + transient_bytes(node)})
        if not moments or (moments[-1].phase, moments[-1].block) != (here.phase, here.block):
            moments.append(here)
        elif here.total > moments[-1].total:
            moments[-1] = here
        for root in freed:
            alive[kind[root]] -= device_bytes(root)
    return moments


def at_peak(step: StepGraph, aliases: Aliases, fusion: Fusion) -> tuple[fx.Node, dict[fx.Node, str]]:
    """(the node at the memory peak; the storages alive there: the node that owns each -> its kind)."""
    walk = list(lifetimes(step.graph, aliases, fusion))
    alive = most = 0
    fullest = 0
    for place, (node, made, freed) in enumerate(walk):
        alive += device_bytes(node) * made
        if alive + transient_bytes(node) > most:
            most, fullest = alive + transient_bytes(node), place
        alive -= sum(map(device_bytes, freed))
    kind = kinds_of(step, aliases)
    held = {node: kind[node] for node in step.graph.nodes if node.op in ("placeholder", "get_attr")}
    for node, made, freed in walk[: fullest + 1]:
        if made:
            held[node] = kind[node]
        if node is not walk[fullest][0]:
            for root in freed:
                del held[root]
    return walk[fullest][0], held


def kinds_of(step: StepGraph, aliases: Aliases) -> dict[fx.Node, str]:
    """The kind of every storage, by the node that owns it."""
    kinds = {node: HELD.get(what.kind, "inputs") for node, what in step.bound()}
    saved: set[fx.Node] = set()
    into_update: set[fx.Node] = set()
    into_collective: set[fx.Node] = set()
    backward_elsewhere = all(phase_of(node) != "backward" for node in step.graph.nodes)  # a pipeline's stage
    for node in step.graph.nodes:
        reader, role = phase_of(node), role_of(node)
        collective = role and role.kind == "reduce" and stage_of(node) == "begin"
        for source in node.all_input_nodes:
            root = aliases.root(source)
            kept = reader == "backward" or (node.op == "output" and backward_elsewhere)
            if kept and phase_of(root) in ("forward", "loss"):
                saved.add(root)
            if reader == "optimizer" and phase_of(root) in ("loss", "backward"):
                into_update.add(root)
            if reader == "backward" and collective:
                into_collective.add(root)
    for node in step.graph.nodes:
        if node.op == "placeholder" or aliases.root(node) is not node:
            continue
        roots = [aliases.root(source) for source in node.all_input_nodes]
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
