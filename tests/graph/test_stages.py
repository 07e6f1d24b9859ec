"""Graphs of a stage: which nodes each has."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.stages import pieces_of
from stepgraph.graph.step_graph import InputSpec, Kind, StepGraph
from stepgraph.graph.values import Metric, Parameter, Value

aten = torch.ops.aten


def test_a_half_of_backward_has_what_writes_into_its_gradients():
    def function(x, w):
        y = x @ w
        g = y.clone()
        g.mul_(2)
        return g @ w.t(), x.t() @ g

    module = make_fx(function, tracing_mode="fake")(torch.randn(4, 3), torch.randn(3, 5))
    for i, node in enumerate(n for n in module.graph.nodes if n.op == "call_function"):
        set_provenance(node, Provenance("", "backward" if i else "forward", "model.py:1"))
    (write,) = module.graph.find_nodes(op="call_function", target=aten.mul_.Tensor)
    write.replace_all_uses_with(write.args[0])  # as where an operator returns nothing
    step = StepGraph(module, [InputSpec(Value("x", 0)), InputSpec(Parameter("w"))], [Value("dx", 0), Metric("dw")])
    pieces = pieces_of(step, 0, halves=True)
    targets = {kind: [node.target for node in piece.nodes()] for kind, piece in pieces.items()}
    assert aten.mul_.Tensor in targets[Kind.BACKWARD_INPUT] and aten.mul_.Tensor not in targets[Kind.BACKWARD_WEIGHT]
    assert targets[Kind.BACKWARD_WEIGHT][-1] is aten.mm.default
