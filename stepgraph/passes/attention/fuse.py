"""Attention that a model writes out as products and a softmax, by one fused kernel, forward and backward together.

Matches, by what it computes and under any name: ``softmax(scale * q k' + biases) v`` and its backward. Between
the product and the softmax there may be casts, multiplications by numbers, sums with masks or other biases (ALiBi,
relative positions), ``where`` and ``masked_fill`` with a number that hides keys, and a soft cap ``c tanh(s / c)``;
before the softmax a column for a sink, as of GPT-OSS, which is dropped after it.
Before -> after:

    no bias, or one without a gradient    cuDNN's or the memory-efficient ``_scaled_dot_product_*_attention``, as torch
                                          would choose; later passes know those: a causal mask becomes ``is_causal``
    a bias with a gradient                the memory-efficient one, which returns that gradient
    a soft cap                            FlexAttention with the cap in its score function
    a sink                                FlexAttention, its result times the share of weights that the sink leaves

Without this pass every score is written and read several times, in fp32 where the model asks for it.
Tier numerics: scores are not rounded to bf16 on the way, and sums have another order. Preconditions: a GPU; queries,
keys and values in bf16 or fp16 before casts that only widen; no dropout; nothing else reads scores or weights.
Source: Dao et al., "FlashAttention", 2022; Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from stepgraph.costs.attention import Case
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread, in_strides_of, take_place
from stepgraph.graph.facts import argument, factor_of, is_cast, is_view, only_user, packet, permutation, swapped
from stepgraph.passes.attention.backends import backward_nodes, forward_nodes, refusal
from stepgraph.passes.attention.choose import AttentionOptions
from stepgraph.passes.attention.columns import columns
from stepgraph.passes.attention.flex import FlexNodes
from stepgraph.passes.attention.mask import HIDDEN, Masks, Pairs, number_of
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten

_SOFTMAXES = (aten._softmax, aten._safe_softmax)
_VIEWS = (aten.view, aten._unsafe_view, aten.expand, aten.clone)
_SQUEEZES = (aten.unsqueeze, aten.squeeze)
#: Added to a score it leaves nothing of it in fp32, and times log2(e) is still finite: where all keys of a query are
#: hidden by it, they weigh the same, as with the least number of a dtype in eager.
_LEAST = -1e30
_ALIGNED = 16  # keys that the memory-efficient kernel takes the rows of a bias in


@register(
    "fuse_attention",
    "numerics",
    options=AttentionOptions(),
    needs_cuda=True,
    from_options=lambda options: (
        {"compiled": options.compiles_attention}
        if options.attention == "auto" and not options.any_length  # what kernels take depends on the length
        else None
    ),
    for_target=lambda options, target: replace(
        options, capability=target.capability, deterministic=torch.are_deterministic_algorithms_enabled()
    ),
)
def fuse_attention(step: StepGraph, options: AttentionOptions, report: PassReport) -> None:
    """Run attention that is written out as products and a softmax by fused kernels."""
    softmaxes = [node for node in step.graph.nodes if packet(node) in _SOFTMAXES]
    for node in softmaxes:
        if (turned := columns(node)) is not None and _fits_by_rows(step, node, options):
            turned.rewrite()
    aliases = Aliases(step.graph)
    matches = [(node.name, found) for node in softmaxes if (found := _match(node, aliases)) is not None]
    flex, counts = FlexNodes(step, Masks(step.graph)), dict.fromkeys(("cudnn", "efficient", "flex"), 0)
    for _, found in matches:  # before any is rewritten: a mask may depend on the attention before
        if isinstance(found, _Written):
            hides = [op for op in found.ops if op.kind == "hide"]
            found.all_see = not hides or (len(hides) == 1 and flex.masks.all_see(hides[0].node, hides[0].shown))
    for name, found in matches:
        reason = found if isinstance(found, str) else found.backend(options)
        if isinstance(found, _Written) and reason in counts:
            backend, reason = reason, found.rewrite(reason, flex)
            counts[backend] += reason is None
        if reason is not None:
            report.notes.append(f"{name} is left unchanged: {reason}")
    report.matched = len(matches)
    report.changed = sum(counts.values())
    by = ", ".join(f"{n} by {backend}" for backend, n in counts.items() if n)
    report.summary = f"{report.changed} of {report.matched} written-out attentions fused{by and ': ' + by}"


def _fits_by_rows(step: StepGraph, softmax: fx.Node, options: AttentionOptions) -> bool:
    """Whether there are kernels for the attention around ``softmax`` once its weights are not read transposed, tried on
    a copy."""
    copied: dict[fx.Node, fx.Node] = {}
    trial = fx.Graph()
    trial.output(trial.graph_copy(step.graph, copied))
    columns(copied[softmax]).rewrite()
    found = _match(copied[softmax], Aliases(trial))
    return isinstance(found, _Written) and found.backend(options) in ("cudnn", "efficient", "flex")


# Reading


@dataclass(frozen=True)
class _Op:
    """What happens to scores between product and softmax. ``kind``: ``scale`` by ``number``; ``tanh``; ``hide``, where
    ``node`` is true if ``shown`` is False, by ``number``; ``bias``: ``node`` times ``number`` is added. ``size``: of
    those scores."""

    kind: str
    number: float = 1.0
    node: fx.Node | None = None
    shown: bool = True
    size: tuple[int, ...] = ()


def _scores(node: fx.Node) -> tuple[fx.Node, list[_Op]] | None:
    """(the product that the scores ``node`` come from, what happens to it, the last first)."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    kind, args = packet(node), node.args
    if kind is aten.bmm:
        return node, []
    if kind is aten.baddbmm:
        beta, alpha = argument(node, "beta"), argument(node, "alpha")
        return (node, [_Op("bias", float(beta), args[0], size=_size(node))]) if alpha and beta else None
    op, sources = None, [args[0]] if args else []
    if is_cast(node) or _keeps_scores(node):
        pass
    elif (number := factor_of(node)) is not None:
        op = _Op("scale", number)
    elif kind is aten.tanh:
        op = _Op("tanh", node=node)
    elif (hidden := _hides(node)) is not None:
        op, sources = hidden
    elif kind is aten.add and len(args) == 2 and node.kwargs.get("alpha", 1) == 1:
        for scores, bias in (args, args[::-1]):
            if isinstance(bias, fx.Node) and _is_whole(scores, node) and (found := _scores(scores)) is not None:
                return found[0], [_Op("bias", node=bias, size=_size(node)), *found[1]]
        return None
    else:
        return None
    found = _scores(sources[0])
    return found and (found[0], [op, *found[1]] if op else found[1])


