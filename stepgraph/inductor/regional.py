"""Regions of a graph, compiled separately from it and from each other, each with its own options for Inductor.

A pass tags nodes with the `Region` they belong to. Before -> after: the nodes of a region -> one call of a compiled
piece; every other node stays the operator it was. Regions of one structure (operators, arguments, shapes, strides,
dtypes, devices and options), such as the regions of a model's equal layers, are compiled once and share the result.
torch's own ``torch.fx.passes.regional_inductor`` merges regions in 2.11, and compiles them all with the options of the
first.

Before that, keyword arguments that Inductor's patterns ignore are written as separate operators.

A pattern ignores keyword arguments that it does not name: ``add(x, a @ b, alpha=2)`` becomes ``addmm(x, a, b)``
(pytorch #167313, #196577). Before -> after: ``add(x, y, alpha=a)`` -> ``add(x, mul(y, a))``, likewise ``sub``;
``sum(x, dtype=d)`` -> ``sum(cast(x, d))``, likewise ``cumsum``. Inductor makes the same arithmetic of both forms. A
test compares `WRITTEN` with the patterns of the installed torch. ``maximum(p, q)`` of truth values, which Inductor
cannot compare, -> ``logical_or(p, q)``; ``minimum(p, q)`` -> ``logical_and(p, q)``. ``x[randperm(n)]``, on which a
pattern of torch 2.13 fails, -> what that pattern would make of it. ``x * 0``, of which Inductor makes 0 even where
``x`` is not finite, -> ``x * 0.0``.

Values that eager rounds before they are read.

Inductor drops a cast that a wider one follows, and computes in float32 what is of half precision: its kernels read a
value before it is rounded. ``x.bfloat16().float() - x`` was 0, a compensated sum lost its compensation, and values
compared unequal to what they were rounded to. It keeps arithmetic on bits. Before -> after: ``c = cast(x, bfloat16);
cast(c, float32)`` -> ``c = cast(x, bfloat16); r = view(view(c, int16) | 0, bfloat16); cast(r, float32)``; likewise a
half value that is stored in an input and read again; and what operators read whose results jump, such as ``isinf``,
``floor``, comparisons, indices of ``max`` and casts to integers, with all that computes it element by element, in other
pieces too: in ``(x.bfloat16() - 3).sign()`` the cast is rounded as well as the difference. Literals of comparisons are
rounded as eager does.
"""

import itertools
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from stepgraph import compat
from stepgraph.errors import unknown_name
from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.facts import is_mutating, is_pointwise, is_view, packet
from stepgraph.inductor.library import Compiled, Function, Use, compiled_once, is_compiled, note

aten = torch.ops.aten

#: The argument of each operator that becomes an operator, and the position of that one's input.
WRITTEN = {
    **dict.fromkeys((aten.add, aten.add_, aten.sub, aten.sub_), ("alpha", 1)),
    aten.rsub: ("alpha", 0),
    **dict.fromkeys((aten.sum, aten.cumsum), ("dtype", 0)),
}
_OF_TRUTH = {aten.maximum.default: aten.logical_or.default, aten.minimum.default: aten.logical_and.default}


def write_arguments(graph: fx.Graph) -> None:
    """Write the arguments that `WRITTEN` names as operators, in all of ``graph``."""
    for node in list(graph.nodes):
        if node.target in _OF_TRUTH and node.meta["val"].dtype is torch.bool:
            node.target = _OF_TRUTH[node.target]
        if node.target is aten.index.Tensor and _is_permutation(node.args[0], *node.args[1]):
            node.target = aten._unsafe_index.Tensor  # it is within bounds
        if packet(node) in (aten.mul, aten.mul_) and node.meta["val"].is_floating_point():
            node.args = tuple(float(argument) if isinstance(argument, int) else argument for argument in node.args)
        name, place = WRITTEN.get(packet(node), (None, 0))
        given = node.kwargs.get(name)
        if given is None:
            continue
        operand = node.args[place]
        dtype = given if name == "dtype" else node.meta["val"].dtype
        with graph.inserting_before(node):
            if isinstance(operand, fx.Node) and _cast_first(operand.meta["val"], name, dtype):
                operand = _call(graph, aten._to_copy.default, operand, dtype=dtype)
            if name == "alpha" and given != 1:
                scaled = isinstance(operand, fx.Node)
                given = float(given) if scaled and dtype.is_floating_point else given
                operand = _call(graph, aten.mul.Tensor, operand, given) if scaled else operand * given
        node.update_arg(place, operand)
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}
        if name == "dtype" and not (given.is_floating_point or given.is_complex or given is torch.int64):
            with graph.inserting_after(node):  # sums of integers are int64, unless asked for
                narrowed = _call(graph, aten._to_copy.default, node, dtype=given)
            node.replace_all_uses_with(narrowed, delete_user_cb=lambda user, made=narrowed: user is not made)
            node.meta["val"] = node.meta["val"].to(torch.int64)


