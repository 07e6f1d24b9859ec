"""Calls of ``torch.utils.checkpoint`` that a captured step runs twice, as eager does.

Eager runs a checkpointed function again in backward, on what its tensors hold then. Where that is what they held in
forward, and nothing is written, the second run changes no bit: the graph has one run, and a pass may recompute its
results. Any other call, such as one with a BatchNorm, a counter or a moving average inside, is traced twice, with the
random numbers of its first run.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.facts import is_mutating
from stepgraph.graph.provenance import phase_of, provenance

aten = torch.ops.aten


def calls_to_repeat(graph: fx.Graph) -> frozenset[int]:
    """The calls of which a second run would write again into what was there before the first one, or would read what
    forward has written since. ``graph``: a trace of forward in which each call ran once."""
    aliases, found = Aliases(graph), set()
    call = {node: place.checkpoint if (place := provenance(node)) else None for node in graph.nodes}
    if set(call.values()) == {None}:
        return frozenset()
    nodes = list(aliases.position)
    for node, inside in call.items():
        if inside is None or inside in found or node.op != "call_function":
            continue
        written = written_arguments(node) if is_mutating(node) else []
        outside = [aliases.root(source) for source in node.all_input_nodes if call[aliases.root(source)] != inside]
        later = [nodes[at] for root in outside for at in aliases.writes.get(root, ()) if at > aliases.position[node]]
        if any(aliases.root(w) in outside for w in written) or any(phase_of(w) in ("forward", "loss") for w in later):
            found.add(inside)
    return frozenset(found)


class RunAgain(Exception):
    """Ends a trace in which each call ran once: ``calls`` must run twice."""

    def __init__(self, calls: Collection[int]):
        super().__init__()
        self.calls = calls


class Repeats(compat.TorchDispatchMode):
    """The random numbers that ``calls`` draw in their first run, for their second one.

    ``where``: module path and source line of what runs.
    """

    supports_higher_order_operators = True

    def __init__(self, calls: Collection[int], where: Callable[[], str]):
        super().__init__()
        self.calls, self._where = calls, where
        self._first: list[list[torch.Tensor]] = []  # of open calls, outer ones first
        self._again: list[Iterator[torch.Tensor]] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[list[torch.Tensor]]:
        """The first run of a call; gives the numbers that it draws."""
        self._first.append([])
        try:
            yield self._first[-1]
        finally:
            self._first.pop()

    @contextlib.contextmanager
    def again(self, drawn: Sequence[torch.Tensor]) -> Iterator[None]:
        """The second run of a call that has ``drawn`` these numbers."""
        self._again.append(iter(drawn))
        try:
            yield
        finally:
            self._again.pop()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._first or self._again) or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        self._check(func, args, kwargs)
        if self._again:
            numbers = next(self._again[-1])
            if func is aten.native_dropout.default:
                scale = 1 / (1 - args[1]) if args[1] < 1 else 0.0
                made = aten.native_dropout_backward.default(args[0], numbers, scale), numbers
            else:
                made = args[0].copy_(numbers) if func._schema.is_mutable else numbers.clone()
        else:
            made = func(*args, **kwargs)
            numbers = made[1] if func is aten.native_dropout.default else made.clone()
        for drawn in self._first:
            drawn.append(numbers)
        return made

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise unless the numbers depend on no tensor, and so equal the first run's."""
        given = [leaf for leaf in compat.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shaped = func._schema.is_mutable or func.overloadpacket.__name__.endswith("_like")
        if len(given) > shaped and func is not aten.native_dropout.default:
            raise CaptureError(
                f"{self._where()} draws random numbers by {func} from values of tensors, under torch.utils.checkpoint "
                "of what writes its buffers; draw them outside of the checkpointed function"
            )


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return named.get("dropout_p", 1) != 0
