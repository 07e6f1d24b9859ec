"""Tags the regions that regional compilation takes: rotations, gated products, attention. All else stays eager, but for
norms, which `fuse_norm` has tagged.

Matches, forward and backward, by operators and dataflow:
- ``rope``: ``x * cos + rotate(x) * sin``, where ``rotate`` swaps the halves of the last dimension (and negates one, or
  the table of sines does), and its backward ``g * cos + rotate(g * sin)``.
- ``swiglu``: ``silu(gate) * up``, and both products and ``silu_backward`` of its backward.
- ``attention``: FlexAttention, on a GPU; Inductor compiles its backward for GPUs only.
Before -> after: nodes -> the same nodes, tagged; what is tagged already keeps its tag. Tier exact: nothing is
rewritten, but `inductor` compiles what is tagged. Preconditions: a flat graph with phases.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from torch import fx

from stepgraph.graph.facts import argument, aten, cast_behind, casts_of, higher_order, without_casts
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.inductor.regional import Region, region_of, tag
from stepgraph.passes.contract import PassReport, StepGraph, register

_SLICED_BACK = aten.slice_backward.default
_FLEX = (higher_order.flex_attention, higher_order.flex_attention_backward)


@register(
    "tag_regions",
    "exact",
    after=("fuse_norm",),
    serves="inductor",
    from_options=lambda options: {} if options.inductor == "regional" else None,
    forecast=False,  # a forecast of regional compilation counts each operator by itself
)
def tag_regions(step: StepGraph, options: object, report: PassReport) -> None:
    """Tag rotations, gated products and FlexAttention as regions to compile."""
    for kind, matcher in MATCHERS.items():
        for found in matcher(step):
            nodes = [node for node in found if region_of(node) is None]
            if nodes and not any(node.meta.get(KEEP_EAGER) for node in nodes):
                tag(nodes, Region(nodes[0].name, kind))
    regions = dict.fromkeys(map(region_of, step.graph.nodes))
    found = dict.fromkeys(MATCHERS, 0) | Counter(region.kind for region in regions if region is not None)
    report.matched = report.changed = sum(found.values())
    report.summary = f"{report.matched} regions to compile"
    counts = ", ".join(f"{kind} {count or 'found nothing'}" for kind, count in found.items())
    report.notes.append(f"regions: {counts}")


def rotations(step: StepGraph) -> Iterator[list[fx.Node]]:
    """The nodes of each rotary embedding, forward or backward."""
    for node in step.nodes("forward", "backward"):
        found = _swapped_halves(node)
        if found:
            source, swap = found
            nodes = _rotation_around(node, source)
            if nodes:
                yield [*swap, *nodes]


def _rotation_around(swapped: fx.Node, source: fx.Node) -> list[fx.Node]:
    """What completes ``swapped``, the ``source`` with its halves exchanged, to a rotation; nothing if it is none."""
    path, total = [], swapped
    while total.target is not aten.add.Tensor or total is swapped:
        steps = [u for u in total.users if u.target in (aten.add.Tensor, aten.mul.Tensor, aten._to_copy.default)]
        if len(steps) != 1 or len(path) > 3:
            return []
        total = steps[0]
        path.append(total)
    reached = {swapped, *path}
    straight = next((a for a in total.args if isinstance(a, fx.Node) and a not in reached), None)
    product = straight and without_casts(straight)
    if product is None or product.target is not aten.mul.Tensor:
        return []
    # What the other product must be of. Forward: x itself. Backward: g, where the source is g * sin.
    base = without_casts(source)
    backward = base.target is aten.mul.Tensor and base not in map(without_casts, product.all_input_nodes)
    bases = [without_casts(n) for n in base.all_input_nodes] if backward else [base]
    factors = [n for n in product.all_input_nodes if without_casts(n) in bases]
    if not factors:
        return []
    before = [*casts_of(source), *([base] if backward else []), *casts_of(factors[0])]
    return [*path[:-1], *casts_of(straight), product, *before, *_with_cast(total)]


def _swapped_halves(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """(x, the nodes in between) if ``node`` is ``x`` with the halves of a dimension swapped, maybe one negated."""
    if node.target is aten.cat.default and len(node.args[0]) == 2:
        parts = node.args[0]
        order = (1, 0)
    elif node.target is aten.add.Tensor and all(getattr(a, "target", None) is _SLICED_BACK for a in node.args):
        # The backward of two slices: each is put into zeros where its slice was, and the two are added.
        parts = [a.args[0] for a in node.args]
        order = tuple(1 - (argument(a, "start") != 0) for a in node.args)
    else:
        return None
    between: list[fx.Node] = list(node.args) if node.target is aten.add.Tensor else []
    sources = []
    for part in parts:
        if part.target is aten.neg.default:
            between.append(part)
            part = part.args[0]
        half = _half(part)
        if half is None:
            return None
        source, index, nodes = half
        sources.append((source, index))
        between += nodes
    if sources[0][0] is not sources[1][0] or tuple(index for _, index in sources) != order:
        return None
    return sources[0][0], [*between, node]


def _half(node: fx.Node) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """(x, 0 or 1, the nodes in between) if ``node`` is the first or the second half of ``x``'s last dimension."""
    if node.target is aten.slice.Tensor:
        source = node.args[0]
        value = source.meta["val"]
        dim, size = argument(node, "dim") % value.ndim, value.shape[-1]
        start, end = argument(node, "start") or 0, argument(node, "end")
        bounds = (start, size if end is None else min(end, size))
        halves = [(0, size // 2), (size // 2, size)]
        if dim != value.ndim - 1 or argument(node, "step") != 1 or bounds not in halves:
            return None
        return source, halves.index(bounds), [node]
    split = node.args[0] if node.args else None
    if isinstance(split, fx.Node) and split.target is aten.split.Tensor and len(split.meta["val"]) == 2:
        source, dim = split.args[0], argument(split, "dim")
        value = source.meta["val"]
        if dim % value.ndim == value.ndim - 1 and split.args[1] * 2 == value.shape[-1]:
            return source, node.args[1], [split, node]
    return None


def swiglus(step: StepGraph) -> Iterator[list[fx.Node]]:
    """The nodes of each product with a SiLU, and of each backward of one."""
    for node in step.nodes("forward", "backward"):
        if node.target is aten.silu.default:
            activation = _with_cast(node)
            products = [u for u in activation[-1].users if _product(u) and u not in activation]
            if products and products[0].meta["val"].shape == node.meta["val"].shape:
                yield [*activation, *_with_cast(products[0])]
        elif node.target is aten.silu_backward.default:
            product = without_casts(node.args[0])
            if _product(product):
                yield [product, *casts_of(node.args[0]), node, *_other_product(product, node.args[1])]


def _other_product(product: fx.Node, gate: fx.Node) -> list[fx.Node]:
    """Next to ``product``, the gradient of the activation, the gradient of what it is multiplied with."""
    for gradient in product.all_input_nodes:
        for user in gradient.users:
            if user is product or not _product(user):
                continue
            for factor in user.all_input_nodes:
                activation = without_casts(factor)
                if activation.target is aten.silu.default and activation.args[0] is gate:
                    return _with_cast(user)
    return []


def _product(node: fx.Node) -> bool:
    return node.target is aten.mul.Tensor and len(node.all_input_nodes) == 2


def attentions(step: StepGraph) -> Iterator[list[fx.Node]]:
    """Each FlexAttention and each of its backwards, on a GPU."""
    for node in step.nodes():
        if node.target in _FLEX and node.args[0].meta["val"].is_cuda:
            yield [node]


def _with_cast(node: fx.Node) -> list[fx.Node]:
    """``node``, and the cast that it goes through if nothing else reads it."""
    cast = cast_behind(node)
    return [node] if cast is None else [node, cast]


#: Kind -> what finds the nodes of each of its regions, in the order in which they claim nodes.
MATCHERS: dict[str, Callable[[StepGraph], Iterator[list[fx.Node]]]] = {
    "attention": attentions,
    "rope": rotations,
    "swiglu": swiglus,
}
