"""Takes a graph out of another one: some of its nodes, with what they read from outside as named values."""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.provenance import Provenance, provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec, StepGraph
from stepgraph.graph.values import Input, Output, Value


def extract(
    step: StepGraph,
    nodes: Collection[fx.Node],
    outputs: Sequence[tuple[Output, fx.Node]],
    value_of: Callable[[fx.Node], Value],
    free: Collection[fx.Node] = (),
) -> StepGraph:
    """The graph of ``nodes`` of ``step``, in their order, which returns ``outputs``.

    It has the inputs of ``step`` that its nodes read. What they read of other nodes becomes the
    input ``value_of(node)``; but nodes in ``free`` are computed again, with what they need. The outputs
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
    module = fx.GraphModule(step.module, graph)
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
