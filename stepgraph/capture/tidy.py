"""Cleanup of a graph right after its trace, before anything else reads it."""

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.formulas import ALONE, BY_GRADIENTS
from stepgraph.graph import values
from stepgraph.graph.edit import Builder, fake_value, replace
from stepgraph.graph.facts import is_overload, is_view
from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import StepGraph

aten = torch.ops.aten


def keep_workspaces(step: StepGraph) -> None:
    """oneDNN's recurrent layers that were called in gradient mode run in it, see `stepgraph.kernels.recurrent`."""
    for node in step.calling(aten.mkldnn_rnn_layer.default):
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
        if node.target is aten._linalg_eigh.default:
            node.args = (node.args[0], "L" if node.args[1] is False else node.args[1], False)
        node.meta["val"] = fake_value(node)


def name_numbers(step: StepGraph) -> None:
    """Give views and casts of Python numbers (``x * 1j`` has some in its backward) a node that they read."""
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    for node in list(step.graph.nodes):
        number = node.args[0] if node.args else None
        if type(number) in kinds and (is_view(node) or node.target is aten._to_copy.default):
            build = Builder(node, before=node)
            node.update_arg(0, build(aten.scalar_tensor.default, number, dtype=kinds[type(number)]))
            node.meta["val"] = fake_value(node)  # a conjugate, where the trace had the number


def name_inputs(step: StepGraph) -> None:
    """Readable names for placeholders; state that nothing uses is dropped, except for the model's own."""
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


def reshape_by_views(step: StepGraph) -> None:
    """Operators that make a tensor object another view become operators that give this view, which later nodes read:
    ``t_(x)`` -> ``t(x)``, ``set_(x, y)`` -> ``alias(y)``. Passes and compilers take a node for one tensor of one form.
    On inputs they stay, since the caller sees the new form.
    """
    stay: set[fx.Node] = set()
    for node in list(step.graph.nodes):
        if is_overload(node) and torch.Tag.inplace_view in node.target.tags:
            if node.args[0].op == "placeholder" or node.args[0] in stay:
                stay.add(node)
            elif (view := _view(node)) is not None:
                replace(node, view)


def _view(node: fx.Node) -> fx.Node | None:
    """What ``node`` makes its first argument, as a node of its own; None where that may lie in new memory."""
    build, source, made = Builder(node, before=node), node.args[0], node.meta["val"]
    name, overload = node.target._schema.name.removeprefix("aten::"), node.target._overloadname
    if name == "set_":
        if overload == "source_Tensor":
            return build(aten.alias.default, node.args[1])
        return build(aten.empty.memory_format, [0], dtype=made.dtype, device=made.device)
    if name in ("resize_", "resize_as_"):
        if _end(made) > _end(source.meta["val"]):
            return None
        return build(aten.as_strided.default, source, [*made.shape], [*made.stride()], made.storage_offset())
    operator = getattr(aten, name.removesuffix("_"))
    return build(getattr(operator, "int" if name == "transpose_" else overload), *node.args)


def _end(value: torch.Tensor) -> int:
    """The element of its storage that a tensor ends before."""
    steps = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.storage_offset() + (1 + steps if value.numel() else 0)
