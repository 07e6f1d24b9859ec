"""What an attention mask says, where the graph determines it: which keys each query sees."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import argument, is_cast, is_overload, is_pure, literal, packet
from stepgraph.passes.attention.nodes import mask_of

aten = torch.ops.aten

#: At most this is added to a score to hide a key: -inf, or the least number of fp16, as torch does for cuDNN.
#: Next to a key that is seen, which each query of a band has, its weight is 0 in fp32 either way.
HIDDEN = -30_000.0

#: The least number that can be added to the scores of a query that sees no key so that they still differ, roughly: that
#: of fp16, which torch adds for cuDNN.
_LEAST = torch.finfo(torch.float16).min

_AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
_VIEWS = (aten.expand.default, aten.unsqueeze.default)

#: Elements of a mask in memory, and of what it is made from, above which it is not evaluated: 16k x 16k.
MAX_ELEMENTS = 2**28

#: The same for a mask of each head, as ALiBi's: hardly ever a band, and on one core 2**28 elements take a minute.
_MAX_OF_HEADS = 2**24


@dataclass(frozen=True)
class Band:
    """Query ``i`` sees the keys ``i - left`` to ``i + right`` and no others. None: all keys on that side."""

    left: int | None
    right: int | None

    @property
    def sees_all(self) -> bool:
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0


@dataclass(frozen=True)
class Pairs:
    """Query ``i`` sees key ``j`` where the node ``visible`` is true: booleans that each step makes. ``views``:
    operators and arguments that make it (B, H, T, S). ``hidden``: what is added to the scores of the other keys."""

    visible: fx.Node
    views: tuple[tuple[Callable, tuple[Any, ...]], ...]
    hidden: float


class Masks:
    """The masks of one graph. Each distinct mask is evaluated once, on the CPU."""

    def __init__(self, graph: fx.Graph):
        self._aliases = Aliases(graph)
        self._values: dict[fx.Node, torch.Tensor | str] = {}
        self._bands: dict[tuple[fx.Node, bool], Band | str] = {}
        self._all_see: dict[tuple[fx.Node, bool], bool] = {}

    def seen(self, attention: fx.Node) -> "Band | Pairs | str":
        """The keys that each query of the node ``attention`` sees, by its mask or ``is_causal``, or why they are not
        known."""
        mask, causal = mask_of(attention), bool(argument(attention, "is_causal"))
        if mask is None:
            return Band(None, 0 if causal else None)
        return "it is causal and has a mask" if causal else self.of(mask)

    def of(self, mask: fx.Node | None) -> "Band | Pairs | str":
        """The keys that each query sees under ``mask`` (B, H, T, S), which is added to the scores."""
        band = Band(None, None) if mask is None else self.band(mask)
        return self._pairs(mask, band) if isinstance(band, str) else band

    def band(self, mask: fx.Node) -> Band | str:
        """The band that ``mask`` (B, H, T, S), added to the scores, leaves visible, or why it is none."""
        found = _booleans(mask)
        return self._band_of(mask, False) if found is None else self._band_of(found.visible, True)

    def all_see(self, mask: fx.Node, shown: bool) -> bool:
        """Whether the graph says that each query sees a key by the booleans ``mask`` (.., T, S), true where it does if
        ``shown``, and where it does not otherwise."""
        if (mask, shown) not in self._all_see:
            value = self._value(mask)
            self._all_see[mask, shown] = isinstance(value, torch.Tensor) and bool((value == shown).any(-1).all())
            self._values.pop(mask)
        return self._all_see[mask, shown]

    def within(self, pairs: "Pairs") -> Band:
        """A band that holds all ``pairs``, where the graph says so: it joins a band and other conditions by `and`."""
        queue = [pairs.visible]
        while queue:
            node = queue.pop()
            if node.target in _AND or node.target in _VIEWS:
                queue += node.all_input_nodes
            elif isinstance(band := self._band_of(node, True), Band):
                return band
        return Band(None, None)

    def _band_of(self, node: fx.Node, booleans: bool) -> Band | str:
        if (node, booleans) not in self._bands:
            value = self._value(node)
            self._bands[node, booleans] = value if isinstance(value, str) else band_of(value)
            self._values.pop(node)  # it may be large, and its band is all that is asked for
        return self._bands[node, booleans]

    def _pairs(self, mask: fx.Node, why: str) -> "Pairs | str":
        found = _booleans(mask)
        if found is None:
            return f"{why}, and the graph does not make it of booleans"
        if self._aliases.writes.get(self._aliases.root(found.visible)):
            return why
        if -math.inf < found.hidden < _LEAST:
            return f"{why}, and what it adds to hide a key, {found.hidden:.3g}, makes all keys equal where it hides all"
        return found

    def _value(self, node: fx.Node) -> torch.Tensor | str:
        """What ``node`` is in every step, or why that is not known."""
        path = [node]  # no recursion: a mask may depend on activations of a deep model
        while path:
            found = self._values.get(path[-1])
            found = self._evaluate(path[-1]) if found is None else found
            if isinstance(found, fx.Node):
                path.append(found)
            else:
                self._values[path.pop()] = found
        return self._values[node]

    def _evaluate(self, node: fx.Node) -> torch.Tensor | str | fx.Node:
        """What ``node`` is in every step, why that is not known, or a node that comes first."""
        if (held := literal(node)) is not None:
            return held.cpu()
        value = node.meta.get("val")
        if not (is_overload(node) and is_pure(node) and isinstance(value, torch.Tensor)):
            return f"its mask depends on {node.name}"
        if self._aliases.writes.get(self._aliases.root(node)):
            return f"its mask depends on {node.name}, which is written to"
        for source in node.all_input_nodes:
            if not isinstance(found := self._values.get(source, source), torch.Tensor):
                return found
        inputs = {source: self._values[source] for source in node.all_input_nodes}
        sizes = [1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True)]
        most = _MAX_OF_HEADS if len(sizes) > 2 and sizes[-3] > 1 and min(sizes[-2:]) > 1 else MAX_ELEMENTS
        if math.prod(sizes) > most:
            return f"its mask has {math.prod(sizes):,} elements, more than {most:,}"
        args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
        if "device" in kwargs:
            kwargs = kwargs | {
                "device": torch.device("cpu"),
                **({"pin_memory": False} if "pin_memory" in kwargs else {}),
            }
        with torch.no_grad():
            return node.target(*args, **kwargs)


def _booleans(mask: fx.Node) -> Pairs | None:
    """What ``mask`` was made of: every layer makes its own bias of the same booleans. None for another mask."""
    node, views = mask, []
    while node.target in _VIEWS or node.target in (aten._to_copy.default, aten.slice.Tensor):
        if node.target is aten.slice.Tensor:
            if not _only_aligns(node):
                return None
            node = node.args[0]
        views += [node] if node.target in _VIEWS else []
        node = node.args[0]
    if node.target is not aten.where.self or len(node.args) != 3:
        return None
    visible, *numbers = node.args
    yes, no = map(number_of, numbers)
    if yes != 0 or no is None or no > HIDDEN or visible.meta["val"].shape != node.meta["val"].shape:
        return None
    return Pairs(visible, tuple((view.target, _hashable(view.args[1:])) for view in reversed(views)), no)


def _hashable(arguments: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(a) if isinstance(a, list) else a for a in arguments)


def _only_aligns(node: fx.Node) -> bool:
    """Whether the slice ``node`` is what was padded before: so torch aligns a mask for its memory-efficient kernel."""
    padded = node.args[0]
    if padded.target is not aten.constant_pad_nd.default or padded.args[1][0] or argument(node, "start"):
        return False
    return argument(node, "step") == 1 and node.meta["val"].shape == padded.args[0].meta["val"].shape


def number_of(value: object) -> float | None:
    """The one number that an argument is in every step."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, fx.Node) or value.meta["val"].numel() != 1:
        return None
    if value.target in (aten.scalar_tensor.default, aten.full.default):
        return number_of(value.args[-1])
    if value.target is aten.zeros.default:
        return 0.0
    if is_cast(value) or packet(value) in (aten.view, aten._unsafe_view, aten.expand, aten.clone):
        return number_of(value.args[0])
    held = literal(value)
    return None if held is None else float(held)


