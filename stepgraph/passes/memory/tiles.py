"""Token-wise computation in tiles of the sequence: MLPs, norms, projections, the head and its loss.

Matches: regions of the graph whose operators compute token by token (see `rows`), within one repeated block, in forward
or in backward, with a product in them: all between two attentions. Before -> after, for a region y, dw = f(x, w):

    y, dw = f(x, w)   ->   y_1, dw_1 = f(x[:n], w); y_2, dw_2 = f(x[n:2n], w); ...
                           y = cat(y_1, y_2, ...); dw = dw_1 + dw_2 + ...

Results inside a forward region that backward reads are recomputed in backward, tile by tile, from the region's inputs.
Wide intermediate results, such as those of an MLP, exist for one tile at a time and do not grow with the sequence.
Tiles are nodes of the flat graph, one tile after the other.
Tier numerics: a product of fewer rows may take another kernel, and sums over tokens (gradients of weights, the loss)
add up tiles: products in the gradient's dtype, rounded once a tile, all else in fp32. The order is fixed.
Preconditions: a flat graph with phases, shapes that are numbers. Nodes that draw random numbers, and writes outside a
region, are not crossed. Where `fuse_loss` computes the head and its loss in parts, they are left to it.
Source: Bekman et al., Arctic Long Sequence Training (2025), for tiled MLPs and losses.
"""

import operator
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, fake_value
from stepgraph.graph.facts import is_mutating, is_overload, is_random, is_view, tensor_bytes
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.step_graph import StepGraph, name_of
from stepgraph.graph.values import BatchLeaf, Value
from stepgraph.options import StepOptions
from stepgraph.passes.contract import PassReport, Target, register
from stepgraph.passes.memory.policy import check_tiles, parse_policy
from stepgraph.passes.memory.recompute import Plan
from stepgraph.passes.memory.rows import SIZED, SUM, Rows, Tile, Tokens, Use, Where, rule_of

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_MEAN, _TOTAL = 1, 2  # torch's numbers for reductions of a loss


@dataclass(frozen=True)
class TileOptions:
    """``tiles``: how many. ``search``: whether `stepgraph.lower` may make more of them for a peak of memory. ``head``:
    whether also outside repeated blocks, where head and loss are."""

    tiles: int = 1
    search: bool = False
    head: bool = True

    def __post_init__(self) -> None:
        check_tiles(self.tiles)


def _from_options(options: StepOptions) -> dict[str, object] | None:
    search = options.tiles == "auto" and parse_policy(options.memory).policy == "peak"
    tiles = 1 if options.tiles == "auto" else options.tiles
    head = options.passes != "default" or "fuse_loss" in options.disable_pass
    return {"tiles": tiles, "search": search, "head": head} if search or tiles > 1 else None


def _for_target(options: TileOptions, target: Target) -> TileOptions:
    return replace(options, head=options.head or target.device != "cuda")


@register("tile_sequence", "numerics", options=TileOptions(), from_options=_from_options, for_target=_for_target)
def tile_sequence(step: StepGraph, options: TileOptions, report: PassReport) -> None:
    """Compute what treats each token by itself in tiles of the sequence, in forward and again in backward."""
    if options.tiles == 1:
        return
    tokens = _tokens(step)
    if tokens is None:
        report.notes.append("no hidden state of samples and tokens, (B, S, D), is in the graph")
        return
    if not step.blocks and not options.head:
        report.notes.append(
            "the model declares no repeated blocks (nn.ModuleList): which products are its head's is not known"
        )
        return
    _out_of_place(step)
    before, plan = Regions(step, tokens, options.head), Plan(step)
    inside: dict[fx.Node, Region | None] = dict.fromkeys(plan.nodes)
    inside |= {n: r for r in before.found for n, use in r.uses.items() if SUM not in _results(use)}
    again = {n for n in plan.candidates() if inside[n] and not plan.crosses(n, inside)}
    saved = again & plan.saved.keys()
    plan.rewrite(again)
    regions = Regions(step, tokens, options.head)
    tiles = tokens.tiles(options.tiles)
    report.matched = len(regions.found) + len(regions.left)
    lines = Counter(region.line() for region in regions.found)
    made: dict[tuple[str, Tile], fx.Node] = {}
    copies: dict[fx.Node, tuple[str, Tile]] = {}
    for region in reversed(regions.found):  # what a later one reads is still written
        _Writer(region, tokens, tiles, made, copies).write()
    for node, original in copies.items():
        if original in made:
            node.meta["recomputes"] = made[original].name
    report.changed = len(regions.found)
    report.summary = (
        f"{report.changed} of {report.matched} regions in {len(tiles)} tiles of {tokens.samples} x {tokens.length} "
        f"tokens; {len(saved)} results inside them ({sum(map(tensor_bytes, saved)) / 2**20:.0f} MiB) computed again"
    )
    report.notes += [f"{count} x {line}" for line, count in lines.items()]
    report.notes += [f"{count} x not in tiles: {why}" for why, count in Counter(regions.left).items()]
    if regions.mixing:
        shown = ", ".join(f"{count} x {name}" for name, count in regions.mixing.most_common(8))
        report.notes.append(f"not token-wise, so not tiled: {shown}")
    if not options.head:
        report.notes.append("the head and its loss are left to fuse_loss, which has parts of its own (loss_chunks)")


