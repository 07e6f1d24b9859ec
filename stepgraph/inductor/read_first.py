"""Clones of inputs that a compiled piece would read only after it has written them.

Inductor writes inputs in a graph's last nodes, in the order of the inputs, and drops copies of tensors:
``c.copy_(b); b.neg_()`` becomes ``copy_(b, neg); copy_(c, b)``, so ``c`` gets the new value of ``b``. If an input is
written, Inductor also runs operators that change a part of it (``slice_scatter``) in its memory, where their result is
overwritten before it is copied or returned. torch.compile has the second fault too. Before -> after:
``copy_(c, b)`` -> ``copy_(c, clone)``, the clone made before ``b`` is written; likewise for results.
"""

from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.facts import is_view

parts = compat.inductor()
aten = torch.ops.aten
_OF_A_PART = (aten.index_put, aten._unsafe_index_put, aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter)
_OF_A_PART += (aten.as_strided_scatter,)


class ReadFirst(parts.CustomGraphPass):
    """Runs after Inductor's passes that drop copies, and before the ones that write in place. ``then``: passes that the
    user set there, which run first."""

    def __init__(self, then: tuple[Any, ...] = ()) -> None:
        self.then = then

    def uuid(self) -> Any:
        others = [p.uuid() if isinstance(p, parts.CustomGraphPass) else None for p in self.then]
        return None if None in others else ("stepgraph.read_first", *others)

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.then:
            one(graph)
        written: dict[fx.Node, fx.Node] = {}  # an input, and the node that writes it
        for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
            if node.args[0].op == "placeholder":
                written.setdefault(node.args[0], node)
                _read_first(node, [node.args[1]], written)
        output = graph.output_node()
        _read_first(output, output.all_input_nodes, written)


def _read_first(reader: fx.Node, sources: list[fx.Node], written: dict[fx.Node, fx.Node]) -> None:
    for source in sources:
        memory, changed = source, False
        while is_view(memory) or getattr(memory.target, "overloadpacket", None) in _OF_A_PART:
            changed |= not is_view(memory)
            memory = memory.args[0]
        if (first := written.get(memory)) is None:
            continue
        if changed and first.args[1] is source:  # that is what the input becomes
            continue
        with reader.graph.inserting_before(first):
            clone = reader.graph.call_function(aten.clone.default, (source,))
        clone.meta["val"] = source.meta["val"].clone()
        reader.replace_input_with(source, clone)