def _size(node: fx.Node) -> torch.Size:
    return node.meta["val"].shape


def _is_whole(part: object, node: fx.Node) -> bool:
    return isinstance(part, fx.Node) and part.meta["val"].shape == node.meta["val"].shape


def _keeps_scores(node: fx.Node) -> bool:
    """Whether a view or copy leaves the elements in their order, and rows of keys whole. Dimensions of size 1 may lie
    anywhere, as ``einsum`` moves them."""
    if packet(node) not in (*_VIEWS, *_SQUEEZES, aten.permute, aten.transpose):
        return False
    read, made = _size(node.args[0]), _size(node)
    if packet(node) in (aten.permute, aten.transpose):
        order = [d for d in permutation(node) if read[d] > 1]
        return order == sorted(order)
    whole = [[size for size in sizes if size > 1][-2:] for sizes in (read, made)]
    return read.numel() == made.numel() and (read[-2:] == made[-2:] or whole[0] == whole[1])


def _hides(node: fx.Node) -> tuple[_Op, list[fx.Node]] | None:
    """What hides keys by a number, and the scores that it reads."""
    kind, args = packet(node), node.args
    if kind is aten.masked_fill and (number := number_of(args[2])) is not None:
        return (_Op("hide", number, args[1], False, _size(node)), [args[0]]) if number <= HIDDEN else None
    if kind is aten.where and len(args) == 3:
        for scores, other, shown in ((args[1], args[2], True), (args[2], args[1], False)):
            number = number_of(other)
            if number is not None and number <= HIDDEN and _is_whole(scores, node):
                return _Op("hide", number, args[0], shown, _size(node)), [scores]
    return None


