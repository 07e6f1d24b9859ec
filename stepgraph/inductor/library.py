"""The pieces that this process has compiled, by structure: captures share them, as equal layers do.

A second capture of the same step, one with another length of the batch, and a step with another optimizer reuse the
pieces that they have in common. Nothing here keeps a piece alive: it is freed with the last step that calls it.

Some pieces serve every length of a batch: two pieces that differ only in numbers become one with a symbolic length.

A piece's numbers are its inputs' sizes and strides and the integers among its operators' arguments. Where the numbers
of two lengths differ, each number becomes a multiple of the length, of its square, or a multiple and a constant. The
piece so written is compiled with a symbolic length (as Dynamo compiles dynamic shapes). It serves a third length if the
expressions give exactly that piece's numbers, and if everything that the compiler assumed holds there.
"""

import operator
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.facts import ours

#: ``NAME = async_compile.triton('NAME', '''TEXT''', ...)``, or ``cpp_pybinding([...], r'''TEXT''')``.
_DEFINED = re.compile(r"^(\w+) = async_compile\.(\w+)\(.*?r?'''\n(.*?)\n'''", re.MULTILINE | re.DOTALL)
#: Above the lines that it explains: which nodes of the graph they come from.
_COMES_FROM = re.compile(r"\s*# (?:Topologically Sorted )?Source Nodes: \[([^\]]*)\]")
_LONGEST = 20_000  # letters of one kernel that are kept


def _compile(
    piece: fx.GraphModule, inputs: Sequence[Any], config: dict[str, Any], *mode: Any
) -> Callable[[list[Any]], Sequence[Any]]:
    from stepgraph.inductor.read_first import ReadFirst  # imports Inductor, which takes seconds

    compat.lower_as_buffer(ours.concat.default)
    before = compat.inductor_passes(compat.inductor().config.post_grad_custom_post_pass)
    return compat.inductor_compile(piece, inputs, config | {"post_grad_custom_post_pass": ReadFirst(before)}, *mode)


@dataclass
class Kernel:
    """``nodes``: names of the nodes of the compiled graph that it computes, in its order; empty where Inductor does not
    say, as of C++. ``text``: Triton from ``@triton.jit`` on, or C++."""

    name: str
    text: str
    nodes: list[str]


def kernels_of(source: str) -> list[Kernel]:
    """The kernels of one compiled graph in the order of their definitions; none for an empty ``source``."""
    # Before the first program there may be another, which tunes the same kernels.
    program = source.rpartition('\n"""\n')[2]
    kernels = {name: Kernel(name, _body(text), []) for name, _, text in _DEFINED.findall(program)}
    launch = re.compile(rf"\s*({'|'.join(map(re.escape, kernels))})(?:\.run)?\(") if kernels else None
    named: list[str] = []
    for line in program.splitlines():
        if found := _COMES_FROM.match(line):
            named = [name.strip() for name in found[1].split(",") if name.strip()]
        elif launch is not None and (found := launch.match(line)):
            nodes = kernels[found[1]].nodes
            nodes += [name for name in named if name not in nodes]
            named = []
        elif "extern_kernels." in line or "torch.ops." in line:
            named = []  # a call of another library
    return list(kernels.values())


def _body(text: str) -> str:
    body = text[text.find("@triton.jit") :] if "@triton.jit" in text else text
    return body if len(body) <= _LONGEST else body[:_LONGEST] + "\n..."


#: Takes its arguments in a list, which it empties.
Function = Callable[[list[Any]], Sequence[Any]]


