"""Runs a graph node by node, and frees each value with the node that reads it last."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


class Interpreter:
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
            return piece.forward(*args)
        boxed = list(args)
        del args
        return piece.boxed(boxed)