def _merged(ops: Sequence[_Op]) -> list[tuple]:
    """``ops`` as a gradient passes through them, for comparison."""
    found: list[tuple] = []
    for op in ops:
        if op.kind == "scale" and found and found[-1][0] == "scale":
            found[-1] = "scale", found[-1][1] * op.number
        elif op.kind == "scale":
            found.append(("scale", op.number))
        elif op.kind != "bias":
            found.append((op.kind, op.node, op.shown))
    return [op for op in found if op[0] != "scale" or not math.isclose(op[1], 1.0, rel_tol=1e-6)]


def _alike(one: Sequence[_Op], other: Sequence[_Op]) -> bool:
    a, b = _merged(one), _merged(other)
    return len(a) == len(b) and all(
        math.isclose(x[1], y[1], rel_tol=1e-4) if x[0] == y[0] == "scale" else x == y for x, y in zip(a, b, strict=True)
    )


def _transposes(node: object, other: fx.Node) -> bool:
    """Whether one is the transpose of the other, through any number of views, such as those of ``einsum``."""

    def of(a: object, b: fx.Node) -> bool:
        if not isinstance(a, fx.Node):
            return False
        made, turned, node = a.meta["val"], b.meta["val"].mT, a
        while node is not b and is_view(node):
            node = node.args[0]
        form = (made.shape, made.stride(), made.storage_offset())
        return node is b and form == (turned.shape, turned.stride(), turned.storage_offset())

    return of(node, other) or of(other, node)


def _exchanges(node: fx.Node) -> bool:
    """Whether the node exchanges the last two dimensions."""
    return swapped(node) is not None and 1 not in _size(node)[-2:]  # else a dimension of size 1 moves


def _readers(node: fx.Node, sink: bool, turned: bool = False) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
    """(reader, what it reads, whether that is transposed) of weights behind casts and views, and with a ``sink`` behind
    the slice that leaves its column out."""
    for user in node.users:
        if _exchanges(user) and not turned:
            yield from _readers(user, sink, True)
        elif not turned and (
            is_cast(user) or _keeps_scores(user) or (sink and _columns(user) == (0, _size(node)[-1] - 1))
        ):
            yield from _readers(user, sink)
        else:
            yield user, node, turned


def _columns(node: fx.Node) -> tuple[int, int] | None:
    """The first and the last but one of the columns that a slice takes."""
    if node.target is not aten.slice.Tensor or argument(node, "step") != 1:
        return None
    rank, width = len(_size(node)), _size(node.args[0])[-1]
    start, _, _ = slice(argument(node, "start"), argument(node, "end")).indices(width)
    return (start, start + _size(node)[-1]) if argument(node, "dim") % rank == rank - 1 else None