class Compiled(torch.nn.Module):
    """One compiled piece. ``function``: what computes it, if that is compiled already."""

    def __init__(self, piece: fx.GraphModule, config: dict[str, Any], function: Function | None = None):
        super().__init__()
        self.any_length = False  # whether `function` serves batches of other lengths too
        output = piece.graph.output_node()
        self.single = isinstance(output.args[0], fx.Node)
        if self.single:
            output.args = ((output.args[0],),)
            piece.recompile()
        examples = [n.meta["val"] for n in piece.graph.find_nodes(op="placeholder")]
        values = [n.meta["val"] if isinstance(n, fx.Node) else None for n in output.args[0]]
        self.names = [n.name for n in piece.graph.nodes if n.op == "call_function"]
        self.strides = [v.stride() if isinstance(v, torch.Tensor) else None for v in values]
        self.padded: list[int] | None = None
        self.function = function or _compile(piece, examples, config)

    def kernels(self) -> list[Kernel]:
        """What Inductor generated; its nodes are among `names`, the operators of the piece in their order."""
        return kernels_of(compat.inductor_source(self.function))

    def forward(self, *args: torch.Tensor) -> Any:
        return self.boxed(list(args))

    def boxed(self, args: list[torch.Tensor]) -> Any:
        """Run on ``args`` and empty the list, so that each tensor can be freed after its last use."""
        results = self.function(args)
        if self.padded is None:  # shapes are static: what one call gives, every call gives
            self.padded = [i for i, want in enumerate(self.strides) if want and _differs(results[i], want)]
        if self.padded:
            results = self._with_strides(results)
        return results[0] if self.single else results

    def _with_strides(self, results: Sequence[Any]) -> list[Any]:
        """``results`` in the strides that the graph records, which the pieces that read them were compiled for.

        Inductor pads matrix products of odd widths (``shape_padding``) before it notes which strides its outputs must
        have, so a product that leaves a piece comes as a slice of a wider one.
        """
        results = list(results)
        for i in self.padded:
            given = results[i]
            results[i] = torch.empty_strided(
                given.shape, self.strides[i], dtype=given.dtype, device=given.device
            ).copy_(given)
        return results


def _differs(given: torch.Tensor, want: tuple[int, ...]) -> bool:
    """Whether ``given`` has another memory layout than ``want``. Expanded dimensions (stride 0) may have any layout."""
    dims = [(mine, theirs) for mine, theirs, size in zip(given.stride(), want, given.shape, strict=True) if size > 1]
    return all(theirs for _, theirs in dims) and any(mine != theirs for mine, theirs in dims)


class Number(NamedTuple):
    """``factor * length ** power + constant``; ``power`` is 0, 1 or 2."""

    factor: int
    power: int
    constant: int

    def at(self, length: Any) -> Any:
        """Its value; ``length`` may be symbolic."""
        return self.constant if not self.power else self.factor * length**self.power + self.constant


def skeleton(piece: fx.GraphModule) -> tuple | None:
    """A key that two pieces share if they differ in their `numbers` alone; None for one that calls other graphs."""
    names = {node: f"%{i}" for i, node in enumerate(piece.graph.nodes)}
    found: list[Any] = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            found.append((value.dtype, value.device, value.ndim, aligned))
        elif node.op == "get_attr":
            return None
        else:
            form = _map((node.args, node.kwargs), lambda n: int, lambda other: (type(other), repr(other)), names.get)
            found.append((node.op, node.target, form))
    return tuple(found)


def numbers(piece: fx.GraphModule) -> list[int]:
    """Sizes and strides of the inputs, then the integers among the arguments, in the graph's order."""
    found: list[int] = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            found += [*node.meta["val"].shape, *node.meta["val"].stride()]
        else:
            _map((node.args, node.kwargs), found.append)
    return found


def _map(
    value: Any,
    number: Callable[[int], Any],
    other: Callable[[Any], Any] = lambda value: value,
    node: Callable[[fx.Node], Any] = lambda node: node,
) -> Any:
    """Nested arguments with each integer, anything else and each node replaced, in a fixed order."""
    if isinstance(value, fx.Node):
        return node(value)
    if isinstance(value, (list, tuple)):
        return tuple(_map(item, number, other, node) for item in value)
    if isinstance(value, dict):
        return tuple((key, _map(item, number, other, node)) for key, item in value.items())
    return number(value) if type(value) is int else other(value)


