"""Splits a flat graph into consecutive pieces, runs them, and finds the nodes that need the host."""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from stepgraph.graph.provenance import provenance

aten = torch.ops.aten
_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def split(module: fx.GraphModule, group_of: Callable[[fx.Node], Any]) -> fx.GraphModule:
    """``module`` as a module that calls its pieces in order.

    A piece is a longest run of consecutive operators with equal ``group_of``; the piece's submodule keeps it as
    ``.group``. A getitem stays with the operator it takes apart.
    """
    pieces: dict[fx.Node, int] = {}
    groups: list[Any] = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in pieces:
            pieces[node] = pieces[node.args[0]]
            continue
        group = group_of(node)
        if not groups or groups[-1] != group:
            groups.append(group)
        pieces[node] = len(groups) - 1
    result = split_module(module, module, pieces.__getitem__, keep_original_order=True)
    for i, group in enumerate(groups):
        getattr(result, f"submod_{i}").group = group
    return result


class Program:
    """Runs a graph, node by node, without holding what a piece is the last to read.

    A call in Python keeps its arguments alive until it returns. A piece with a method ``boxed`` takes them in a list
    instead and empties it, so that what forward saved is freed while backward runs. ``on_node``: called with each
    node before it runs.
    """

    def __init__(self, module: fx.GraphModule, on_node: Callable[[fx.Node], None] | None = None):
        self.module, self.on_node = module, on_node
        self.dies_in: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        position = {node: i for i, node in enumerate(module.graph.nodes)}
        for node in module.graph.nodes:
            if node.op != "output":
                self.dies_in[max(node.users, key=position.__getitem__, default=node)].append(node)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        env: dict[fx.Node, Any] = {}
        values = iter(inputs)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(values)
            elif node.op == "get_attr":
                env[node] = getattr(self.module, node.target)
            elif node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            else:
                if self.on_node:
                    self.on_node(node)
                env[node] = self._run(node, env)
                if not node.users:
                    del env[node]

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        for dead in self.dies_in[node]:
            env.pop(dead, None)
        if node.op == "call_function":
            return node.target(*args, **kwargs)
        piece = getattr(self.module, node.target)
        if isinstance(piece, fx.GraphModule):
            return piece(*args)
        boxed = list(args)
        del args
        return piece.boxed(boxed)


def tensors_of(node: fx.Node) -> Iterable[torch.Tensor]:
    """Fake tensors that the node reads or makes."""
    for n in (node, *node.all_input_nodes):
        value = n.meta.get("val")
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor))


def needs_host(node: fx.Node) -> str | None:
    """Why ``node`` cannot be inside a CUDA graph, or None."""
    if node.op == "call_module" or node.op in ("placeholder", "get_attr", "output"):
        return None
    if any(tag in getattr(node.target, "tags", ()) for tag in _READS_VALUES):
        return "its result depends on values the host must read"
    devices = {t.device.type for t in tensors_of(node)}
    if devices - {"cuda"}:
        return f"it works on {' and '.join(sorted(devices))} tensors"
    return None


def describe(node: fx.Node) -> str:
    """``name (operator) in module path at file:line``."""
    found = provenance(node)
    where = f" in {found.path or 'the model'} at {found.source}" if found else ""
    return f"{node.name} ({node.target}){where}"