def _with_sink(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """(scores, one more score for each query, whether the row's maximum is taken off) of what a softmax reads."""
    less = packet(node) is aten.sub and node.args[1].target is operator.getitem and node.args[1].args[1] == 0
    if less:
        greatest = node.args[1].args[0]
        if greatest.target is not aten.max.dim or greatest.args[0] is not node.args[0]:
            return None
        node = node.args[0]
    if node.target is not aten.cat.default or len(node.args[0]) != 2:
        return None
    scores, sink = node.args[0]
    return (scores, sink, less) if _size(sink) == (*_size(scores)[:-1], 1) else None


def _numel(node: fx.Node) -> int:
    return node.meta["val"].numel()


def _widens(node: fx.Node) -> bool:
    """Whether the node casts to a dtype that holds all numbers of the one before."""
    if not is_cast(node):
        return False
    made = node.meta["val"].dtype
    return torch.promote_types(node.args[0].meta["val"].dtype, made) == made


def _peeled(node: fx.Node, shape: tuple[int, ...]) -> tuple[fx.Node, float]:
    """(what ``node`` is in ``shape``, or in its own, before copies, widening casts and numbers; their product)."""
    found, number, factor, own = node, 1.0, 1.0, node.meta["val"].shape
    while True:
        if node.meta["val"].shape in (shape, own):
            found, number = node, factor
        if (by := factor_of(node)) is not None:
            factor *= by
        elif not (_widens(node) or (packet(node) in _VIEWS and _numel(node) == _numel(node.args[0]))):
            return found, number
        node = node.args[0]


def _match(softmax: fx.Node, aliases: Aliases) -> "_Written | str | None":
    """The attention around ``softmax``, why it cannot be rewritten, or None where there is none."""
    value = softmax.meta["val"]
    if value.ndim < 3 or softmax.args[1] not in (-1, value.ndim - 1):
        return None
    scores, sink, less = _with_sink(softmax.args[0]) or (softmax.args[0], None, False)
    found = _scores(scores)
    readers = list(_readers(softmax, sink is not None))
    outs = [user for user, read, turned in readers if packet(user) is aten.bmm and user.args[0] is read and not turned]
    if found is None or len(outs) != 1:
        return None
    product, ops = found
    if _size(product)[-2:] != _size(scores)[-2:] or _size(outs[0])[1] != _size(scores)[-2]:
        return None  # rows of other queries
    q, k = product.args[-2:]
    alpha = float(argument(product, "alpha")) if packet(product) is aten.baddbmm else 1.0
    written = _Written(softmax, _size(scores), ops, q, k, outs[0].args[1], outs[0], alpha, sink)
    if _size(written.v)[1] != written.size[-1]:
        return f"{written.out.name} reads more than its weights"
    rest = [(user, turned) for user, _, turned in readers if user is not outs[0]]
    for user, turned in rest:
        if packet(user) is aten._softmax_backward_data and user.args[1] is softmax and written.slope is None:
            written.slope = user
        elif packet(user) is aten.bmm and turned and written.dv is None:
            written.dv = user
        else:
            return f"{user.name} reads its weights"
    return written.read_backward(less) or written.refused(aliases) or written


@dataclass
class _Written:
    """The nodes of one attention. ``q`` (N, T, D), ``k`` (N, D, S), ``v`` (N, S, D_v): what its products read;
    ``out``: its second product; ``alpha``: the number of its first. In backward: ``slope``: of the softmax; ``dout``:
    the gradient of ``out``; ``dq``, ``dk``, ``dv``: of the others; ``first``: the first product; ``dbias``: (the
    gradient of all that is added to the scores, what reads it, the number that it is multiplied with, whether scores
    are hidden after that is added). ``size``: of the scores. ``sink``, of one column: a score that takes weight and has
    no value, ``dsink``: its gradient."""

    softmax: fx.Node
    size: torch.Size
    ops: list[_Op]
    q: fx.Node
    k: fx.Node
    v: fx.Node
    out: fx.Node
    alpha: float
    sink: fx.Node | None
    slope: fx.Node | None = None
    dout: fx.Node | None = None
    dq: fx.Node | None = None
    dk: fx.Node | None = None
    dv: fx.Node | None = None
    dsink: fx.Node | None = None
    first: fx.Node | None = None
    dbias: list[tuple[fx.Node, fx.Node, float, bool]] = field(default_factory=list)
    #: Whether each query is known to see a key.
    all_see: bool = False
    #: What the kernels read: queries, keys and values; the numbers that they are multiplied with before the products;
    #: whether the keys are (D, S).
    inputs: tuple[fx.Node, ...] = ()
    numbers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    turned: bool = False

    def read_backward(self, less: bool) -> str | None:
        """Find the nodes of the backward; what is not as it should be. ``less``: maxima were taken off."""
        grads = [self.dv.args[1]] if self.dv is not None else []
        if self.slope is not None:
            node = self.slope.args[0]
            padded = self.sink is None
            while is_cast(node) or _keeps_scores(node) or not padded:
                if packet(node) is aten.slice_backward:  # zeros for the sink's column, which has no value
                    padded = True
                elif not (is_cast(node) or _keeps_scores(node)):
                    break
                node = node.args[0]
            if packet(node) is not aten.bmm or not _transposes(node.args[1], self.v):
                return "the gradient of its weights is not a product with its values"
            grads.append(node.args[0])
            self.first = node
            strangers: list[tuple[fx.Node, fx.Node, list[_Op]]] = []
            begin = self.slope if self.sink is None else self._before_sink(less)
            if begin is None:
                return "the gradient of its scores is read with that of its sink"
            for user, read, ops in self._down(begin, [], strangers):
                if not _alike(ops, self.ops):
                    return f"{user.name} is not a gradient of its product"
                if user.args[0] is read and _transposes(user.args[1], self.k) and self.dq is None:
                    self.dq = user
                elif user.args[1] is read and _transposes(user.args[0], self.q) and self.dk is None:
                    self.dk = user
                else:
                    return f"{user.name} is not a gradient of its queries or keys"
            for node, user, ops in strangers:
                biased = any(op.kind in ("bias", "hide") for op in self.ops)  # or the kernel gives no such gradient
                if not biased or any(op[0] not in ("hide", "scale") for op in _merged(ops)):
                    return f"{user.name} reads the gradient of its scores"
                number = math.prod(op.number for op in ops if op.kind == "scale")
                self.dbias.append((node, user, number, any(op.kind == "hide" for op in ops)))
        if any(grad is not grads[0] for grad in grads):
            return "its gradients come from two results"
        self.dout = grads[0] if grads else None
        self.first = min(node for node in (self.first, self.dv) if node is not None) if grads else None
        return None

    def _before_sink(self, less: bool) -> fx.Node | None:
        """The gradient of the scores alone; finds that of the sink. The gradient of maxima that are taken off is the
        sum of a row, which is 0."""
        node, S = self.slope, self.size[-1]
        if less:
            (node,) = [user for user in node.users if packet(user) is aten.add] or [None]
            other = node and next((x for x in node.args if x is not self.slope), None)
            if not isinstance(other, fx.Node) or other.target is not aten.scatter.src:
                return None
            total = other.args[3]
            if packet(total) is not aten.sum or packet(total.args[0]) is not aten.neg:
                return None
            if total.args[0].args[0] is not self.slope or set(self.slope.users) != {node, total.args[0]}:
                return None
        parts = {_columns(user): user for user in node.users}
        self.dsink, begin = parts.pop((S, S + 1), None), parts.pop((0, S), None)
        return None if parts else begin

    def _down(self, node: fx.Node, ops: list[_Op], strangers: list) -> list[tuple[fx.Node, fx.Node, list[_Op]]]:
        """The products that read the gradient of the scores: (product, what it reads, what happened on the way)."""
        found = []
        for user in node.users:
            if packet(user) is aten.bmm:
                found.append((user, node, ops))
                continue
            op, below, apart = self._passes(node, user), [], []
            if op is not None:
                below = self._down(user, ops + op, apart)
            found += below
            strangers += apart if below else [(node, user, ops)]
        return found

    @staticmethod
    def _passes(node: fx.Node, user: fx.Node) -> list[_Op] | None:
        """What ``user`` does to the gradient ``node`` of scores; None where it is no such step."""
        kind, args = packet(user), user.args
        if is_cast(user) or _keeps_scores(user):
            return []
        if (number := factor_of(user)) is not None:
            return [_Op("scale", number)]
        if kind is aten.tanh_backward and args[0] is node:
            return [_Op("tanh", node=args[1])]
        if kind is aten.masked_fill and args[0] is node and number_of(args[2]) == 0:
            return [_Op("hide", node=args[1], shown=False)]
        if kind is aten.where and len(args) == 3:
            if args[1] is node and number_of(args[2]) == 0:
                return [_Op("hide", node=args[0])]
            if args[2] is node and number_of(args[1]) == 0:
                return [_Op("hide", node=args[0], shown=False)]
        return None

    # What runs it

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The scores': (B, H, T, S)."""
        sizes = [self.size, *(op.size for op in self.ops)]
        more = math.prod(self.size[:-3]), *self.size[-3:]
        return next((tuple(size) for size in sizes if len(size) == 4), more)

    @property
    def scale(self) -> float:
        """The number that the product is multiplied with, up to a soft cap."""
        at = next((i for i, op in enumerate(self.ops) if op.kind == "tanh"), -1)
        a, b, _ = self.numbers
        return a * b * self.alpha * math.prod(op.number for op in self.ops[at + 1 :] if op.kind == "scale")

    def refused(self, aliases: Aliases) -> str | None:
        """Why no kernel can take its place."""
        self._read_operands()
        q, k, v = self.inputs
        dtypes = {node.meta["val"].dtype for node in (q, k, v)}
        if dtypes not in ({torch.bfloat16}, {torch.float16}):
            return "it computes in " + ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        biases = [op.node for op in self.ops if op.kind in ("bias", "hide")]
        for node in (q, k, v, self.dout, *biases):
            if node is not None and aliases.written_between(node, aliases.position[node], len(aliases.position)):
                return f"{node.name} is written to"
        return None

    def _read_operands(self) -> None:
        """Queries, keys and values before copies, widening casts and numbers; those numbers."""
        B, H, T, S = self.shape
        D, D_v = self.q.meta["val"].shape[-1], self.v.meta["val"].shape[-1]
        q, a = _peeled(self.q, (B, H, T, D))
        k, b = _peeled(self.k, (B, H, D, S))
        self.turned = not _exchanges(k)
        if not self.turned:
            k, c = _peeled(k.args[0], (B, H, S, D))
            b *= c
        v, d = _peeled(self.v, (B, H, S, D_v))
        self.inputs, self.numbers = (q, k, v), (a, b, d)

    def backend(self, options: AttentionOptions) -> str:
        """Which kernels run it, or why none does."""
        B, H, T, S = self.shape
        widths = [self.q.meta["val"].shape[-1], self.v.meta["val"].shape[-1]]
        case = Case(B, H, H, T, S, *widths, False, self.inputs[0].meta["val"].dtype)
        kinds = [op.kind for op in self.ops]
        if "tanh" in kinds or self.sink is not None:
            what = "a soft cap" if "tanh" in kinds else "a sink"
            inside = kinds[kinds.index("tanh") + 1 :] if "tanh" in kinds else []
            if self.dbias or {"tanh", "bias", "hide"} & set(inside):
                return f"it has {what} and more that learns or comes before"
            if not options.compiled:
                return f"it has {what}, which only FlexAttention takes, and Inductor does not compile it"
            return refusal("flex", case, options.capability) or "flex"
        if self.scale <= 0:
            return f"its scores are multiplied by {self.scale}, which is not positive"
        if any(width % 8 for width in widths):
            return f"8 does not divide heads of {widths[0]} channels"
        biased = "bias" in kinds or "hide" in kinds
        cudnn = refusal("cudnn", case, options.capability, options.deterministic)
        if cudnn is None and not self.dbias and options.capability is not None and options.capability[0] in (9, 10):
            return "cudnn" if not biased or S % 8 == 0 else "efficient"
        return "efficient"

    def rewrite(self, backend: str, flex: FlexNodes) -> str | None:
        """Replace it with the kernels of ``backend``; why not, if the graph shows an obstacle only now."""
        (a, b, d), dtype = self.numbers, self.inputs[0].meta["val"].dtype
        build = Builder(self.out, before=self.out)
        seeing = None if self.all_see else self._seeing(build)
        bias = self._bias(build, dtype, seeing, clamped=backend != "flex")
        at = next((i for i, op in enumerate(self.ops) if op.kind == "tanh"), -1)
        scale = self.scale
        if backend == "flex":
            flex.masks = Masks(self.out.graph)
            seen = flex.masks.of(bias)
            if isinstance(seen, str):
                return f"{seen}, and only FlexAttention takes its soft cap or sink"
            if self.sink is not None and isinstance(seen, Pairs):  # it has all weight of a query that sees no key
                seen = replace(seen, hidden=-math.inf)
        q, *rest = self._laid_out(build)
        inputs = [q if seeing is None else self._where(build, seeing, q), *rest]
        saves = self.dout is not None
        if backend == "flex":
            cap = math.prod(op.number for op in self.ops[:at] if op.kind == "scale") if at >= 0 else 0.0
            out, *saved = flex.forward(build, inputs, seen, scale, cap)
        else:
            out, *saved = forward_nodes(backend, build, inputs, False, scale, saves, bias)
        share = self._share(build, saved[0]) if self.sink is not None else None
        shown = out if share is None else build.cast(build(aten.mul.Tensor, out, share), dtype)
        self._put(self.out, shown, d, False)
        if saves:
            build = Builder(self.first, before=self.first)
            like = out.meta["val"].shape
            grad, factor = _peeled(self.dout, like)
            grad = build.cast(build.view(grad, like), dtype)
            grad = grad if factor * d == 1.0 else build(aten.mul.Tensor, grad, factor * d)
            if grad.meta["val"].stride(-1) != 1:
                grad = build.copy(grad)
            if backend == "flex":
                of_log = None
                if share is not None:
                    of_log = self._of_log(build, grad, out, share)
                    grad = build.cast(build(aten.mul.Tensor, grad, share), dtype)
                grads = flex.backward(build, grad, inputs, (out, *saved), seen, scale, cap, of_log)
            else:
                saved = (out, *saved)
                of_bias = bool(self.dbias)
                grads = backward_nodes(backend, build, grad, inputs, saved, False, scale, bias=bias, of_bias=of_bias)
            if seeing is not None:
                grads[0] = self._where(build, seeing, grads[0])
            for node, user, number, hidden in self.dbias:
                value = self._where(build, seeing, grads[3]) if hidden and seeing is not None else grads[3]
                value = build.view(build.cast(value, node.meta["val"].dtype), node.meta["val"].shape)
                value = value if number == 1.0 else build(aten.mul.Tensor, value, number)
                user.replace_input_with(node, in_strides_of(build, node, value) if is_view(user) else value)
                erase_unread(node)
            a, b = a * self.alpha, b * self.alpha
            for node, new, number in ((self.dq, grads[0], a), (self.dk, grads[1], b), (self.dv, grads[2], d)):
                if node is not None:
                    self._put(node, new, 1.0 / number, node is self.dk)
        return None

    def _share(self, build: Builder, log_sum: fx.Node) -> fx.Node:
        """What the keys have of all weights (B, H, T, 1), the sink's subtracted; ``log_sum`` (B, H, T): log2 of the
        sum of their exponentials."""
        B, H, T, _ = self.shape
        sink = build.cast(build.view(self.sink, torch.Size((B, H, T, 1))), torch.float32)
        log_sum = build(aten.mul.Tensor, build(aten.unsqueeze.default, log_sum, -1), math.log(2))
        return build(aten.sigmoid.default, build(aten.sub.Tensor, log_sum, sink))

    def _of_log(self, build: Builder, grad: fx.Node, out: fx.Node, share: fx.Node) -> fx.Node:
        """The gradient of the logarithms; puts the sink's in its place, which is their negative."""
        product = build(aten.mul.Tensor, build.cast(grad, torch.float32), build.cast(out, torch.float32))
        slope = build(aten.mul.Tensor, share, build(aten.rsub.Scalar, share, 1.0))
        slope = build(aten.mul.Tensor, slope, build(aten.sum.dim_IntList, product, [-1], True))
        if self.dsink is not None:
            new = build.cast(build(aten.neg.default, slope), self.dsink.meta["val"].dtype)
            self.dsink.replace_all_uses_with(build.view(new, _size(self.dsink)))
            erase_unread(self.dsink)
        return build(aten.mul.Tensor, build(aten.squeeze.dim, slope, -1), math.log(2))

    def _laid_out(self, build: Builder) -> list[fx.Node]:
        """Queries, keys and values as kernels take them: (B, H, length, width), each row contiguous."""
        B, H, T, S = self.shape
        made = []
        for node, length, turned in zip(self.inputs, (T, S, S), (False, self.turned, False), strict=True):
            new = build(aten.transpose.int, node, -2, -1) if turned else node
            new = build.view(new, torch.Size((B, H, length, new.meta["val"].shape[-1])))
            if new.meta["val"].stride(-1) != 1:
                new = build.copy(new)
            made.append(new)
        return made

    def _bias(self, build: Builder, dtype: torch.dtype, seeing: fx.Node | None, *, clamped: bool) -> fx.Node | None:
        """All that is added to the scores, (B, H, T, S) in ``dtype``; None for nothing.

        The largest is 0 for queries that see no key. Kernels keep a row's maximum plus the logarithm of its sum in fp32
        for the backward, where a number such as -1e30 would absorb the logarithm.
        """
        shape, total = torch.Size(self.shape), None
        least = max(_LEAST, torch.finfo(dtype).min)
        for i, op in reversed(list(enumerate(self.ops))):
            node, factor = op.node, math.prod(later.number for later in self.ops[:i] if later.kind == "scale")
            if op.kind == "bias":
                if (number := op.number * factor) != 1.0:
                    node = build(aten.mul.Tensor, node, number)
                node = self._of_scores(build, node, op.size)
                total = node if total is None else build(aten.add.Tensor, total, node)
            elif op.kind == "hide":
                node, number = self._of_scores(build, node, op.size), max(op.number * factor, least)
                zero, hidden = (self._scalar(build, node, x, dtype) for x in (0.0, number))
                added = zero if total is None else total
                total = build(aten.where.self, node, *((added, hidden) if op.shown else (hidden, added)))
        if total is None:
            return None
        if clamped and packet(self.softmax) is aten._softmax:
            total = build(aten.clamp.default, total, least)
        if clamped and seeing is not None:
            most = build(aten.amax.default, total, [-1], True)
            total = build(aten.where.self, seeing, total, build(aten.sub.Tensor, total, most))
        total = build.cast(total, dtype)
        size, strides = torch.Size((*_size(total)[:-1], shape[-1])), total.meta["val"].stride()
        total = build(aten.expand.default, total, list(size)) if _size(total) != size else total
        if -size[-1] % _ALIGNED:  # as torch pads a bias for the memory-efficient kernel
            total = build(aten.constant_pad_nd.default, total, [0, -size[-1] % _ALIGNED], 0.0)
            total = build(aten.slice.Tensor, total, -1, 0, size[-1])
        elif total.meta["val"].stride(-1) != 1 or any(s % 8 for s in strides[:-1]):
            total = build.copy(total)
        return total if _size(total) == shape else build(aten.expand.default, total, list(shape))

    def _seeing(self, build: Builder) -> fx.Node:
        """Which queries see a key, to broadcast to (B, H, T, 1), where numbers take the place of scores.

        The scores of a query that sees no key are the same, and have no gradient. The kernels add the number instead:
        without that query, this comes to the same.
        """
        seen = None
        for op in (op for op in self.ops if op.kind == "hide"):
            node = op.node if op.shown else build(aten.logical_not.default, op.node)
            node = self._of_scores(build, node, op.size)
            seen = node if seen is None else build(aten.logical_and.default, seen, node)
        return build(aten.any.dim, seen, -1, True)

    @staticmethod
    def _scalar(build: Builder, like: fx.Node, number: float, dtype: torch.dtype) -> fx.Node:
        return build(aten.scalar_tensor.default, number, dtype=dtype, device=like.meta["val"].device)

    def _where(self, build: Builder, seeing: fx.Node, node: fx.Node) -> fx.Node:
        """``node`` for the queries that see a key, zeros for others."""
        return build(aten.where.self, seeing, node, self._scalar(build, node, 0.0, node.meta["val"].dtype))

    def _of_scores(self, build: Builder, node: fx.Node, given: Sequence[int]) -> fx.Node:
        """``node``, which broadcasts to the scores viewed as ``given``, as it broadcasts to (B, H, T, S)."""
        shape, size = torch.Size(self.shape), _size(node)
        if tuple(given) == shape or math.prod(size[:-2]) == 1:
            return node if len(size) <= 4 else build.view(node, size[-2:])
        if len(given) == 3 and size[0] == shape[0] * shape[1]:
            return build.view(node, torch.Size((*shape[:2], *size[1:])))
        size = torch.Size((*[1] * (len(given) - len(size)), *size))
        kept = tuple(given[-3:]) == shape[1:]  # the batch alone is divided, as into images and their windows
        if kept and math.prod(size[:-3]) == 1:
            return build.view(node, torch.Size((1, *size[-3:])))
        whole = [*given[:-3], *size[-3:]] if kept else list(given)
        node = build.copy(build(aten.expand.default, node, whole))
        return build.view(node, torch.Size((shape[0], *size[-3:])) if kept else shape)

    @staticmethod
    def _put(node: fx.Node, new: fx.Node, number: float, turned: bool) -> None:
        """``new`` (B, H, rows, columns) times ``number`` replaces the product ``node``, (N, rows, columns) or
        ``turned``, after the views behind it, where there are any."""
        shape = new.meta["val"].shape
        while (turned or node.meta["val"].shape != shape) and (user := only_user(node)) is not None:
            if not (_exchanges(user) or (packet(user) in (aten.view, aten._unsafe_view) and _keeps_scores(user))):
                break
            node, turned = user, turned != _exchanges(user)
        build = Builder(node, before=node)
        new = build.cast(new if number == 1.0 else build(aten.mul.Tensor, new, number), node.meta["val"].dtype)
        new = build(aten.transpose.int, new, -2, -1) if turned else new
        if node.meta["val"].shape != new.meta["val"].shape:
            new = build.copy(new)
            new = build.view(new, node.meta["val"].shape)
        take_place(node, new)
        erase_unread(node)