def _tokens(step: StepGraph) -> Tokens | None:
    """Samples and tokens of the batch, by the shape that most hidden states have."""
    shapes = Counter(
        tuple(value.shape[:2])
        for node in step.nodes("forward")
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.ndim == 3 and value.is_floating_point()
        if (step.block_of(node) is not None or not step.blocks) and all(type(n) is int for n in value.shape)
    )
    found = [shape for shape, _ in shapes.most_common() if shape[1] > 1]
    return Tokens(*found[0]) if found else None


def _out_of_place(step: StepGraph) -> None:
    """Let what writes over a result that nothing else reads, as norms add eps, give a result of its own: the same bits,
    and it can be recomputed."""
    aliases = Aliases(step.graph)
    for node in list(step.nodes("forward", "loss")):
        if not (is_overload(node) and is_mutating(node) and torch.Tag.pointwise in node.target.tags):
            continue
        written, here = node.args[0], node.target
        alone = written.op == "call_function" and len(written.users) == 1 and aliases.root(written) is written
        plain = getattr(getattr(aten, here.overloadpacket.__name__[:-1], None), here._overloadname, None)
        if alone and plain is not None and not is_random(node):
            node.target = plain
            if _form(fake_value(node)) != _form(node.meta["val"]):  # types are promoted
                node.target = here


def _form(value: torch.Tensor) -> tuple:
    return value.shape, value.stride(), value.dtype, value.device


def _results(use: Use) -> tuple[Where, ...]:
    return use.result if type(use.result) is tuple else (use.result,)


#: Where regions are sought.
_PHASES = ("forward", "loss", "backward")


@dataclass(eq=False)
class Region:
    """Nodes that are computed in tiles together. ``key``: the block, and whether in backward. ``known``: where each
    node has its rows. ``uses``: how each takes them. ``later``: other nodes that depend on these, among them."""

    key: tuple[str | None, bool]
    known: dict[fx.Node, object] = field(default_factory=dict)
    uses: dict[fx.Node, Use] = field(default_factory=dict)
    later: dict[fx.Node, None] = field(default_factory=dict)

    def depends(self, node: fx.Node) -> bool:
        """Whether ``node`` reads a result that exists only after the region."""
        return any(n in self.later or self.known.get(n) == SUM for n in node.all_input_nodes)

    def outside(self, node: fx.Node) -> list[fx.Node]:
        """The readers of ``node`` that are not in the region."""
        return [user for user in node.users if user not in self.uses]

    def line(self) -> str:
        path = re.sub(r"(?<![^.])\d+(?![^.])", "*", self.key[0] or "outside blocks")
        products = sum(node.target in _PRODUCTS for node in self.uses)
        return f"{'backward' if self.key[1] else 'forward'} of {path}: {len(self.uses)} operators, {products} products"


