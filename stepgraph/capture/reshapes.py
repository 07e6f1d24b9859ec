"""Operators that make a tensor object another view (``unsqueeze_``, ``set_``, ``resize_``) become operators that give
that view: passes and compilers take a node for one tensor of one form.

Before -> after: ``t_(x)`` -> ``t(x)``, ``set_(x, y)`` -> ``alias(y)``. Later nodes read the result of either. On the
batch they stay, since the caller sees the new form.
"""

import torch
from torch import fx

from stepgraph.graph.edit import Builder, replace
from stepgraph.graph.facts import is_overload
from stepgraph.graph.step_graph import StepGraph

aten = torch.ops.aten


def reshape_by_views(step: StepGraph) -> None:
    """Replace the operators that change the form of a tensor in place, but for those on inputs."""
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