def _is_permutation(x: fx.Node, first: fx.Node | None, *others: fx.Node | None) -> bool:
    drawn = not others and first is not None and first.target is aten.randperm.default
    return drawn and first.meta["val"].shape[0] <= x.meta["val"].shape[0]


def _cast_first(value: torch.Tensor, name: str, dtype: torch.dtype) -> bool:
    """Whether the operator casts ``value`` to ``dtype`` before the arithmetic. In a sum of two, a scalar tensor keeps
    its dtype, and so does what is added in place to a tensor of lower precision."""
    widens = value.ndim > 0 and torch.promote_types(value.dtype, dtype) == dtype
    return value.dtype != dtype and (name == "dtype" or widens)


def _call(graph: fx.Graph, target: Any, operand: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, (operand, *args), kwargs)
    value = operand.meta["val"]
    with value.fake_mode, torch.no_grad():
        node.meta["val"] = target(value, *args, **kwargs)
    return node


_HALF = (torch.bfloat16, torch.float16)
#: Operators that round their literals too, as comparisons do.
_LITERALS = ("eq", "ne", "ge", "gt", "le", "lt", "fmod", "remainder")
_LITERALS += ("hardshrink", "hardshrink_backward", "softshrink_backward")
#: Operators whose results jump: the smallest difference of what they read may give another number.
_JUMPS = frozenset(
    (
        *_LITERALS,
        *("all", "any", "argmax", "argmin", "atan2", "bernoulli", "bucketize", "ceil", "copysign", "count_nonzero"),
        *("adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"),
        *("cummax", "cummin", "fake_quantize_per_tensor_affine_cachemask", "floor", "floor_divide", "frac", "frexp"),
        *("elu_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward"),
        *("heaviside", "histc", "isin", "isinf", "isnan", "isneginf", "isposinf", "kthvalue", "logical_and"),
        *("logical_not", "logical_or", "logical_xor", "max", "median", "min", "mode", "nan_to_num", "nonzero"),
        *("nonzero_static", "round", "searchsorted", "sgn", "sign", "signbit", "sort", "threshold"),
        *("threshold_backward", "topk", "trunc"),
    )
)
#: Operators that move elements or choose among them.
_MOVES = frozenset(
    (
        *("amax", "amin", "cat", "clone", "constant_pad_nd", "copy", "flip", "gather", "index", "index_put"),
        *("index_select", "masked_fill", "maximum", "minimum", "neg", "repeat", "roll", "select_scatter"),
        *("slice_scatter", "stack", "where"),
    )
)