class Regions:
    """The regions of ``step`` worth tiles. ``left``: why others with products are not. ``mixing``: operators in between
    that do not compute token by token, with how many there are."""

    def __init__(self, step: StepGraph, tokens: Tokens, head: bool):
        self.found: list[Region] = []
        self.left: list[str] = []
        self.mixing: Counter[str] = Counter()
        self.aliases, self.tokens, self.nodes = Aliases(step.graph), tokens, list(step.graph.nodes)
        with_rows = set(step.placeholders(BatchLeaf, Value))  # what is made of the batch, except sums over all of it
        region: Region | None = None
        blocks: dict[str, str | None] = {}
        for node in step.nodes(*_PHASES):
            if is_mutating(node) or is_random(node):  # nothing moves over it
                self._close(region)
                region = None
            if with_rows.isdisjoint(node.all_input_nodes):
                if region and any(n in region.uses or n in region.later for n in node.all_input_nodes):
                    region.later[node] = None
                continue
            path = provenance(node).path
            if path not in blocks:
                blocks[path] = step.block_of(node)
            block = blocks[path]
            key, use = (block, phase_of(node) == "backward"), None
            if head or block is not None:
                if region and region.key == key and not region.depends(node):
                    use = self._use(node, region)
                if use is None and (use := self._use(node, fresh := Region(key))):
                    self._close(region)
                    region = fresh
            if use is None or use.result != SUM:
                with_rows.add(node)
            if use is not None:
                region.uses[node], region.known[node] = use, use.result
                continue
            if block is not None and rule_of(node) is None and not is_view(node):
                self.mixing[name_of(node.target)] += 1
            if region and any(n in region.uses or n in region.later for n in node.all_input_nodes):
                region.later[node] = None
        self._close(region)

    def _use(self, node: fx.Node, region: Region) -> Use | None:
        """How ``node`` takes rows as a part of ``region``; None where it cannot be computed in tiles."""
        rule, known = rule_of(node), region.known
        if rule is None or is_random(node) or is_mutating(node):
            return None
        use = rule(node, known, self.tokens)
        if use is None or any(n in known and known[n] != rows for n, rows in use.reads.items()):
            return None
        values, results = node.meta["val"], use.result
        pairs = zip(values, results, strict=True) if isinstance(values, (list, tuple)) else [(values, results)]
        made = [(value, rows) for value, rows in pairs if value is not None]  # a gradient that nothing asks for is None
        return use if all(rows == SUM or self.tokens.fit(value.shape, rows) for value, rows in made) else None

    def _close(self, region: Region | None) -> None:
        if region is None or not any(node.target in _PRODUCTS for node in region.uses):
            return
        for node, use in region.uses.items():
            writes = self.aliases.writes.get(self.aliases.root(node), ())
            writers = (self.nodes[p] for p in writes)  # clipping and the optimizer write when all tiles are done
            if any(w not in region.uses and phase_of(w) in _PHASES for w in writers):
                self.left.append(f"the result of {name_of(node.target)} is written in place by what is not in tiles")
            elif type(use.result) is tuple and not is_view(node) and region.outside(node):
                self.left.append(f"a result of {name_of(node.target)} is taken where tiles end")
            else:
                continue
            return
        self.found.append(region)


