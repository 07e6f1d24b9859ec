"""Cuts the graph of a microbatch into stages, and a stage into the graphs that a schedule calls; joins two graphs.

Forward, a node belongs to the stage of its block; outside of blocks it belongs to the block before it (the embedding to
the first stage, the last norm, the head and the loss to the last one). Backward, it belongs where its module is, but
never to a later stage than the gradients that it reads. What is made of buffers, the batch and constants alone belongs
nowhere: each stage that reads it computes it, so that masks and tables are never sent.

A stage's graphs are forward, and backward whole or as its two halves: ``backward_input`` computes the gradients that
the stage before waits for; ``backward_weight``, which nobody waits for, the gradients of parameters. What one graph
makes and another reads is a named value of the program, kept until it has been read.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, for the two halves.
"""

import copy
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from stepgraph import compat
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import stage_of
from stepgraph.graph.edit import Builder
from stepgraph.graph.facts import aten, is_pure, is_view
from stepgraph.graph.order import dependencies
from stepgraph.graph.provenance import Provenance, phase_of, provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec, Kind, StepGraph
from stepgraph.graph.values import Accumulator, BatchLeaf, Buffer, Input, Output, Parameter, Ratio, Value


def extract(
    step: StepGraph,
    nodes: Collection[fx.Node],
    outputs: Sequence[tuple[Output, fx.Node]],
    value_of: Callable[[fx.Node], Value],
    free: Collection[fx.Node] = (),
) -> StepGraph:
    """The graph of ``nodes`` of ``step``, in their order, which returns ``outputs``.

    It has the inputs of ``step`` that its nodes read. What they read of other nodes becomes the
    input ``value_of(node)``; but nodes in ``free`` are recomputed, with what they need. The outputs
    are copies of the nodes of ``step``: neither graph sees changes of the other.
    """
    specs = dict(zip(step.placeholders(), step.inputs, strict=True))
    wanted, queue = set(nodes), [*nodes, *(node for _, node in outputs)]
    while queue:
        for source in [n for n in queue.pop().all_input_nodes if n in free and n not in wanted]:
            wanted.add(source)
            queue.append(source)
    wanted |= {n for _, n in outputs if n in free}
    read = {n for node in wanted for n in node.all_input_nodes} | {n for _, n in outputs}
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    inputs: list[InputSpec] = []
    values = [n for n in step.graph.nodes if n in read and n not in wanted and n not in specs and n.op != "get_attr"]
    for node in [*(n for n in specs if n in read), *values]:
        spec = specs.get(node) or InputSpec(value_of(node))
        made[node] = graph.placeholder(node.name)
        made[node].meta = copy.copy(node.meta)
        inputs.append(replace(spec))
    for node in step.graph.nodes:
        if node in wanted or (node.op == "get_attr" and node in read):
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made[node] for _, node in outputs])
    module = compat.lazy_graph_module(step.module, graph)
    return StepGraph(module, inputs, [spec for spec, _ in outputs], step.blocks, step.mesh, dict(step.axes))


def new_input(step: StepGraph, what: Input, origin: fx.Node, like: torch.Tensor) -> fx.Node:
    """One more input of ``step``, which ``origin`` made so far; a tensor like ``like``."""
    with step.graph.inserting_after(step.placeholders()[-1]):
        node = step.graph.placeholder(f"once_{len(step.inputs)}")
    compat.rename_node(node, f"{what.kind}_{what.name}")
    node.meta["val"] = like
    set_provenance(node, Provenance(provenance(origin).path, "input", ""))
    step.inputs = [*step.inputs, InputSpec(what)]
    return node


#: Inputs that every stage may have.
_EVERYWHERE = (Buffer, BatchLeaf)


