"""FlexAttention in the graph: its two operators, and the blocks of keys that they visit for each block of queries.

    attention(q, k, v, mask)     flex_attention(q, k, v, score, (T, S, *blocks, 128, 128, mask_graph), scale, options)
    attention_backward(dy, ..)   flex_attention_backward(q, k, v, out, lse, dy, ..)

These are the operators that a model's own call of ``flex_attention`` leaves in a capture, so that Inductor, CUDA graphs
and recomputation know them already. Blocks of 128 x 128 that the mask hides are skipped; in blocks that it cuts,
``mask_graph`` is evaluated for each pair.
- A band (causal: no key after the query; a window; everything): its blocks depend only on lengths, and are constants
  of the graph, made once on the device.
- Booleans that each step makes, as of packed documents: each step finds their blocks, once for all layers.
  The booleans stay for backward, 1 byte for each pair, instead of numbers in the dtype of attention.
Source: Dong et al., "Flex Attention", 2024; torch's ``torch/nn/attention/flex_attention.py``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from stepgraph import compat
from stepgraph.graph.edit import Builder
from stepgraph.graph.marks import VISIBLE_PAIRS
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.attention.mask import Band, Masks, Pairs

aten, higher_order = torch.ops.aten, torch.ops.higher_order

#: Queries and keys per block, torch's default: its kernels' tiles divide it.
BLOCK = 128


def visible_pairs(band: Band, queries: int, keys: int) -> int:
    """Pairs of a query and a key that ``band`` leaves visible. Causal: half of all, as costs have it elsewhere."""
    if band.is_causal or band.sees_all:
        return queries * keys // (2 if band.is_causal else 1)
    here = torch.arange(queries)
    first = torch.zeros_like(here) if band.left is None else (here - band.left).clamp(min=0)
    last = torch.full_like(here, keys - 1) if band.right is None else (here + band.right).clamp(max=keys - 1)
    return int((last - first + 1).clamp(min=0).sum())


def visited(band: Band, queries: int, keys: int) -> float:
    """The share of the blocks of keys that FlexAttention visits under ``band``."""
    cut, whole = block_kinds(band, queries, keys)
    return (cut | whole).float().mean().item()


def block_kinds(band: Band, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks that ``band`` cuts, blocks that it leaves whole): each (blocks of queries, blocks of keys), booleans.

    A block that reaches beyond the last query or key counts as cut.
    """
    left = queries if band.left is None else band.left
    right = keys if band.right is None else band.right
    (rows, last_rows), (columns, last_columns) = (
        (first := torch.arange(0, length, BLOCK), (first + BLOCK - 1).clamp(max=length - 1))
        for length in (queries, keys)
    )
    # From a query back to a key: the least and the greatest distance in each block, between which there are all.
    least, greatest = rows[:, None] - last_columns, last_rows[:, None] - columns
    some = (greatest >= -right) & (least <= left)
    whole = (least >= -right) & (greatest <= left)
    whole &= (rows + BLOCK <= queries)[:, None] & (columns + BLOCK <= keys)
    return some & ~whole, whole


