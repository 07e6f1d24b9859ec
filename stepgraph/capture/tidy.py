"""What is done to a graph right after its trace, before anything else reads it."""

import torch

from stepgraph import compat
from stepgraph.capture.formulas import ALONE, BY_GRADIENTS
from stepgraph.graph import values
from stepgraph.graph.edit import Builder, fake_value
from stepgraph.graph.facts import is_view
from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import StepGraph


def keep_workspaces(step: StepGraph) -> None:
    """oneDNN's recurrent layers that were called in gradient mode run in it, see `stepgraph.kernels.recurrent`."""
    for node in step.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer.default):
        if node.meta["val"][3].numel():  # a workspace
            node.target = torch.ops.stepgraph.rnn_layer.default
            node.args = (node.args[0], list(node.args[1:5]), *node.args[5:])


def compute_values_alone(step: StepGraph) -> None:
    """Decompositions whose values alone eager computes, see `stepgraph.capture.formulas`."""
    for node in [node for node in step.graph.nodes if node.meta.pop(ALONE, False)]:
        for user in [user for user in node.users if user.args[1] != BY_GRADIENTS[node.target]]:
            step.graph.erase_node(user)
        node.args = (*(*node.args, False)[:2], False)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name == "driver"}
        if node.target is torch.ops.aten._linalg_eigh.default:
            node.args = (node.args[0], "L" if node.args[1] is False else node.args[1], False)
        node.meta["val"] = fake_value(node)


def name_numbers(step: StepGraph) -> None:
    """Give views and casts of Python numbers (``x * 1j`` has some in its backward) a node that they read."""
    aten, kinds = torch.ops.aten, {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    for node in list(step.graph.nodes):
        number = node.args[0] if node.args else None
        if type(number) in kinds and (is_view(node) or node.target is aten._to_copy.default):
            build = Builder(node, before=node)
            node.update_arg(0, build(aten.scalar_tensor.default, number, dtype=kinds[type(number)]))
            node.meta["val"] = fake_value(node)  # a conjugate, where the trace had the number


def name_inputs(step: StepGraph) -> None:
    """Readable names for placeholders; state that nothing uses is dropped, but for the model's own."""
    whole = any(isinstance(spec.what, values.BatchLeaf) for spec in step.inputs)  # else the graph of an update
    keep = []
    for (node, what), spec in zip(step.bound(), step.inputs, strict=True):
        if not node.users and (
            not whole
            or isinstance(what, values.OptimizerState | values.GroupValue | values.Accumulator | values.Before)
        ):
            step.graph.erase_node(node)
            continue
        keep.append(spec)
        set_provenance(node, Provenance(what.module if isinstance(what, values.ModelTensor) else "", "input", ""))
        compat.rename_node(node, f"{what.kind}_{what.name}")
    step.inputs = keep