def free_nodes(step: StepGraph) -> set[fx.Node]:
    """Nodes that any stage may compute for itself: pure, and of buffers, the batch and constants alone; and views of
    parameters, which take neither time nor memory."""
    writes = Aliases(step.graph).writes
    everywhere = {n for n in step.placeholders(*_EVERYWHERE) if not writes.get(n)}
    views = set(step.placeholders(Parameter))
    free = set(everywhere)
    for node in step.graph.nodes:
        if node.op == "get_attr":
            free.add(node)
        elif node.op == "call_function" and is_pure(node) and not writes.get(node):
            if is_view(node) and node.all_input_nodes and set(node.all_input_nodes) <= views:
                views.add(node)
                free.add(node)
            elif free.issuperset(node.all_input_nodes) and views.isdisjoint(node.all_input_nodes):
                free.add(node)
    return free - everywhere


class Cut:
    """The stages of a microbatch's graph.

    ``starts``: of each stage, the number of its first block in ``step.blocks``; the first stage's is 0. ``stage``: of
    every node that belongs to one. ``free``: see `free_nodes`. ``reads``: for each stage, in the graph's order, the
    nodes of other stages whose values it needs.

    The gradient of a parameter that several stages read (a tied embedding) is cut at the additions that join the
    stages' parts: each stage adds its own to an accumulator of its own. Raises `CaptureError` where blocks do not run
    in their order, and where a stage writes what another has made.
    """

    def __init__(self, step: StepGraph, starts: Sequence[int]):
        self.step, self.starts, self.stages = step, tuple(starts), len(starts)
        self.free = free_nodes(step)
        self.stage: dict[fx.Node, int] = {}
        self._forward()
        self._separate_tied()
        self._backward()
        self._join_ratios()
        self._send_dense()
        self._position = {node: i for i, node in enumerate(step.graph.nodes)}
        self.reads = self._crossing()
        self._refuse_writes()

    def stage_of_block(self, block: str | None) -> int | None:
        """The stage that runs ``block``; None for anything but a block."""
        if block is None:
            return None
        return sum(start <= self._number[block] for start in self.starts) - 1

    def _forward(self) -> None:
        self._number = {block: i for i, block in enumerate(self.step.blocks)}
        now = 0
        for node in self.step.nodes("forward", "loss"):
            block = self.step.block_of(node)
            stage = self.stage_of_block(block)
            if stage is not None and node not in self.free:
                if stage < now:
                    raise CaptureError(
                        f"{block} runs after a block of stage {now} and belongs to stage {stage}; a pipeline needs "
                        "blocks that run one after the other: choose a split that keeps them in one stage"
                    )
                now = stage
            if node not in self.free:
                self.stage[node] = now

    def _separate_tied(self) -> None:
        """Split an addition of several stages' parts to an accumulator into one addition per part."""
        for accumulator in self.step.placeholders(Accumulator):
            for add in [u for u in accumulator.users if u.target is aten.add_.Tensor and phase_of(u) == "backward"]:
                parts = list(self._parts(add.args[1]))
                if len(parts) < 2:
                    continue
                for part in parts:
                    with self.step.graph.inserting_after(part):
                        own = self.step.graph.call_function(aten.add_.Tensor, (accumulator, part))
                    own.meta["val"] = add.meta["val"]
                    set_provenance(own, provenance(part))
                sums = add.args[1]
                self.step.graph.erase_node(add)
                _erase_sums(sums, set(parts))

    def _parts(self, grad: fx.Node) -> Iterator[fx.Node]:
        """The parts of a gradient, each made in one stage."""
        if len({self._home(leaf) for leaf in _leaves(grad)}) == 1:
            yield grad
        else:
            for part in grad.args:
                yield from self._parts(part)

    def _home(self, part: fx.Node) -> int:
        """The stage that computes a part of a gradient: the latest stage whose forward results it reads."""
        found, queue = -1, [part]
        while queue and found < 0:
            node = queue.pop(0)
            stages = [self.stage[n] for n in node.all_input_nodes if n in self.stage]
            found = max([found, *stages])
            block = self.stage_of_block(self.step.block_of(node))
            found = max(found, -1 if block is None else block)
            queue += [n for n in node.all_input_nodes if phase_of(n) == "backward"]
        return max(found, 0)

    def _backward(self) -> None:
        for node in self.step.nodes("backward"):
            if node in self.free:
                continue
            inputs = [n for n in node.all_input_nodes if n in self.stage]
            gradients = [self.stage[n] for n in inputs if phase_of(n) == "backward"]
            kept = [self.stage[n] for n in inputs if phase_of(n) != "backward"]
            stage = self.stage_of_block(self.step.block_of(node))
            if follows(node):  # parts of one result, and what waits for it
                stage = self.stage[node.args[0]]
            elif stage is None:
                stage = max(kept, default=min(gradients, default=self.stages - 1))
            self.stage[node] = min([stage, *gradients])
        for node in self.step.nodes("optimizer"):  # writes of buffers that forward assigned
            self.stage[node] = max([self.stage[n] for n in node.all_input_nodes if n in self.stage], default=0)

    def _join_ratios(self) -> None:
        """Keep one ratio of a condition per stage: the highest of its own."""
        (output,) = self.step.graph.find_nodes(op="output")
        kept, ratios = [], {}
        for node, what in self.step.returned():
            if isinstance(what, Ratio):
                ratios.setdefault((what, self.stage[node]), []).append(node)
            else:
                kept.append((what, node))
        for (what, stage), found in ratios.items():
            joined = found[0]
            if found[1:]:
                build = Builder(*found, before=output)
                stacked = build(aten.stack.default, found)
                joined = build(aten.amax.default, stacked)
                self.stage[stacked] = self.stage[joined] = stage
            kept.append((what, joined))
        self.step.outputs = [what for what, _ in kept]
        output.args = ([node for _, node in kept],)

    def _send_dense(self) -> None:
        """Tensors that cross stages are dense in memory, so that they can be sent without a copy."""
        for value in list(self.stage):
            away = [u for u in value.users if self.stage.get(u, self.stage[value]) != self.stage[value]]
            tensor = value.meta.get("val")
            if away and isinstance(tensor, torch.Tensor) and not _is_dense(tensor):
                dense = Builder(value, after=value)(aten.clone.default, value, memory_format=torch.contiguous_format)
                self.stage[dense] = self.stage[value]
                for user in away:
                    user.replace_input_with(value, dense)

    def _crossing(self) -> list[list[fx.Node]]:
        found: list[dict[fx.Node, None]] = [{} for _ in range(self.stages)]
        for node, stage in self.stage.items():
            for source in node.all_input_nodes:
                if self.stage.get(source, stage) != stage:
                    found[stage][source] = None
        return [sorted(values, key=self._position.__getitem__) for values in found]

    def _refuse_writes(self) -> None:
        aliases, nodes = Aliases(self.step.graph), list(self.step.graph.nodes)
        for values in self.reads:
            for value in values:
                for place in aliases.writes.get(aliases.root(value), ()):
                    writer = nodes[place]
                    if self.stage.get(writer) != self.stage[value]:
                        raise CaptureError(
                            f"{provenance(writer).place} writes into a tensor that another stage of the pipeline has "
                            "made; write the operation without the trailing underscore"
                        )

    def message(self, stage: int, forward: bool) -> list[fx.Node]:
        """What ``stage`` and later stages read of the stages before it: of ``stage - 1`` and those before it where
        it comes ``forward``, else of ``stage + 1`` and later. The neighbour sends all of them."""
        beyond = range(stage, self.stages) if forward else range(stage + 1)
        found = {
            value: None
            for other in beyond
            for value in self.reads[other]
            if (self.stage[value] < stage if forward else self.stage[value] > stage)
        }
        return sorted(found, key=self._position.__getitem__)

    def graph_of(self, stage: int) -> StepGraph:
        """The graph of ``stage``, forward and backward: what it reads of other stages is an input, what they read of it
        an output, each a `Value` of the node that makes it."""
        outputs = [(what, node) for node, what in self.step.returned() if self.stage.get(node) == stage]
        read = dict.fromkeys(value for values in self.reads for value in values if self.stage[value] == stage)
        outputs += [(Value(value.name), value) for value in sorted(read, key=self._position.__getitem__)]
        nodes = [node for node, where in self.stage.items() if where == stage]
        return extract(self.step, nodes, outputs, lambda node: Value(node.name), self.free)


