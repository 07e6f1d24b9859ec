"""The role of each collective of a captured step, recorded at the end of the trace, where it is known.

A collective that gathers what is made only from one parameter (and constants) gathers that parameter. One that runs in
backward where autograd works on what forward made only from one parameter reduces that parameter's gradient; whatever
reads its result finishes the gradient. All others are of activations. `made_from` and `Owners` find what is made from
one parameter alone, in the nodes of forward and of autograd.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from stepgraph import compat
from stepgraph.graph.aliases import written_arguments
from stepgraph.graph.collectives import group_of, operator_of, set_group, stage_of
from stepgraph.graph.facts import is_mutating, is_pure
from stepgraph.graph.provenance import Role, provenance, role_of, set_role, together
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import ModelTensor, Parameter


def record_roles(step: StepGraph, reducing: Mapping[fx.Node, fx.Node], tensors: Iterable[torch.Tensor]) -> None:
    """Give process groups the same names on all ranks, and the collectives of forward and backward their roles.

    ``reducing``: see `Recorder`. ``tensors``: the model's; the meshes of DTensors among them give the axes.
    """
    found = [node for node in step.graph.nodes if stage_of(node) in ("begin", "end", "joined")]
    if not found:
        return
    _name_groups(step, found, tensors)
    names = {node: what.path if isinstance(what, ModelTensor) else what.name for node, what in step.bound()}
    made = made_from(step.graph, set(step.placeholders(Parameter)))
    for node in step.nodes("forward", "loss", "backward"):
        if role_of(node):  # declared by its caller
            continue
        if role := _role(node, step.axes, names, made, reducing.get(node)):
            set_role(node, role)


def declare(result: torch.Tensor, kind: str, axis: str) -> None:
    """In the trace of a step, give the collective that ``result`` waits for the role ``kind`` over ``axis``."""
    wait = compat.node_of_trace(result) if compat.is_tracing() else None
    if wait is not None and provenance(wait):
        wait = wait.args[0] if wait.target is operator.getitem else wait  # one of several results
        for node in (wait, wait.args[0]):
            set_role(node, Role(kind, (), axis))


def _role(
    node: fx.Node, axes: Mapping[str, str], names: Mapping[fx.Node, str], made: Mapping[fx.Node, Any], owner: Any
) -> Role | None:
    found = operator_of(node)
    finished = [provenance(n) for n in node.all_input_nodes if (role := role_of(n)) and role.kind == "reduce"]
    if found is None:
        return together(finished).role if finished else None
    if found.stage == "wait":
        return role_of(node.args[0])
    axis, gathered = axes[group_of(node)], made[node.all_input_nodes[0]]
    if found.kind == "all_gather" and gathered in names:
        return Role("gather", (names[gathered],), axis)
    if finished:
        return together(finished).role._replace(axis=axis)
    return Role("reduce", (names[owner],), axis) if owner else Role("activation", (), axis)


def _name_groups(step: StepGraph, collectives: list[fx.Node], tensors: Iterable[torch.Tensor]) -> None:
    axes = {dist.group.WORLD.group_name: "world"} | dict(_axes(tensors))
    for node in collectives:
        group = compat.process_group(group_of(node))
        axis = axes.get(group.group_name, group.group_desc)
        name = compat.name_group(group, axis)
        set_group(node, name)
        step.axes[name] = axis


def groups_by_axis(tensors: Iterable[torch.Tensor]) -> dict[str, dist.ProcessGroup]:
    """The process group of each axis of the tensors' meshes, and of ``world``, all ranks."""
    if not dist.is_initialized():
        return {}
    found = {axis: compat.process_group(name) for name, axis in _axes(tensors)}
    return {"world": dist.group.WORLD} | found


def _axes(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[str, str]]:
    """(torch's name of a process group, the axis) of every axis of the tensors' meshes."""
    for mesh in dict.fromkeys(t.device_mesh for t in tensors if hasattr(t, "device_mesh")):
        names = mesh.mesh_dim_names or [f"dim_{i}" for i in range(mesh.ndim)]
        for group, name in zip(mesh.get_all_groups(), names, strict=True):
            yield group.group_name, name


#: In the place of a parameter: several of them, or one and something else.
MIXED = object()


def made_from(graph: fx.Graph, parameters: set[fx.Node]) -> dict[fx.Node, Any]:
    """For each node the parameter (its placeholder) that it is made from by gathers and pure operators alone, before
    anything writes the parameter; `MIXED` where from several or with more than constants; None where from none."""
    made: dict[fx.Node, Any] = {}
    constant: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        operator = operator_of(node)
        copies = operator.kind in ("all_gather", "") if operator else is_pure(node)
        sources = {made[n] for n in inputs} - {None}
        made[node] = node if node in parameters else None
        if copies and constant.issuperset(inputs):
            constant.add(node)
        elif sources:
            (source, *others) = sources
            alone = copies and not others and all(made[n] or n in constant for n in inputs)
            made[node] = source if alone and source not in written else MIXED
        if is_mutating(node):
            written |= {made[n] for n in written_arguments(node)}
    return made


class Owners:
    """The parameter whose gradient alone an autograd node works on.

    ``leaves``: the placeholder of each parameter, by the tensor's id. ``forward``: the nodes that forward created for
    an autograd node, by its sequence number. ``made``: see `made_from`.
    """

    def __init__(self, leaves: Mapping[int, fx.Node], forward: Mapping[int, Sequence[fx.Node]], made: Mapping):
        self._leaves, self._forward, self._made = leaves, forward, made
        self._found: dict[Any, Any] = {}

    def of(self, start: Any) -> fx.Node | None:
        """The parameter that all paths from the autograd node ``start`` lead to, where forward made what they pass
        only from that parameter."""
        found, stack = self._found, [start]
        while stack:
            node = stack[-1]
            following = [n for n, _ in node.next_functions if n is not None]
            waiting = [n for n in following if n not in found]
            if waiting and node not in found:
                stack += waiting
            else:
                found[node] = found[node] if node in found else self._owner(node, following)
                stack.pop()
        return None if found[start] is MIXED else found[start]

    def _owner(self, node: Any, following: Sequence[Any]) -> Any:
        if (leaf := compat.leaf_of(node)) is not None:
            return self._leaves.get(id(leaf), MIXED)
        # The first that a parameter takes part in: operators that need no gradient may have run since.
        first = next((made for n in self._forward.get(node._sequence_nr(), ()) if (made := self._made[n])), None)
        owners = {first, *map(self._found.__getitem__, following)} - {None}
        return owners.pop() if len(owners) == 1 else MIXED if owners else None
