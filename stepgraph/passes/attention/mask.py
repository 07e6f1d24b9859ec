"""What an attention mask says, where the graph alone determines it: which keys each query sees."""

from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import is_overload, is_pure

aten = torch.ops.aten

#: At most this is added to a score to hide a key: -inf, or the least number of fp16, as torch does for cuDNN.
#: Next to a key that is seen, which each query of a band has, its weight is 0 in fp32 either way.
HIDDEN = -30_000.0

#: Elements of a mask, and of what it is made from, above which it is not evaluated: 16k x 16k.
MAX_ELEMENTS = 2**28


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


class Masks:
    """The masks of one graph. Each distinct mask is evaluated once, on the CPU."""

    def __init__(self, graph: fx.Graph):
        self._aliases = Aliases(graph)
        self._values: dict[fx.Node, torch.Tensor | str] = {}
        self._bands: dict[fx.Node, Band | str] = {}

    def band(self, mask: fx.Node) -> Band | str:
        """The band that ``mask`` (B, H, T, S), added to the scores, leaves visible, or why it is none."""
        source = self._boolean(mask)
        key = (mask, False) if source is None else (source, True)
        if key not in self._bands:
            value = self._value(key[0])
            self._bands[key] = value if isinstance(value, str) else band_of(value)
            self._values.pop(key[0])  # it may be large, and its band is all that is asked for
        return self._bands[key]

    @staticmethod
    def _boolean(mask: fx.Node) -> fx.Node | None:
        """The booleans of what ``mask`` does not hide: every layer makes its own bias of the same ones."""
        node = mask
        while node.target in (aten.expand.default, aten._to_copy.default):
            node = node.args[0]
        if node.target is not aten.where.self or len(node.args) != 3:
            return None
        visible, yes, no = node.args
        if yes.target is not aten.scalar_tensor.default or no.target is not aten.scalar_tensor.default:
            return None
        return visible if yes.args[0] == 0 and no.args[0] <= HIDDEN else None

    def _value(self, node: fx.Node) -> torch.Tensor | str:
        """What ``node`` is in every step, or why that is not known."""
        if node not in self._values:
            self._values[node] = self._evaluate(node)
        return self._values[node]

    def _evaluate(self, node: fx.Node) -> torch.Tensor | str:
        value = node.meta.get("val")
        if not (is_overload(node) and is_pure(node) and isinstance(value, torch.Tensor)):
            return f"its mask depends on {node.name}"
        if self._aliases.writes.get(self._aliases.root(node)):
            return f"its mask depends on {node.name}, which is written to"
        inputs = {source: self._value(source) for source in node.all_input_nodes}
        for found in inputs.values():
            if isinstance(found, str):
                return found
        if value.numel() > MAX_ELEMENTS:
            return f"its mask has {value.numel():,} elements, more than {MAX_ELEMENTS:,}"
        args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
        if "device" in kwargs:
            kwargs = kwargs | {
                "device": torch.device("cpu"),
                **({"pin_memory": False} if "pin_memory" in kwargs else {}),
            }
        with torch.no_grad():
            return node.target(*args, **kwargs)


def band_of(mask: torch.Tensor) -> Band | str:
    """The band that ``mask`` leaves visible, or why it is none.

    Args:
        mask: (..., T, S): booleans, True where a query sees a key, or numbers that are added to the scores. All but the
            last two dimensions must repeat one (T, S) mask.
    """
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return f"a mask of shape {tuple(mask.shape)}"
    rows = mask.shape[-1]
    first, *others = [mask[(0,) * (mask.ndim - 2)]] if _is_expanded(mask) else mask.reshape(-1, rows, rows)
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
        return "its mask is no band along the diagonal"
    return Band(None if band.left == rows - 1 else band.left, None if band.right == rows - 1 else band.right)


def _is_expanded(mask: torch.Tensor) -> bool:
    """Whether ``mask`` (..., T, S) holds one (T, S) mask, by its strides."""
    return all(mask.shape[d] == 1 or mask.stride(d) == 0 for d in range(mask.ndim - 2))