def readers_of_rounded(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of ``graph`` with discontinuous results, and the pointwise nodes that these depend on."""
    made, aliases = list(graph.nodes), Aliases(graph)
    found = set(filter(_jumps, made))
    for node in filter(found.__contains__, reversed(made)):
        roots = set(map(aliases.root, node.all_input_nodes))
        writes = (made[i] for root in roots for i in aliases.writes.get(root, ()))
        found.update(filter(_is_by_element, (*roots, *writes)))
    return found


def keep_rounding(graph: fx.Graph, exact: Collection[fx.Node] | None = None) -> None:
    """Round values of half precision in ``graph`` where a reader's result depends on the rounding. ``exact``: the nodes
    that read rounded values; by default those of `readers_of_rounded`."""
    aliases, nodes = Aliases(graph), [n for n in graph.nodes if n.op == "call_function" and _dtype(n)]
    exact = readers_of_rounded(graph) if exact is None else exact
    for node in filter(exact.__contains__, nodes):
        _round_operands(graph, node, aliases)
    for node in nodes:
        one = isinstance(node.meta["val"], torch.Tensor)
        readers = [user for user in node.users if one and not _stores(user, node)]
        if readers and (_is_narrowed(node) or _is_stored(node)):
            with graph.inserting_before(node.next):
                rounded = _rounded(graph, node)
            for user in readers:
                user.replace_input_with(node, rounded)


def _name(node: fx.Node) -> str:
    return getattr(packet(node), "__name__", "").removesuffix("_")


def _jumps(node: fx.Node) -> bool:
    """Whether the result of ``node`` is no continuous function of what it reads."""
    if packet(node) is aten._to_copy or node.target is aten.view.dtype:
        return not _dtype(node).is_floating_point
    return _name(node) in _JUMPS or node.kwargs.get("rounding_mode") is not None


def _is_by_element(node: fx.Node) -> bool:
    """Whether each element of the result follows from single elements of what ``node`` reads."""
    return node.target is operator.getitem or is_pointwise(node) or _name(node) in _MOVES


def _stores(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` writes into ``node``, stores it unchanged, or reads its bits."""
    copied = packet(user) is aten.copy_ and user.meta["val"].dtype == node.meta["val"].dtype
    return copied or user.target is aten.view.dtype or user.op == "output" or node in _written(user)


def _is_narrowed(node: fx.Node) -> bool:
    """Whether ``node`` is a cast that loses digits and is read in a wider type."""
    made = node.meta["val"].dtype
    if packet(node) is not aten._to_copy or made not in (*_HALF, torch.float32):
        return False
    return _holds(node.args[0], made) and any(_holds(user, made) for user in _users(node))


def _holds(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a value can hold floating-point numbers that ``dtype`` cannot."""
    value = node.meta.get("val")
    floats = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1  # not fp8
    return floats and torch.promote_types(value.dtype, dtype) != dtype


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read ``node`` or a view of it."""
    for user in node.users:
        yield from _users(user) if is_view(user) else (user,)


def _is_stored(node: fx.Node) -> bool:
    """Whether ``node`` has half precision and is written into an input of the graph."""
    writes = [node, *(user for user in node.users if packet(user) is aten.copy_ and user.args[1] is node)]
    roots = {one for write in writes for one in map(_root, _written(write)) if one.op == "placeholder"}
    return any(one.meta["val"].dtype == node.meta["val"].dtype in _HALF for one in roots)


def _written(node: fx.Node) -> Sequence[fx.Node]:
    return written_arguments(node) if is_mutating(node) else ()


def _root(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.args[0]
    return node


def _round_operands(graph: fx.Graph, node: fx.Node, aliases: Aliases) -> None:
    """Let ``node`` read its half-precision inputs as eager rounds them."""
    dtype = _dtype(node.all_input_nodes[0])
    if _name(node) in _LITERALS and dtype in _HALF:
        numbers = (torch.tensor(a, dtype=dtype).item() if isinstance(a, int | float) else a for a in node.args)
        node.args = tuple(numbers)
    for operand in () if is_view(node) or node.target is operator.getitem else node.all_input_nodes:
        root = aliases.root(operand)
        is_exact = root.op == "placeholder" or _name(root) in _MOVES
        is_exact = is_exact and not aliases.written_between(root, -1, aliases.position[node])
        if is_exact or _dtype(operand) not in _HALF:
            continue
        with graph.inserting_before(node):
            rounded = _rounded(graph, operand)
            if operand not in _written(node):
                node.replace_input_with(operand, rounded)
            elif packet(node) is not aten.copy_:
                graph.call_function(aten.copy_.default, (operand, rounded)).meta["val"] = operand.meta["val"]


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of the node's tensor, or of its first."""
    value = node.meta.get("val")
    return getattr(value[0] if isinstance(value, (list, tuple)) and value else value, "dtype", None)


def _rounded(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """``node`` as it is stored: a new node, where the caller inserts nodes."""
    dtype = node.meta["val"].dtype
    bits = _call(graph, aten.view.dtype, node, torch.int16 if dtype.itemsize == 2 else torch.int32)
    return _call(graph, aten.view.dtype, _call(graph, aten.bitwise_or.Scalar, bits, 0), dtype)


KEY = "stepgraph_region"
_NODES = "stepgraph_nodes"

#: Says which piece is compiled.
log = logging.getLogger("stepgraph.compile")


@dataclass(frozen=True)
class Region:
    """What a tagged node belongs to; nodes with equal tags are one region.

    ``id``: unique in the graph; the name of one of its nodes serves. ``kind``: what it computes (``norm``, ``swiglu``,
    ``rope``, ``attention``) or where it lies (``forward``), for the report. ``options``: (name, value) pairs of
    Inductor's configuration, set while this region compiles.
    """

    id: str
    kind: str
    options: tuple[tuple[str, Any], ...] = ()


def region_of(node: fx.Node) -> Region | None:
    """The region that ``node`` is tagged with."""
    return node.meta.get(KEY)


def tag(nodes: Sequence[fx.Node], region: Region) -> None:
    """Tag ``nodes`` as ``region``."""
    for node in nodes:
        node.meta[KEY] = region


def untag(node: fx.Node) -> None:
    """Let ``node`` belong to no region."""
    node.meta.pop(KEY, None)


@dataclass(eq=False)
class Piece:
    """Consecutive nodes of one region, their ``inputs`` in the order of first use, and those of the nodes that are read
    outside (``outputs``). Random numbers that nobody reads are outputs too: Inductor would not draw them, and what is
    drawn later would not be eager's."""

    region: Region
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(init=False)
    outputs: list[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        inside = set(self.nodes)
        read = dict.fromkeys(i for n in self.nodes for i in n.all_input_nodes if i not in inside)
        self.inputs = [i for i in read if _subgraph(i) is None]
        self.outputs = [n for n in self.nodes if any(u not in inside for u in n.users) or _drawn_in_vain(n)]


def _drawn_in_vain(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return not node.users and torch.Tag.nondeterministic_seeded in tags and isinstance(node.meta["val"], torch.Tensor)


@dataclass
class Compilation:
    """``module``: the graph with calls of compiled pieces. ``compiled``: one for each distinct structure; ``uses``: how
    each was made."""

    module: fx.GraphModule
    compiled: list[Compiled]
    uses: list[Use]


class Helpers(Protocol):
    """Processes that compile some of the pieces into Inductor's cache on disk. ``on_disk``: whether the latest piece
    that this process loaded was there."""

    on_disk: bool

    def share(self, work: Mapping[tuple, tuple[fx.GraphModule, dict[str, Any]]]) -> Iterator[tuple]:
        """Hand out ``work``, pieces with their options. Its keys, in the order in which to compile or load them."""


def compile_pieces(
    module: fx.GraphModule,
    pieces: Sequence[Piece],
    config: dict[str, Any],
    *,
    any_length: bool = False,
    on_first: Callable[[], None] | None = None,
    helpers: Helpers | None = None,
) -> Compilation:
    """A copy of ``module`` that calls the compiled ``pieces``; ``module`` itself does not change.

    The nodes of a piece are consecutive in the graph. ``config``: options of every region, which its own override.
    ``any_length``: compile pieces of which another length was compiled or noted so that they serve any. ``on_first``:
    called before the first piece is compiled or loaded in this process, for work to do while ``helpers`` compile.
    They have their pieces by then, unless ``any_length``.
    Raises ``ValueError`` for an option that Inductor does not have.
    """
    known = compat.inductor_options()
    distinct: dict[tuple, str] = {}
    work: dict[tuple, tuple[fx.GraphModule, dict[str, Any]]] = {}
    called: dict[fx.Node, str] = {}  # by a piece's first node
    starts: dict[fx.Node, Piece] = {}
    exact = readers_of_rounded(module.graph)
    for piece in pieces:
        for name, _ in piece.region.options:
            if name not in known:
                raise unknown_name(f"option of Inductor (region {piece.region.id})", name, known)
        key = structure(piece, exact)
        if key not in distinct:
            distinct[key] = f"{piece.region.kind}_{len(distinct)}"
            work[key] = _extract(piece, exact), config | dict(piece.region.options)
        starts[piece.nodes[0]] = piece
        called[piece.nodes[0]] = distinct[key]
    made: dict[tuple, tuple[Compiled, Use]] = {}
    order = _order(work, None if any_length else helpers)
    if on_first is not None and work:
        on_first()
    for key in order:
        before = compat.inductor_cache_counts()
        log.info("compiling piece %d of %d, %s", len(made) + 1, len(work), distinct[key])
        made[key] = compiled_once(key, *work[key], any_length)
        loaded, missing = (now > then for now, then in zip(compat.inductor_cache_counts(), before, strict=True))
        if missing:  # and so will the next ones be
            compat.await_compile_workers()
        if helpers is not None:
            helpers.on_disk = loaded
    attributes: dict[str, Any] = {name: made[key][0] for key, name in distinct.items()}
    uses = [made[key][1] for key in distinct]
    return Compilation(_with_calls(module, starts, called, attributes), list(attributes.values()), uses)


def _order(work: dict[tuple, tuple[fx.GraphModule, dict[str, Any]]], helpers: Helpers | None) -> Iterable[tuple]:
    """The keys of ``work`` in the order in which to compile them here; helpers share those not compiled yet."""
    if helpers is None:
        return work
    new = {key: given for key, given in work.items() if not is_compiled(key, given[1])}
    return itertools.chain(helpers.share(new), (key for key in work if key not in new))


def note_pieces(pieces: Sequence[Piece], config: dict[str, Any]) -> None:
    """Let the pieces of the next length be compiled for any length, though these are not compiled."""
    exact = readers_of_rounded(pieces[0].nodes[0].graph) if pieces else ()
    for piece in {structure(piece, exact): piece for piece in pieces}.values():
        note(_extract(piece, exact), config | dict(piece.region.options))


@dataclass(frozen=True)
class PieceCall:
    """A call of the compiled piece ``name``, which replaces ``nodes`` of the step."""

    name: str
    nodes: tuple[str, ...]


def piece_calls(executable: fx.GraphModule) -> list[PieceCall]:
    """The calls of compiled pieces in a result of `compile_pieces`, in order."""
    return [PieceCall(node.target, nodes_of(node)) for node in executable.graph.find_nodes(op="call_module")]


def with_functions(
    module: fx.GraphModule, calls: Sequence[PieceCall], functions: dict[str, Function | None]
) -> fx.GraphModule:
    """What `compile_pieces` made of ``module``, from its `piece_calls` and what computes each piece, by name; None for
    a piece of views, which computes nothing."""
    nodes = {node.name: node for node in module.graph.nodes}
    attributes: dict[str, Any] = {}
    starts: dict[fx.Node, Piece] = {}
    for call in calls:
        piece = Piece(Region(call.name, call.name.rpartition("_")[0]), [nodes[name] for name in call.nodes])
        if call.name not in attributes:
            extracted = _extract(piece)
            attributes[call.name] = Compiled(extracted, {}, functions[call.name] or _interpreted(extracted))
        starts[piece.nodes[0]] = piece
    called = {first: call.name for first, call in zip(starts, calls, strict=True)}
    return _with_calls(module, starts, called, attributes)


def _interpreted(piece: fx.GraphModule) -> Function:
    def run(args: list[Any]) -> Sequence[Any]:
        given = list(args)
        args.clear()
        return piece.forward(*given)

    return run


def nodes_of(node: fx.Node) -> tuple[str, ...]:
    """Names of the step's nodes that ``node`` of the executable represents: those of a compiled piece, or its own."""
    return node.meta.get(_NODES, (node.name,))


def structure(piece: Piece, exact: Collection[fx.Node] = ()) -> tuple:
    """A key that is equal for two pieces exactly if one compiled function serves both. ``exact``: the nodes that read
    rounded values."""
    names = {node: f"%{i}" for i, node in enumerate([*piece.inputs, *piece.nodes])}
    return (
        piece.region.kind,
        piece.region.options,
        tuple(_form(node.meta["val"]) for node in piece.inputs),
        tuple((node.target, node in exact, _canonical((node.args, node.kwargs), names)) for node in piece.nodes),
        tuple(names[node] for node in piece.outputs),
    )


def _canonical(value: Any, names: dict[fx.Node, str]) -> Any:
    """Arguments in a form that compares as they compute: ``1`` is not ``1.0`` nor ``True``, ``0.0`` is not ``-0.0``."""
    if isinstance(value, fx.Node):
        inner = _subgraph(value)
        return names[value] if inner is None else _program(inner)
    if isinstance(value, (list, tuple)):
        return tuple(_canonical(item, names) for item in value)
    if isinstance(value, dict):
        return tuple((key, _canonical(item, names)) for key, item in value.items())
    return type(value), repr(value)


def _program(module: fx.GraphModule) -> tuple:
    """The canonical form of a graph that a higher-order operator calls."""
    names = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}
    return tuple((n.op, str(n.target), _canonical((n.args, n.kwargs), names)) for n in module.graph.nodes)


def _form(value: torch.Tensor) -> tuple:
    # Where in its storage a tensor begins matters only by alignment: kernels get its address.
    aligned = value.storage_offset() * value.element_size() % 16 == 0
    return value.dtype, value.device, tuple(value.shape), value.stride(), aligned


def _subgraph(node: fx.Node) -> fx.GraphModule | None:
    """The graph that ``node`` hands to a higher-order operator, or None."""
    if node.op != "get_attr":
        return None
    value = operator.attrgetter(node.target)(node.graph.owning_module)
    return value if isinstance(value, fx.GraphModule) else None


def _extract(piece: Piece, exact: Collection[fx.Node] = ()) -> fx.GraphModule:
    """The piece as a module of its own. Its names do not depend on where in the model it was: they are part of the
    key of Inductor's cache on disk."""
    graph, attributes = fx.Graph(), {}
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(piece.inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta["val"] = node.meta["val"]

    def copy(node: fx.Node) -> fx.Node:
        inner = _subgraph(node)
        if inner is not None and node not in copies:
            attributes[f"subgraph_{len(attributes)}"] = inner
            copies[node] = graph.get_attr(f"subgraph_{len(attributes) - 1}")
        return copies[node]

    for node in piece.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copy)
        copies[node] = graph.call_function(node.target, args, kwargs)
        copies[node].meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
    outputs = tuple(copies[node] for node in piece.outputs)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    keep_rounding(graph, {copies[node] for node in piece.nodes if node in exact})
    _reshape(graph)
    write_arguments(graph)
    return compat.lazy_graph_module(attributes, graph)


def _reshape(graph: fx.Graph) -> None:
    """``view(x, shape)`` -> ``reshape(x, shape)``, where ``x`` is not written in place: what Inductor decomposes into
    other operators, such as softplus_backward, may have other strides, which ``view`` would refuse."""
    aliases = Aliases(graph)
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        if not aliases.writes.get(aliases.root(node)):
            node.target = aten.reshape.default


def _with_calls(
    module: fx.GraphModule, starts: dict[fx.Node, Piece], called: dict[fx.Node, str], attributes: dict[str, Any]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    within: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node in starts:
            piece = starts[node]
            within.update(piece.nodes)
            call = graph.call_module(called[node], tuple(copies[i] for i in piece.inputs))
            call.meta = {key: value for key, value in node.meta.items() if key != "val"}
            results = [call] if len(piece.outputs) == 1 else [
                graph.call_function(operator.getitem, (call, i)) for i in range(len(piece.outputs))
            ]  # fmt: skip
            for output, result in zip(piece.outputs, results, strict=True):
                result.meta = dict(output.meta)
                copies[output] = result
            call.meta[_NODES] = tuple(inside.name for inside in piece.nodes)
        elif node not in within:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    constants = {n.target: operator.attrgetter(n.target)(module) for n in module.graph.find_nodes(op="get_attr")}
    return compat.lazy_graph_module(constants | attributes, graph)  # `stepgraph.run` interprets it