def generalize(first: Sequence[int], second: Sequence[int]) -> tuple[list[Number], int] | None:
    """(the numbers in terms of a length, the position where the length itself is one), or None if there is no such."""
    pairs = list(zip(first, second, strict=True))
    differing = sorted({(p, q) for p, q in pairs if p != q and min(p, q) > 1})
    # Rather the length that most of the others are multiples of; of such, the least.
    for length in sorted(differing, key=lambda length: -sum(_whole(length, pair) is not None for pair in differing)):
        found = [_number(length, pair) for pair in pairs]
        if None not in found:
            return found, pairs.index(length)
    return None


def _number(length: tuple[int, int], pair: tuple[int, int]) -> Number | None:
    (a, b), (p, q) = length, pair
    if p == q:
        return Number(0, 0, p)
    whole = _whole(length, pair)
    if whole is not None:
        return whole
    factor, rest = divmod(q - p, b - a)
    return None if rest else Number(factor, 1, p - factor * a)


def _whole(length: tuple[int, int], pair: tuple[int, int]) -> Number | None:
    """The pair as a multiple of the length or of its square."""
    for power in (1, 2):
        a, b = (n**power for n in length)
        factor = pair[0] // a
        if factor > 0 and (factor * a, factor * b) == pair:
            return Number(factor, power, 0)
    return None


class ForLengths:
    """A piece compiled with a symbolic length, ``hint`` of which is the one at hand."""

    def __init__(self, piece: fx.GraphModule, found: list[Number], where: int, hint: int, config: dict[str, Any]):
        self.numbers, self.where = found, where
        self.length = compat.SymbolicSizes([hint])
        (self.symbol,) = self.length.symbols
        with self.length.mode:
            graph, inputs = self._symbolic(piece)
            self.function = _compile(graph, inputs, config, self.length.mode)

    def at(self, found: Sequence[int]) -> int | None:
        """The length of the piece with these numbers if this one computes it, else None."""
        length = found[self.where]
        same = all(mine.at(length) == theirs for mine, theirs in zip(self.numbers, found, strict=True))
        return length if same and not self.length.broken([length]) else None

    def _symbolic(self, piece: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
        """The piece with the length as its first input, and its inputs: symbolic sizes, no values."""
        graph, found = fx.Graph(), iter(self.numbers)
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[Any] = [self.symbol]
        length = graph.placeholder("length")
        length.meta["val"] = self.symbol
        placeholders = piece.graph.find_nodes(op="placeholder")
        for node in placeholders:
            value = node.meta["val"]
            sizes, strides = ([next(found).at(self.symbol) for _ in range(value.ndim)] for _ in range(2))
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
            inputs.append(copies[node].meta["val"])
        written = _Written(graph, length)
        for node in piece.graph.nodes:
            if node not in placeholders and node.op != "output":
                args, kwargs = _replaced((node.args, node.kwargs), lambda: written(next(found)), copies)
                copies[node] = graph.call_function(node.target, args, kwargs)
        results = piece.graph.output_node().args[0]
        results = (results,) if isinstance(results, fx.Node) else results
        compat.keep_mode(graph.output(tuple(copies[node] for node in results)), self.length.mode)
        return fx.GraphModule({}, graph), inputs


class _Written:
    """Numbers as arguments of ``graph``'s nodes: constants, or nodes that compute them from ``length``."""

    def __init__(self, graph: fx.Graph, length: fx.Node):
        self.graph, self.nodes = graph, {Number(1, 1, 0): length}

    def __call__(self, number: Number) -> Any:
        if not number.power:
            return number.constant
        if number not in self.nodes:
            self.nodes[number] = self._computed(number)
        return self.nodes[number]

    def _computed(self, number: Number) -> fx.Node:
        call = self.graph.call_function
        if number.constant:
            return call(operator.add, (self(number._replace(constant=0)), number.constant))
        if number.factor != 1:
            return call(operator.mul, (self(Number(1, number.power, 0)), number.factor))
        length = self(Number(1, 1, 0))
        return call(operator.mul, (length, length))


def _replaced(value: Any, number: Callable[[], Any], copies: dict[fx.Node, fx.Node]) -> Any:
    """Nested arguments with the copies of nodes and with numbers for integers, in the order of `numbers`."""
    if isinstance(value, fx.Node):
        return copies[value]
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, number, copies) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, number, copies) for key, item in value.items()}
    return number() if type(value) is int else value


