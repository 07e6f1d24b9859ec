"""Makes one graph of two that run one after the other."""

import operator

import torch
from torch import fx

from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec, StepGraph
from stepgraph.graph.values import Input, Ratio


def joined(first: StepGraph, last: StepGraph) -> StepGraph:
    """The graph that runs ``first``, then ``last``, which reads no `Value` of it. Inputs of both are one, and a ratio
    that ``last`` reads is the highest of earlier calls and of ``first``. Neither graph sees changes of the other."""
    graph = fx.Graph()
    owners: dict[str, StepGraph] = {}
    inputs: dict[Input, tuple[fx.Node, InputSpec]] = {}
    made: dict[fx.Node, fx.Node] = {}
    for step in (first, last):
        for (node, what), spec in zip(step.bound(), step.inputs, strict=True):
            if what not in inputs:
                inputs[what] = graph.node_copy(node), spec
            made[node] = inputs[what][0]
    outputs, returned = [], []
    for step in (first, last):
        for node in step.graph.nodes:
            if node.op not in ("placeholder", "output"):
                made[node] = graph.node_copy(node, made.__getitem__)
            if node.op == "get_attr":
                name = node.target
                while owners.get(name, step) is not step:
                    name = f"{name}_"
                owners[name], made[node].target = step, name
        for node, what in step.returned():
            outputs.append(what)
            returned.append(made[node])
            if step is first and isinstance(what, Ratio) and what in inputs:
                highest = graph.call_function(torch.ops.aten.maximum.default, (inputs[what][0], made[node]))
                highest.meta["val"] = inputs[what][0].meta["val"]
                set_provenance(highest, Provenance("", "optimizer", ""))
                made |= {n: highest for n, read in last.bound() if read == what}
    graph.output(returned)
    held = {
        made[n].target: operator.attrgetter(n.target)(s.module)
        for s in (first, last)
        for n in s.graph.find_nodes(op="get_attr")
    }
    module = fx.GraphModule(held, graph)
    return StepGraph(
        module,
        [spec for _, spec in inputs.values()],
        outputs,
        first.blocks or last.blocks,
        first.mesh or last.mesh,
        first.axes | last.axes,
    )