def band_of(mask: torch.Tensor) -> Band | str:
    """The band that ``mask`` leaves visible, or why it is none.

    Args:
        mask: (..., T, S): booleans, True where a query sees a key, or numbers that are added to the scores. All but the
            last two dimensions must repeat one (T, S) mask.
    """
    once = mask[(0,) * (mask.ndim - 2)] if _is_expanded(mask) else mask
    if (once if mask.dtype is torch.bool else once == 0).all():
        return Band(None, None)
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return f"a mask of shape {tuple(mask.shape)}"
    rows = mask.shape[-1]
    first, *others = once.reshape(-1, rows, rows)
    if any(not torch.equal(first, other) for other in others):
        return "its mask differs between sequences or heads"
    if first.dtype is not torch.bool:
        if not ((first == 0) | (first <= HIDDEN)).all():
            return "its mask adds other values than 0 and what hides a key"
        first = first == 0
    here = torch.arange(rows)
    # The first and the last key that each query sees, as distances.
    left = here - first.to(torch.uint8).argmax(1)
    right = (rows - 1 - first.flip(1).to(torch.uint8).argmax(1)) - here
    band = Band(int(left.max()), int(right.max()))
    distance = here[:, None] - here[None, :]
    if not torch.equal(first, (distance <= band.left) & (-distance <= band.right)):
        return "its mask is not a band along the diagonal"
    return Band(None if band.left == rows - 1 else band.left, None if band.right == rows - 1 else band.right)


def _is_expanded(mask: torch.Tensor) -> bool:
    """Whether ``mask`` (..., T, S) holds one (T, S) mask, by its strides."""
    return all(mask.shape[d] == 1 or mask.stride(d) == 0 for d in range(mask.ndim - 2))
