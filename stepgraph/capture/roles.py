"""What each collective of a captured step is for, recorded where it is known: at the end of the trace.

A collective that gathers what is made from one parameter alone (and constants) gathers that parameter. One that runs in
backward where autograd works on what forward made from one parameter alone reduces that parameter's gradient; whatever
reads its result finishes the gradient. All others are of activations.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from stepgraph import compat
from stepgraph.capture.lineage import made_from
from stepgraph.graph.collectives import group_of, operator_of, set_group, stage_of
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
        if role_of(node):  # declared by what calls it
            continue
        if role := _role(node, step.axes, names, made, reducing.get(node)):
            set_role(node, role)


def declare(result: torch.Tensor, kind: str, axis: str) -> None:
    """In a trace of a step, the collective that ``result`` waits for has the role ``kind`` over ``axis``."""
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