def kinds_of(visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `block_kinds`, for booleans (B, H, T, S): each (B, H, blocks of queries, blocks of keys)."""
    T, S = visible.shape[2:]
    padded = F.pad(visible, (0, -S % BLOCK, 0, -T % BLOCK))
    counts = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5), dtype=torch.int32)
    return (counts > 0) & (counts < BLOCK**2), counts == BLOCK**2


def block_tensors(cut: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a ``BlockMask`` for the blocks ``cut`` and ``whole`` (B, H, blocks of queries, blocks of keys):
    for each block of queries the number of blocks of keys and which they are, first the cut ones, then the whole ones;
    the same for each block of keys."""
    tensors = []
    for kinds in (cut, whole, cut.mT, whole.mT):
        columns = torch.sort(kinds.contiguous().int(), dim=-1, descending=True, stable=True).indices
        tensors += [kinds.sum(-1, dtype=torch.int32), columns.int()]
    return tensors


def _of_pairs(visible: torch.Tensor) -> list[torch.Tensor]:
    return block_tensors(*kinds_of(visible))


def _or_all(visible: torch.Tensor) -> torch.Tensor:
    """``visible`` (.., T, S), and everything for queries that see nothing: hidden by one finite number, keys weigh
    there as if all were seen."""
    return visible | ~visible.any(-1, keepdim=True)


class FlexNodes:
    """Makes FlexAttention's nodes in one step. ``masks``: of its graph."""

    def __init__(self, step: StepGraph, masks: Masks):
        self.step, self.masks = step, masks
        #: By what is seen, lengths and device: the operators' argument that says so, and tensors that it reads.
        self._known: dict[tuple, tuple[tuple[Any, ...], tuple[fx.Node, ...]]] = {}
        self._graphs: dict[tuple[Callable[[float], fx.GraphModule], float], fx.Node] = {}

    def forward(
        self, build: Builder, inputs: Sequence[fx.Node], seen: Band | Pairs, scale: float | None, cap: float = 0.0
    ) -> list[fx.Node]:
        """(the result, what its backward reads) of ``inputs`` (q, k and v), whose queries see the keys ``seen``. With
        a ``cap`` scores are ``cap * tanh(score)``."""
        made = build(higher_order.flex_attention, *inputs, self._graph(_score, cap), *self._rest(inputs, seen, scale))
        self._count(made, inputs, seen)
        return build.parts(made, 0, 1)

    def backward(
        self,
        build: Builder,
        grad: fx.Node,
        inputs: Sequence[fx.Node],
        saved: Sequence[fx.Node],
        seen: Band | Pairs,
        scale: float | None,
        cap: float = 0.0,
        of_log: fx.Node | None = None,
    ) -> list[fx.Node]:
        """The gradients of ``inputs``, from ``grad`` of the result, what `forward` gave, and ``of_log``: the gradient
        of the logarithms that it gave."""
        graphs = self._graph(_score, cap), self._graph(_score_gradient, cap)
        if of_log is None:  # which older torchs cannot do without
            of_log = build(aten.zeros_like.default, saved[1])
        made = build(
            higher_order.flex_attention_backward,
            *inputs, *saved, grad, of_log, *graphs, *self._rest(inputs, seen, scale),
        )  # fmt: skip
        self._count(made, inputs, seen)
        return build.parts(made, 0, 1, 2)

    def _rest(self, inputs: Sequence[fx.Node], seen: Band | Pairs, scale: float | None) -> tuple[Any, ...]:
        """The arguments that both directions share: what is seen, the scale, the options, what mask graphs read."""
        values = [node.meta["val"] for node in inputs]
        factor = 1 / math.sqrt(values[0].shape[3]) if scale is None else float(scale)
        shown, read = self._shown(seen, *_lengths(inputs), values[0])
        return shown, factor, compat.flex_kernel_options(*values), (), read

    def _count(self, node: fx.Node, inputs: Sequence[fx.Node], seen: Band | Pairs) -> None:
        band = seen if isinstance(seen, Band) else self.masks.within(seen)
        node.meta[VISIBLE_PAIRS] = visible_pairs(band, *_lengths(inputs))

    def _shown(
        self, seen: Band | Pairs, queries: int, keys: int, like: torch.Tensor
    ) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]]:
        key = (seen, queries, keys, like.device)
        if key not in self._known:
            make = self._of_band if isinstance(seen, Band) else self._of_pairs
            nodes, graph, read = make(seen, queries, keys, like)
            values = [node.meta["val"] for node in nodes]
            # Its fields in the order in which this torch hands them to the operators, with nodes for its tensors.
            layout = BlockMask((queries, keys), *values, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=noop_mask).as_tuple()[:-1]
            node_of = dict(zip(map(id, values), nodes, strict=True))
            mask_graph = self._attribute(f"_flex_mask_{len(self._known)}", graph)
            self._known[key] = (*(node_of.get(id(x), x) for x in layout), mask_graph), read
        return self._known[key]

    def _of_band(
        self, band: Band, queries: int, keys: int, like: torch.Tensor
    ) -> tuple[list[fx.Node], fx.GraphModule, tuple[fx.Node, ...]]:
        tensors = block_tensors(*(kinds[None, None] for kinds in block_kinds(band, queries, keys)))
        names = (f"_flex_blocks_{len(self._known)}_{i}" for i in range(len(tensors)))
        nodes = []
        for name, value in zip(names, (x.to(like.device) for x in tensors), strict=True):
            nodes.append(self._attribute(name, value))
            nodes[-1].meta["val"] = like.fake_mode.from_tensor(value)
        return nodes, _band_graph(band), ()

    def _of_pairs(
        self, pairs: Pairs, queries: int, keys: int, like: torch.Tensor
    ) -> tuple[list[fx.Node], fx.GraphModule, tuple[fx.Node, ...]]:
        build = Builder(pairs.visible, after=pairs.visible)
        visible = pairs.visible
        if pairs.hidden > -math.inf:
            visible = build.traced(_or_all, visible)
        for target, arguments in pairs.views:
            visible = build(target, visible, *arguments)
        while (value := visible.meta["val"]).ndim < 4:
            visible = build(aten.unsqueeze.default, visible, 0)
        if value.shape[2:] != (queries, keys):  # one row for all queries, as of padded keys
            visible = build(aten.expand.default, visible, [*value.shape[:2], queries, keys])
            value = visible.meta["val"]
        shared = [dim for dim in (0, 1) if value.shape[dim] == 1 or value.stride(dim) == 0]
        for dim in shared:
            visible = build(aten.slice.Tensor, visible, dim, 0, 1)
        nodes = build.traced(_of_pairs, visible)
        table = build(aten.squeeze.dims, visible, shared)
        return nodes, _pairs_graph(shared), (table,)

    def _graph(self, make: Callable[[float], fx.GraphModule], cap: float) -> fx.Node:
        if (make, cap) not in self._graphs:
            self._graphs[make, cap] = self._attribute(f"_flex{make.__name__}_{len(self._graphs)}", make(cap))
        return self._graphs[make, cap]

    def _attribute(self, name: str, value: torch.Tensor | fx.GraphModule) -> fx.Node:
        """A node, before all operators, that reads ``value``, which the step's module keeps as ``name``."""
        if isinstance(value, torch.Tensor):
            self.step.module.register_buffer(name, value, persistent=False)
        else:
            self.step.module.add_module(name, value)
        with self.step.graph.inserting_after(self.step.placeholders()[-1]):
            return self.step.graph.get_attr(name)


