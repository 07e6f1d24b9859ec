"""A norm's result, recomputed for backward from what the norm saves anyway.

Before -> after, for an RMS norm that adds a residual and whose result y backward reads too:
    y, h, rstd = norm(x, weight, residual); ...; g(y)  ->  y, h, rstd = norm(...); z = h * rstd * weight; ...; g(z)
To run the norm again, x and the residual would have to be stored; z takes what `norm_backward` reads. z has the bits of
y: the kernel multiplies in this order, and nothing is added that a compiler could join to a product. A y that is
written in place is left alone. `joined` undoes it.
"""

import operator

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, replace
from stepgraph.graph.facts import is_view
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.step_graph import StepGraph

aten = torch.ops.aten


def apart(step: StepGraph) -> dict[fx.Node, fx.Node]:
    """Let backward read z: y and its views by z and its views, in order."""
    made: dict[fx.Node, fx.Node] = {}
    memory = Aliases(step.graph)
    for norm in step.graph.find_nodes(op="call_function", target=torch.ops.stepgraph.norm.default):
        weight, bias, residual, dtype, kind, _, offset = norm.args[1:8]
        parts = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
        y, h, rstd = (parts.get(place) for place in (0, 1, 3))
        if residual is None or bias is not None or kind != "rms" or not (_in_backward(h) and _in_backward(rstd)):
            continue
        aliases = [] if y is None or memory.writes.get(memory.root(y)) else _read_in_backward(y)
        if not aliases:
            continue
        build, math = Builder(y, after=max(parts.values())), rstd.meta["val"].dtype
        z = build(aten.mul.Tensor, build.cast(h, math), build(aten.unsqueeze.default, rstd, -1))
        if weight is not None:
            z = build(aten.mul.Tensor, z, build(aten.add.Tensor, build.cast(weight, math), offset))
        z = build.cast(z, dtype)
        copies, place = {y: z}, z.next
        for alias in aliases:
            if alias is not y:
                build = Builder(alias, before=place)
                copies[alias] = build(alias.target, copies[alias.args[0]], *alias.args[1:], **alias.kwargs)
            for user in filter(_runs_backward, list(alias.users)):
                user.replace_input_with(alias, copies[alias])
        made |= {copy: alias for alias, copy in copies.items()}
    return made


def joined(made: dict[fx.Node, fx.Node]) -> None:
    """Undo `apart` where forward still computes z, because it is stored."""
    for copy, alias in reversed(made.items()):
        if copy.users:
            replace(copy, alias, sweep=True)


def _runs_backward(node: fx.Node) -> bool:
    return phase_of(node) == "backward"


def _in_backward(node: fx.Node | None) -> bool:
    return node is not None and any(map(_runs_backward, node.users))


def _read_in_backward(node: fx.Node) -> list[fx.Node]:
    """``node`` and its views, each after what it is a view of, as far as backward reads one."""
    views = [v for user in node.users if is_view(user) and not _runs_backward(user) for v in _read_in_backward(user)]
    return [node, *views] if views or _in_backward(node) else []
