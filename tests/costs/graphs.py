"""Graphs made by hand, on meta tensors."""

import torch
from torch import fx

from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec, StepGraph
from stepgraph.graph.values import BatchLeaf

aten = torch.ops.aten


class Hand:
    """``hand.input(shape)`` and ``hand(target, *args)`` add nodes to ``hand.graph``."""

    def __init__(self):
        self.graph, self.inputs = fx.Graph(), []

    def input(self, *shape, dtype=torch.float32, what=None):
        node = self.graph.placeholder(f"input{len(self.inputs)}")
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        self.inputs.append(InputSpec(what or BatchLeaf(len(self.inputs))))
        return node

    def __call__(self, target, *args, phase="forward", val=None, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        if val is None:
            found, words = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            val = target(*found, **words)
        node.meta["val"] = val
        set_provenance(node, Provenance("", phase, "here:1"))
        return node

    def step(self, *outputs):
        self.graph.output(outputs)
        return StepGraph(fx.GraphModule(torch.nn.Module(), self.graph), self.inputs, [])