def follows(node: fx.Node) -> bool:
    """Whether ``node`` unpacks a result or waits for it, and so stays with the node that made it."""
    return (node.target is operator.getitem or stage_of(node) in ("wait", "end")) and phase_of(node.args[0]) != "input"


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` fill its memory, each once: then a tensor like it has its strides."""
    return torch.empty_like(tensor).stride() == tensor.stride()


def _leaves(grad: fx.Node) -> Iterator[fx.Node]:
    """What the additions that ``grad`` ends with add up."""
    adds = grad.target is aten.add.Tensor and len(grad.users) == 1 and len(grad.all_input_nodes) == 2
    if adds and not grad.kwargs and phase_of(grad) == "backward":
        for part in grad.args:
            yield from _leaves(part)
    else:
        yield grad


def _erase_sums(node: fx.Node, parts: set[fx.Node]) -> None:
    if node not in parts and not node.users:
        args = node.all_input_nodes
        node.graph.erase_node(node)
        for arg in args:
            _erase_sums(arg, parts)


def pieces_of(step: StepGraph, stage: int, halves: bool) -> dict[Kind, StepGraph]:
    """The graphs of a stage's ``step`` by their kind: ``forward``, and ``backward``, or with ``halves``
    ``backward_input`` and ``backward_weight``. ``stage``: its number, by which what is kept between them is named."""
    free = free_nodes(step)
    place = _places(step, halves)
    kinds = (Kind.FORWARD, *((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if halves else (Kind.BACKWARD,)))
    returned: dict[Kind, list[tuple[Output, fx.Node]]] = {kind: [] for kind in kinds}
    for node, what in step.returned():
        returned[place.get(node, Kind.FORWARD)].append((what, node))
    for node, kind in place.items():
        users = {place[user] for user in node.users if user in place}
        users |= {place[user] for user in _through(node, free) if user in place}
        if node not in free and users - {kind}:
            returned[kind].append((Value(node.name, stage), node))
    return {
        kind: extract(
            step,
            [n for n, where in place.items() if where == kind and n not in free],
            returned[kind],
            lambda node: Value(node.name, stage),
            free,
        )
        for kind in kinds
    }


def _through(node: fx.Node, free: set[fx.Node]) -> Iterable[fx.Node]:
    """What reads ``node`` by way of nodes in ``free``."""
    queue = [user for user in node.users if user in free]
    while queue:
        for user in queue.pop().users:
            if user in free:
                queue.append(user)
            else:
                yield user


def _places(step: StepGraph, halves: bool) -> dict[fx.Node, Kind]:
    """The kind of graph that each node goes to."""
    late: set[fx.Node] = set()
    for node in step.nodes():
        if phase_of(node) == "backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    place = {node: Kind.BACKWARD if node in late else Kind.FORWARD for node in step.nodes()}
    needed, queue = set(), list(_awaited(step, late) if halves else ())
    before = dependencies(list(step.graph.nodes), Aliases(step.graph), lambda _: False) if halves else {}
    while queue:  # with the writes into it
        if (node := queue.pop()) not in needed:
            needed.add(node)
            queue += before[node]
    for node, kind in place.items():
        if halves and kind is Kind.BACKWARD:
            place[node] = Kind.BACKWARD_INPUT if node in needed else Kind.BACKWARD_WEIGHT
        if follows(node):
            place[node] = place[node.args[0]]
    return place


def _awaited(step: StepGraph, late: set[fx.Node]) -> list[fx.Node]:
    """The gradients that are sent on; for the first stage, which sends none, the ones that leave its blocks."""
    sent = [node for node, what in step.returned() if isinstance(what, Value) and node in late]
    if sent:
        return sent
    inside = [n for n in late if step.block_of(n) is not None]
    return [n for n in inside if any(u in late and step.block_of(u) is None for u in n.users)]