def _lengths(inputs: Sequence[fx.Node]) -> tuple[int, int]:
    return inputs[0].meta["val"].shape[2], inputs[1].meta["val"].shape[2]


# What the operators call for a score, for its gradient, and for a pair in a block that the mask cuts


def _score(cap: float) -> fx.GraphModule:
    """(score, batch, head, query, key) -> the score as it is; with a ``cap`` that times the score's tanh."""
    graph = fx.Graph()
    score, *_ = [graph.placeholder(name) for name in ("score", "b", "h", "q", "kv")]
    call = graph.call_function
    graph.output(call(aten.mul.Tensor, (call(aten.tanh.default, (score,)), cap)) if cap else score)
    return fx.GraphModule({}, graph)


def _score_gradient(cap: float) -> fx.GraphModule:
    """(score, batch, head, query, key, gradient) -> the gradients of the first five."""
    graph = fx.Graph()
    score, *_, gradient = [graph.placeholder(name) for name in ("score", "b", "h", "q", "kv", "gradient")]
    if cap:
        call = graph.call_function
        tanh = call(aten.tanh.default, (score,))
        slope = call(aten.rsub.Scalar, (call(aten.mul.Tensor, (tanh, tanh)), 1.0))
        gradient = call(aten.mul.Tensor, (gradient, call(aten.mul.Tensor, (slope, cap))))
    graph.output([gradient, None, None, None, None])
    return fx.GraphModule({}, graph)


def _band_graph(band: Band) -> fx.GraphModule:
    """(batch, head, query, key) -> whether the query sees the key."""
    graph = fx.Graph()
    b, _, q, kv = (graph.placeholder(name) for name in ("b", "h", "q", "kv"))
    call = graph.call_function
    if band.sees_all:
        shown = call(aten.new_ones.default, (b, []), {"dtype": torch.bool})
    elif band.is_causal:
        shown = call(aten.ge.Tensor, (q, kv))
    else:
        distance = call(aten.sub.Tensor, (q, kv))
        sides = [call(aten.le.Scalar, (distance, band.left))] if band.left is not None else []
        sides += [call(aten.ge.Scalar, (distance, -band.right))] if band.right is not None else []
        shown = sides[0] if len(sides) == 1 else call(aten.logical_and.default, tuple(sides))
    graph.output(shown)
    return fx.GraphModule({}, graph)


def _pairs_graph(shared: Sequence[int]) -> fx.GraphModule:
    """(batch, head, query, key, booleans) -> whether the query sees the key. ``shared``: dimensions that the booleans
    lack, since all sequences (0) or heads (1) have the same."""
    graph = fx.Graph()
    *indices, table = (graph.placeholder(name) for name in ("b", "h", "q", "kv", "table"))
    kept = [index for dim, index in enumerate(indices) if dim not in shared]
    graph.output(graph.call_function(aten.index.Tensor, (table, kept)))
    return fx.GraphModule({}, graph)
