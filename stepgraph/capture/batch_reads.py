"""Batch values that Python reads while a step is traced, such as image grids or lengths.

Such a value decides which operators run and with which shapes, so it belongs to the form of the step. The integer
computation from the batch to each value is kept and runs on the host again before each call: a batch with equal values
runs the same graph, another one is captured again.
"""

import bisect
import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.batch import microbatch


class BatchReads:
    """Values that follow from those of a batch and of buffers: the computation of each, in the order of the trace.

    ``places``: for each placeholder of the trace whose values are known, the place of its leaf in the batch.
    ``buffers``: and the live buffer of each. ``open_sizes``: whether everything that Python reads is kept, because
    in a trace with symbolic sizes what follows from literals may depend on the sizes.
    """

    def __init__(
        self,
        places: Mapping[fx.Node, int],
        buffers: Mapping[fx.Node, torch.Tensor] = MappingProxyType({}),
        open_sizes: bool = False,
    ):
        self.open_sizes, self._size = open_sizes, compat.at_hint
        self._graph = fx.Graph()
        self._copies = {node: self._graph.placeholder(node.name) for node in (*places, *buffers)}
        self._leaves = {self._copies[node]: place for node, place in places.items()}
        self._buffers = {self._copies[node]: buffer for node, buffer in buffers.items()}
        self._constants: dict[fx.Node, torch.Tensor] = {}
        self._answers: dict[fx.Node, Any] = {}
        self._order: list[tuple[fx.Node, int]] = []  # a node of the trace and the number of questions so far, by which
        self._calls: list[fx.Node] = []  # the calls are ordered

    def __len__(self) -> int:
        return len(self._answers)

    def note(
        self, history: Mapping[fx.Node, torch.Tensor | None], function: Callable, args: Any, kwargs: Any, answer: Any
    ) -> None:
        """Python has learned ``answer``, which ``function`` gives; nodes of the trace are among its arguments.

        ``history``: the nodes that lead to these, and the tensors of literals among them.
        """
        self._copy(history)
        latest = next(iter(reversed(max(history).graph.nodes)))
        self._answers[self._call((latest, 1 + len(self)), function, tuple(args), dict(kwargs))] = answer

    def keep(self, history: Mapping[fx.Node, torch.Tensor | None], node: fx.Node) -> fx.Node:
        """Keep the computation of ``node`` for `values`, which takes what this gives. ``history``: see `note`."""
        self._copy(history)
        return self._copies[node]

    def _copy(self, history: Mapping[fx.Node, torch.Tensor | None]) -> None:
        for node in sorted(history.keys() - self._copies.keys()):
            if node.op == "get_attr":
                self._copies[node] = self._placeholder(node)
                self._constants[self._copies[node]] = history[node]
            else:
                self._copies[node] = self._call((node, 0), node.target, node.args, node.kwargs)

    def values(self, nodes: Sequence[fx.Node], leaves: Sequence[Any], k: int, n: int) -> list[torch.Tensor]:
        """What ``nodes``, of `keep`, are for microbatch ``k`` of ``n`` of a batch."""
        values = dict(self._constants)
        for node in self._graph.nodes if nodes else ():
            if node.op == "placeholder":
                if node in self._leaves:
                    values[node] = microbatch(leaves[self._leaves[node]].detach(), k, n).cpu()
                elif node in self._buffers:
                    values[node] = self._buffers[node].cpu()
            elif node not in self._answers:
                values[node] = computed(node, values)
        return [values[node] for node in nodes]

    @property
    def of_batch(self) -> bool:
        """Whether what Python has learned follows from the batch or from buffers."""
        return any(node.users for node in (*self._leaves, *self._buffers))

    def reads(self, node: fx.Node) -> bool:
        """Whether what Python has learned follows from ``node``, a placeholder of the trace."""
        return bool(self._copies[node].users)

    def hold(self, leaves: Sequence[Any], microbatches: int) -> bool:
        """Whether every microbatch of a batch of the same form gives the same answers. It waits for a GPU's."""
        if not self._answers:
            return True
        whole = {node: leaves[place].detach().cpu() for node, place in self._leaves.items() if node.users}
        buffers = {node: buffer.cpu() for node, buffer in self._buffers.items() if node.users}
        with compat.without_modes(), torch.no_grad():
            return all(
                self._holds(buffers | {node: microbatch(leaf, k, microbatches) for node, leaf in whole.items()})
                for k in range(microbatches)
            )

    def at(self, size: Callable[[Any], Any]) -> "BatchReads":
        """The same reads, of a trace with symbolic sizes, at the sizes that ``size`` gives."""
        other = copy.copy(self)
        other._size = size
        return other

    def close(self) -> None:
        """After the trace: forget it."""
        self._copies, self._order, self._calls = {}, [], []

    def _holds(self, values: dict[fx.Node, Any]) -> bool:
        values |= self._constants
        for node in self._graph.nodes:
            if node.op == "placeholder":
                continue
            try:
                values[node] = computed(node, values, self._size)
            except (RuntimeError, IndexError):  # the trace of this batch raises it at the model's line
                return False
            if node in self._answers and not _equal(values[node], self._answers[node]):
                return False
        return True

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:  # only its shape matters
            self._copies[node] = self._placeholder(node)
            self._copies[node].meta["val"] = node.meta["val"]
        return self._copies[node]

    def _placeholder(self, node: fx.Node) -> fx.Node:
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            return self._graph.placeholder(node.name)

    def _call(self, key: tuple[fx.Node, int], target: Callable, args: tuple, kwargs: dict) -> fx.Node:
        """A call of ``target`` at the place of ``key``."""
        args, kwargs = fx.map_arg((args, kwargs), self._copy_of)
        place = bisect.bisect(self._order, key)
        behind = self._calls[place : place + 1]
        with self._graph.inserting_before(behind[0]) if behind else contextlib.nullcontext():
            made = self._graph.call_function(target, args, kwargs)
        self._order.insert(place, key)
        self._calls.insert(place, made)
        return made


#: These read only the shape of their tensor argument.
_SHAPED = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")


def packet(node: fx.Node) -> str:
    """The name of the operator that ``node`` calls; "" for other nodes."""
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values matter to ``node``."""
    return [] if reads_shape(node) else node.all_input_nodes


def reads_shape(node: fx.Node) -> bool:
    """Whether ``node`` reads only the shape of its tensor."""
    return packet(node) in _SHAPED


def computed(node: fx.Node, values: Mapping[fx.Node, Any], size: Callable[[Any], Any] = compat.at_hint) -> Any:
    """The value of ``node`` from those of its sources, on the CPU; ``size`` gives the number for an open size."""

    def value(source: fx.Node) -> Any:
        if source in values:
            return compat.pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, values[source])
        like = source.meta["val"]  # only its shape matters
        return torch.empty((), dtype=like.dtype).expand([size(one) for one in like.shape])

    arguments = fx.map_arg((node.args, node.kwargs), value)
    arguments = compat.pytree.tree_map_only(torch.SymInt, size, arguments)
    args, kwargs = compat.pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), arguments)
    return node.target(*args, **kwargs)


def _equal(a: Any, b: Any) -> bool:
    """Whether two answers are the same: tensors, numbers (as text -0.0 is not 0.0, and NaN is NaN), and tuples."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and repr(a) == repr(b)