#: After this many symbolic forms of one skeleton, a length that none of them serves is compiled separately.
_MOST_FORMS = 2


@dataclass(frozen=True)
class Use:
    """How a piece was made. ``reused``: nothing was compiled. ``any_length``: it serves other lengths too. ``note``:
    why it does not, where that was asked for."""

    reused: bool = False
    any_length: bool = False
    note: str = ""


class _Family:
    """The pieces of one skeleton: numbers of the ones that are not symbolic, and the symbolic ones that are in use."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.open: weakref.WeakSet[ForLengths] = weakref.WeakSet()
        self.failed = ""  # why one of them could not be made symbolic

    def find(self, mine: list[int]) -> Function | None:
        """What computes the piece of these numbers, if a symbolic one does."""
        for known in self.open:
            length = known.at(mine)
            if length is not None:
                return _of_length(known, length)
        return None

    def make(self, piece: fx.GraphModule, mine: list[int], config: dict[str, Any]) -> Function | None:
        """Compile a symbolic piece that serves these numbers and others seen before, or None where there is none."""
        for other in self.seen:
            if self.failed or len(self.open) == _MOST_FORMS:
                return None
            found = generalize(other, mine)
            if found is None:
                continue
            try:
                made = ForLengths(piece, *found, mine[found[1]], config)
            except Exception as error:  # whatever Inductor cannot do with a symbol, it may do with a number
                self.failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                return None
            if made.at(other) is None:
                self.failed = "what the compiler had to know of the length holds for one length only"
                return None
            self.open.add(made)
            return _of_length(made, made.at(mine))
        return None


_compiled: weakref.WeakValueDictionary[tuple, Compiled] = weakref.WeakValueDictionary()
_families: dict[tuple, _Family] = {}


def compiled_once(
    structure: tuple, piece: fx.GraphModule, config: dict[str, Any], any_length: bool
) -> tuple[Compiled, Use]:
    """The compiled ``piece``; this process's, if it has one of that ``structure`` and ``config``.

    ``any_length``: if one that differs only in its length was compiled or noted before, this one serves any length.
    """
    key = (structure, _key(config), any_length)
    made = _compiled.get(key)
    if made is not None:
        return made, Use(reused=True, any_length=made.any_length)
    family = _family(piece, config) if any_length else None
    function, use = None, Use()
    if family is not None:
        mine = numbers(piece)
        function = family.find(mine)
        reused = function is not None
        function = function or family.make(piece, mine, config)
        if function is None:
            family.seen.append(mine)
        note = family.failed and f"compiled separately for each length: {family.failed}"
        use = Use(reused=reused, any_length=function is not None, note="" if function else note)
    made = _compiled[key] = Compiled(piece, config, function)
    made.any_length = use.any_length
    return made, use


def is_compiled(structure: tuple, config: dict[str, Any]) -> bool:
    """Whether this process has a compiled piece of that ``structure`` and ``config``, for this length only."""
    return (structure, _key(config), False) in _compiled


def note(piece: fx.GraphModule, config: dict[str, Any]) -> None:
    """Let the next length of ``piece`` be compiled for any length, though this one is not compiled."""
    family = _family(piece, config)
    if family is not None and family.find(numbers(piece)) is None:
        family.seen.append(numbers(piece))


def _family(piece: fx.GraphModule, config: dict[str, Any]) -> _Family | None:
    form = skeleton(piece)
    return None if form is None else _families.setdefault((form, _key(config)), _Family())


def _of_length(opened: ForLengths, length: int) -> Function:
    def function(args: list[Any]) -> Any:
        args.insert(0, length)
        return opened.function(args)

    return function


def _key(config: dict[str, Any]) -> tuple:
    """Options, and torch's own current settings, in a form that compares as they compile."""
    options = (
        (name, value.uuid() if hasattr(value, "uuid") else repr(value)) for name, value in sorted(config.items())
    )
    return *options, *compat.inductor_settings()