class _Writer:
    """Writes a region tile by tile in the place of its last node, and what the tiles give together. ``made``:
    what computes a node, by its name, in a tile. ``copies``: what repeats which of these in backward."""

    def __init__(
        self,
        region: Region,
        tokens: Tokens,
        tiles: list[Tile],
        made: dict[tuple[str, Tile], fx.Node],
        copies: dict[fx.Node, tuple[str, Tile]],
    ):
        self.region, self.tokens, self.tiles, self.uses = region, tokens, tiles, region.uses
        self.made, self.copies = made, copies
        self.last = next(reversed(region.uses))
        self.leaving = [node for node in region.uses if region.outside(node)]
        self.pieces: dict[fx.Node, list[fx.Node]] = {root: [] for n in self.leaving if (root := self._owner(n))}
        self.totals: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self.full: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        """Write the tiles; the region's nodes go."""
        first = next(iter(self.uses))
        delayed, node = [], first
        while node is not self.last:
            delayed += [node] if node in self.region.later else []
            node = node.next
        for tile in self.tiles:
            self._tile(tile)
        for node in self.pieces:
            self.full[node] = self._total(node) if self.uses[node].result == SUM else self._join(node)
        for node in self.leaving:
            readers, made = self.region.outside(node), self._whole(node)
            for reader in readers:
                reader.replace_input_with(node, made)
        at = self.last
        for node in delayed:
            at.append(node)
            at = node
        for node in reversed(self.uses):
            node.graph.erase_node(node)

    def _owner(self, node: fx.Node) -> fx.Node | None:
        """The node of the region whose memory ``node`` looks at; None if it looks at what enters the region."""
        while node in self.uses and is_view(node):
            node = node.args[0]
        return node if node in self.uses else None

    def _builder(self, node: fx.Node) -> Builder:
        return Builder(node, before=self.last)

    def _tile(self, tile: Tile) -> None:
        made: dict[fx.Node, fx.Node] = {}
        cuts: dict[tuple[fx.Node, Rows], fx.Node] = {}
        for node, use in self.uses.items():
            build = self._builder(node)

            def read(source: fx.Node, build: Builder = build, use: Use = use) -> fx.Node:
                """What the tile reads of ``source``."""
                rows = use.reads.get(source)
                if source in self.uses or rows is None:
                    return made.get(source, source)
                if (source, rows) not in cuts:
                    part = source
                    for dim, first, last in self.tokens.cut(tile, rows):
                        part = build(aten.slice.Tensor, part, dim, first, last)
                    cuts[source, rows] = part
                return cuts[source, rows]

            args, kwargs = fx.map_arg((node.args, node.kwargs), read)
            if node.target in SIZED:
                sizes = self.tokens.sizes(tile, use.result, node.meta["val"].shape)
                args = (_viewable(build, args[0], sizes, node), sizes, *args[2:])
            if use.result == SUM:
                self._sum(node, args, kwargs)
            elif node.target is aten.nll_loss_forward.default:
                part = build(node.target, *args[:3], _TOTAL, *args[4:])
                for i, one in enumerate(build.parts(part)):
                    self._add(node, i, one)
            else:
                made[node] = self.made[node.name, tile] = build(node.target, *args, **kwargs)
                if "recomputes" in node.meta:
                    self.copies[made[node]] = node.meta["recomputes"], tile
            if node in made and node in self.pieces:
                self.pieces[node].append(made[node])

    def _sum(self, node: fx.Node, args: tuple, kwargs: dict) -> None:
        """Add a tile to the sum over rows that ``node`` gives."""
        build = self._builder(node)
        wide = torch.promote_types(node.meta["val"].dtype, torch.float32)
        if node.target is aten.mm.default:
            total = build.add_product(self.totals.get((node, None)), *args)
            total.meta[KEEP_EAGER] = True  # as in the parts of a head, see `stepgraph.passes.loss.chunk`
            self.totals[node, None] = total
        elif node.target is not operator.getitem:
            self._add(node, None, build(node.target, *args, **kwargs | {"dtype": wide}))
        elif node.args[0].target is not aten.nll_loss_forward.default:
            self._add(node, None, build.cast(build(node.target, *args), wide))

    def _add(self, node: fx.Node, index: int | None, part: fx.Node) -> None:
        total = self.totals.get((node, index))
        self.totals[node, index] = self._builder(node)(aten.add.Tensor, total, part) if total else part

    def _total(self, node: fx.Node) -> fx.Node:
        """The sum of all tiles that ``node`` gives."""
        build = self._builder(node)
        if node.target is operator.getitem and node.args[0].target is aten.nll_loss_forward.default:
            loss, index = node.args
            total = self.totals[loss, index]
            mean = index == 0 and loss.args[3] == _MEAN
            return build(aten.div.Tensor, total, self.totals[loss, 1]) if mean else total
        return build.cast(self.totals[node, None], node.meta["val"].dtype)

    def _join(self, node: fx.Node) -> fx.Node:
        """The tiles of ``node`` in one tensor, with the strides that it has."""
        build, value, rows = self._builder(node), node.meta["val"], self.uses[node].result
        order = sorted(range(value.ndim), key=lambda dim: -value.stride(dim))
        place = {dim: i for i, dim in enumerate(order)}
        pieces = [build.permute(p, order) for p in self.pieces[node]]
        samples: dict[int, list[fx.Node]] = defaultdict(list)
        for tile, piece in zip(self.tiles, pieces, strict=True):
            joined = self.tokens.are_joined(rows)
            samples[0 if joined else tile.first].append(piece)
        parts = [build.cat(group, place[rows.token]) for group in samples.values()]
        whole = build.contiguous(build.cat(parts, place.get(rows.sample, 0)))
        return build.permute(whole, [place[d] for d in range(len(order))])

    def _whole(self, node: fx.Node) -> fx.Node:
        """What outside readers of ``node`` read instead: views of all tiles' results or of the region's inputs."""
        if node not in self.full and node in self.uses:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._whole)
            self.full[node] = self._builder(node)(node.target, *args, **kwargs)
        return self.full.get(node, node)


def _viewable(build: Builder, source: fx.Node, sizes: list[int], node: fx.Node) -> fx.Node:
    """``source``, or a dense copy of it where a view of its memory cannot have ``sizes``."""
    if node.target not in (aten.view.default, aten._unsafe_view.default) or source.meta["val"].is_contiguous():
        return source
    try:
        source.meta["val"].view(sizes)
    except (RuntimeError, ValueError):  # a part of several samples is not dense
        return build.copy(source)
    return source
