"""Captures of batches that differ only in their lengths, from one trace with symbolic lengths.

A trace with symbolic sizes records guards: what Python and operators assumed about the sizes, and what Python read of
values that may depend on them. A length that satisfies them gets the nodes of that trace with its sizes filled in: the
model's Python does not run, and passes see the graph that a trace of this length would have given. Others are traced.

The trace with symbolic sizes costs as much as four or five others. It is made for the fifth form of one kind, so that
runs with few lengths do not pay for it, and used from the seventh on, after it has matched the traces of two lengths.
"""

import dataclasses
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture import Traced, flatten_batch
from stepgraph.capture.batch import first_places, has_values, microbatch
from stepgraph.capture.batch_reads import BatchReads
from stepgraph.capture.fake import OpenSizes
from stepgraph.capture.python.watched import Watched
from stepgraph.capture.state import Watch
from stepgraph.errors import first_line
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import GroupValue
from stepgraph.lower.lowering import trace
from stepgraph.lower.spec import StepSpec
from stepgraph.run.bound import BoundStep

aten = torch.ops.aten

#: The trace with symbolic sizes is made for this one of the forms that differ only in sizes.
_MADE_FOR = 5
#: How many kinds are kept; the least recently used goes first.
_KINDS = 16
#: The notes of a form that was not traced, and of one whose sizes cannot be open.
NOT_TRACED = "not traced: its nodes come from the trace with symbolic sizes"
_STRIDED = "each length is traced: a tensor of the batch is not contiguous"
#: Keys of a node's meta that repeat its value; neither passes nor compilers read them.
_OF_VALUES = ("tensor_meta", "eager_input_vals")

#: What torch before 2.13 has in ``matmul`` where sizes are symbolic, for what it has where they are known.
_ALSO = {aten._unsafe_view.default: aten.view.default}

#: Sizes of a batch, by the places of its leaves.
Shapes = dict[int, tuple[int, ...]]


class Lengths:
    """The kinds of batches of one step, each with the forms that differ only in sizes."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family] = {}
        self._latest: tuple[_Family, Traced] | None = None
        self.note = ""

    def traced(self, spec: StepSpec, signature: tuple[tuple, ...]) -> Traced:
        """The step of ``spec`` as captured; ``note`` says how. ``signature``: everything that it is specialized on. The
        batch's part is first, and begins with the class of the batch and the form of each leaf."""
        kind, shapes = _split(spec, *signature)
        family = self._families.pop(kind, None)
        if family is None or family.is_stale():
            family = _Family()
        self._families[kind] = family  # the last one
        if len(self._families) > _KINDS:
            del self._families[next(iter(self._families))]
        leaves = flatten_batch(spec.batch)[0]
        made = family.at(shapes, leaves) if family.trusted else None
        if made is None:
            made = trace(spec)
            if family.learn(spec, made, shapes, leaves):
                self._latest = family, made
        self.note = family.note or _STRIDED * any(has_values(leaf) and not leaf.is_contiguous() for leaf in leaves)
        return made

    def keep(self, bound: BoundStep) -> None:
        """``bound`` is the latest trace with its watches."""
        if self._latest is not None and self._latest[1] is bound.traced:
            self._latest[0].watches = bound.watch, bound.plain
        self._latest = None


def _split(spec: StepSpec, of_batch: tuple, *options: Hashable) -> tuple[Hashable, Shapes]:
    """(what a step is specialized on apart from the sizes that may vary, the sizes that may vary)."""
    leaves = flatten_batch(spec.batch)[0]
    shapes = {i: tuple(microbatch(leaf, 0, spec.accumulate).shape) for i, leaf in enumerate(leaves) if _may_vary(leaf)}
    forms = [_frame(leaf) if i in shapes else of_batch[1 + i] for i, leaf in enumerate(leaves)]
    kind = of_batch[0], *forms, *of_batch[1 + len(leaves) :], spec.accumulate, *options
    places = first_places(leaves)
    return kind, {i: shape for i, shape in shapes.items() if places[i] == i}


def _may_vary(leaf: Any) -> bool:
    if not has_values(leaf) or vars(leaf) or leaf.is_conj() or leaf.is_neg():
        return False
    return leaf.stride() == torch.empty(leaf.shape, device="meta").stride()  # of a size of 1 too


def _frame(leaf: torch.Tensor) -> tuple:
    return type(leaf), leaf.dtype, leaf.device, leaf.ndim, leaf.requires_grad, leaf.is_leaf


class _Family:
    """Forms that differ only in their shapes. ``template``: the trace with symbolic sizes; ``watches`` see changes of
    what it was specialized on. ``trusted``: whether it has matched a trace of other sizes. ``failed``: why there is
    none. ``note``: how the latest form was made."""

    def __init__(self) -> None:
        self.seen: list[Shapes] = []
        self.template: _Template | None = None
        self.watches: tuple[Watch, Watched] | None = None
        self.trusted, self.failed, self.note = False, "", ""

    def is_stale(self) -> bool:
        """Whether what the trace with symbolic sizes was specialized on has changed since."""
        if self.template is None:
            return False
        return self.watches is None or self.watches[0].sees_change() or self.watches[1].change() is not None

    def at(self, shapes: Shapes, leaves: Sequence[Any]) -> Traced | None:
        """The step for a batch with these ``leaves``; None, with a ``note``, where it must be traced."""
        made = self.template.at(shapes, leaves)
        self.note = NOT_TRACED if made is not None else f"traced: {self.template.reason}"
        return made

    def learn(self, spec: StepSpec, traced: Traced, shapes: Shapes, leaves: Sequence[Any]) -> bool:
        """Make a template from ``traced``, or compare the two. Returns whether it became the template."""
        if shapes not in self.seen:
            self.seen.append(shapes)
        if self.failed or self.trusted:
            return False
        before = self.template
        if self.template is not None:
            try:
                made = self.at(shapes, leaves)
                if made is not None:
                    self.note = ""
                    _check_same(traced.program, made.program)
                    self.trusted = True
            except _DiffersError as error:
                self.template, self.failed = None, str(error)
        elif len(self.seen) == _MADE_FOR:
            reason = _unfit(spec, traced)
            try:
                if not reason:
                    self.template = _Template(spec, traced, self.seen)
            except Exception as error:  # the step is then traced for each length
                reason = first_line(error) or type(error).__name__
            self.failed = reason
        if self.failed:
            self.note = f"each length is traced: {self.failed}"
        return before is None and self.template is not None


def _unfit(spec: StepSpec, traced: Traced) -> str:
    """Why a step cannot be traced with symbolic sizes; "" if it can."""
    wrapped = any(compat.is_traceable_wrapper_subclass(slot.tensor) for slot in traced.slots)
    found = {
        "the model is on several ranks": spec.pipeline is not None or wrapped,
        "its expert buffers may grow": bool(traced.grow),
        "the host draws random numbers for the step": bool(traced.draws.calls or traced.draws.leaves),
        "it draws from its own generators": bool(traced.generators),
        "Python runs again after the step": traced.replay is not None,
        "forward or the loss changes something in Python": traced.changes,
    }
    return next((reason for reason, is_so in found.items() if is_so), "")


class _DiffersError(RuntimeError):
    """Two traces do not have the same nodes."""


class _Number(NamedTuple):
    """A size among the numbers of a template, by its place."""

    place: int


class _Earlier(NamedTuple):
    """A node of the graph, by its place."""

    place: int


@dataclass
class _Value:
    """A fake tensor whose form depends on symbolic sizes. ``storage``: what it shares with others, by its place."""

    like: torch.Tensor
    storage: int
    offset: Any
    shape: tuple
    strides: tuple


@dataclass
class _Node:
    op: str
    target: Any
    args: Any
    kwargs: Any
    name: str
    meta: dict[str, Any]
    value: Any


class _Template:
    """The step ``traced`` with symbolic sizes: those in which the batches of ``seen`` differ."""

    def __init__(self, spec: StepSpec, traced: Traced, seen: Sequence[Shapes]):
        self.reason, self._n = "", spec.accumulate
        self._places: dict[tuple[int, ...], int] = {}  # the values of an open size in the batches that were seen
        self._shapes = {leaf: [self._size(leaf, dim, seen) for dim in range(len(s))] for leaf, s in seen[-1].items()}
        hints = [sizes[-1] for sizes in self._places]
        self.sizes = OpenSizes(hints, self._shapes)
        symbolic = trace(spec, open_sizes=self.sizes)
        _check_alike(traced, symbolic)
        if self.sizes.rounds:
            raise _DiffersError("Python compares floating-point numbers that follow from sizes")
        graphs = zip(traced.program.graphs.items(), symbolic.program.graphs.values(), strict=True)
        self._graphs = {name: _Graph(one, other, self.sizes, hints) for (name, one), other in graphs}
        self._traced, self._reads = dataclasses.replace(traced, program=None), symbolic.batch_reads
        self._schedule = traced.program.schedule

    def _size(self, leaf: int, dim: int, seen: Sequence[Shapes]) -> tuple[int, bool]:
        """The size of a dimension; an open one by its place, and that it is open."""
        sizes = tuple(shapes[leaf][dim] for shapes in seen)
        if len(set(sizes)) == 1:
            return sizes[0], False
        return self._places.setdefault(sizes, len(self._places)), True

    def at(self, shapes: Shapes, leaves: Sequence[Any]) -> Traced | None:
        """The step for a batch of these ``shapes`` and ``leaves``; None, with a ``reason``, where something that the
        trace assumed, or that Python learned, does not hold."""
        start = time.perf_counter()
        given: dict[int, int] = {}
        for leaf, shape in self._shapes.items():
            for (size, is_open), now in zip(shape, shapes[leaf], strict=True):
                if (given.setdefault(size, now) if is_open else size) != now:
                    self.reason = "sizes that were equal or constant before no longer are"
                    return None
        sizes = [given[place] for place in range(len(given))]
        if assumed := self.sizes.broken(sizes):
            self.reason = f"it fails a guard of the trace with symbolic sizes, {assumed}"
            return None
        if not all([host.holds() for host in self._traced.hosts]):
            self.reason = "the optimizer takes another branch than in the trace with symbolic sizes"
            return None
        reads = self._reads.at(lambda value: self.sizes.at(value, sizes))
        if not reads.hold(leaves, self._n):
            self.reason = "Python reads other values than in the trace with symbolic sizes"
            return None
        graphs = {name: graph.at(sizes, start) for name, graph in self._graphs.items()}
        return dataclasses.replace(
            self._traced,
            program=StepProgram(graphs, list(self._schedule)),
            batch_reads=reads if reads.of_batch else BatchReads({}),
        )


def _check_alike(traced: Traced, symbolic: Traced) -> None:
    """Raise `_DiffersError` if the two bind to other tensors, or read other values of the batch."""
    for name in ("landing", "slots"):
        if len(getattr(traced, name)) != len(getattr(symbolic, name)):
            raise _DiffersError(f"a trace with symbolic sizes has other {name}")
    if traced.batch_reads.of_batch != symbolic.batch_reads.of_batch:
        raise _DiffersError("a trace with symbolic sizes reads other values of the batch")
    if symbolic.draws.calls or symbolic.grow or symbolic.generators or len(symbolic.hosts) != len(traced.hosts):
        raise _DiffersError("a trace with symbolic sizes needs the host for more")


def _check_same(one: StepProgram, other: StepProgram) -> None:
    """Raise `_DiffersError` if two programs do not have the same nodes."""
    for mine, theirs in zip(one.graphs.values(), other.graphs.values(), strict=True):
        _Graph(mine, theirs)


class _Graph:
    """The graph of ``step``, whose sizes are those of ``symbolic``, a graph of the same nodes with open ``sizes``.
    Raises `_DiffersError` if that, at the sizes ``hints``, is another graph."""

    def __init__(self, step: StepGraph, symbolic: StepGraph, sizes: OpenSizes | None = None, hints: Sequence[int] = ()):
        self._sizes, self._hints = sizes, hints
        self._numbers: list[Any] = []  # symbolic sizes
        self._places: dict[Any, int] = {}
        self._nodes: list[_Node] = []
        self._storages: dict[int, int] = {}  # of the one to the other's
        self._merged: dict[int, int] = {}  # of the other's, by what is left out
        self._bytes: dict[int, Any] = {}  # of storages that depend on symbolic sizes
        if [s.what for s in step.inputs] != [s.what for s in symbolic.inputs] or step.outputs != symbolic.outputs:
            raise _DiffersError("a trace with symbolic sizes has other inputs or results")
        self._places_of: dict[fx.Node, int] = {}
        self._theirs: dict[fx.Node, int] = {}
        pairs = self._paired(list(step.graph.nodes), list(symbolic.graph.nodes))
        self._attributes: dict[str, Any] = {}
        for mine, theirs in pairs:
            self._note_storages(mine.meta.get("val"), theirs.meta.get("val"))
        for mine, theirs in pairs:
            if mine.op == "get_attr":
                self._attribute(mine.target, getattr(step.module, mine.target), getattr(symbolic.module, theirs.target))
            given, is_alias = theirs.args, mine.target is aten.alias.default and _is_whole(theirs)
            if is_alias:
                given = given[:1]
            elif mine.op == "call_function" and theirs.target not in (mine.target, _ALSO.get(mine.target)):
                raise _DiffersError(f"a trace with symbolic sizes has {theirs.target} where it has {mine.target}")
            try:
                args, kwargs = self._joined(mine.args, given), self._joined(mine.kwargs, theirs.kwargs)
                value = self._value(mine.meta.get("val"), theirs.meta.get("val"))
            except _DiffersError as error:
                raise _DiffersError(f"{error}, at {mine.name}") from None
            if mine.op != theirs.op:
                raise _DiffersError(f"a trace with symbolic sizes has another node for {mine.name}")
            meta = {key: held for key, held in mine.meta.items() if key not in ("val", *_OF_VALUES)}
            self._nodes.append(_Node(mine.op, mine.target, args, kwargs, mine.name, meta, value))
        self._step = dataclasses.replace(step, module=None, executable=None, inputs=list(step.inputs))
        del self._places_of, self._theirs

    # ---- joining two graphs ----

    def _paired(self, ours: Sequence[fx.Node], others: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """Each node with the other graph's. With symbolic sizes, indexing by ``:`` has nodes, which give their
        argument; the last of them may be an ``alias`` where sizes are known."""
        pairs, at = [], 0
        for place, mine in enumerate(ours):
            while at < len(others) and _is_whole(others[at]) and not _is_whole(mine):
                if mine.target is aten.alias.default and not _is_whole(others[at].next):
                    break
                given = others[at].args[0]
                self._theirs[others[at]] = self._theirs[given]
                self._merged[compat.storage_key(others[at].meta["val"])] = self._memory(given.meta["val"])
                at += 1
            if at == len(others):
                raise _DiffersError("a trace with symbolic sizes has fewer nodes")
            self._places_of[mine] = self._theirs[others[at]] = place
            pairs.append((mine, others[at]))
            at += 1
        if at < len(others):
            raise _DiffersError("a trace with symbolic sizes has more nodes")
        return pairs

    def _attribute(self, name: str, mine: Any, theirs: Any) -> None:
        same = mine is theirs
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            forms = [(t.dtype, t.device, t.shape, t.stride()) for t in (mine, theirs)]
            same |= forms[0] == forms[1] and torch.equal(mine, theirs)
        if not same:
            raise _DiffersError(f"a trace with symbolic sizes has another constant {name}")
        self._attributes[name] = mine

    def _number(self, mine: int, theirs: Any) -> Any:
        """An integer of the graph, and where it depends on symbolic sizes its place."""
        if not isinstance(theirs, torch.SymInt):
            if type(mine) is not type(theirs) or mine != theirs:
                raise _DiffersError(f"a trace with symbolic sizes has {theirs} for {mine}")
            return mine
        if type(mine) is not int or self._sizes.at(theirs, self._hints) != mine:
            raise _DiffersError(f"a trace with symbolic sizes has another size for {mine}")
        expression = theirs.node.expr
        if expression not in self._places:
            self._places[expression] = len(self._numbers)
            self._numbers.append(theirs)
        return _Number(self._places[expression])

    def _stride(self, size: int, mine: int, theirs: Any) -> Any:
        """A stride of a dimension of this ``size``: for size 1 it has no effect, and may differ with symbolic sizes."""
        now = self._sizes.at(theirs, self._hints) if self._sizes else theirs
        return mine if size == 1 and now != mine else self._number(mine, theirs)

    def _joined(self, mine: Any, theirs: Any) -> Any:
        """Nested arguments of a node."""
        if isinstance(mine, fx.Node):
            if not isinstance(theirs, fx.Node) or self._places_of[mine] != self._theirs[theirs]:
                raise _DiffersError("a trace with symbolic sizes reads another node")
            return _Earlier(self._places_of[mine])
        if isinstance(theirs, torch.SymInt):
            return self._number(mine, theirs)
        if type(mine) is not type(theirs):
            raise _DiffersError(f"a trace with symbolic sizes has {theirs!r} for {mine!r}")
        if isinstance(mine, (list, tuple)) and len(mine) == len(theirs):
            items = [self._joined(a, b) for a, b in zip(mine, theirs, strict=True)]
            return items if isinstance(mine, list) else tuple(items)
        if isinstance(mine, dict) and list(mine) == list(theirs):
            return {key: self._joined(value, theirs[key]) for key, value in mine.items()}
        if isinstance(mine, slice):
            return slice(*(self._joined(getattr(mine, k), getattr(theirs, k)) for k in ("start", "stop", "step")))
        if mine is not theirs and repr(mine) != repr(theirs):
            raise _DiffersError(f"a trace with symbolic sizes has {theirs!r} for {mine!r}")
        return mine

    def _memory(self, theirs: torch.Tensor) -> int:
        """The storage of the other's tensor; what is all of another tensor is in that one's."""
        key = compat.storage_key(theirs)
        return self._merged.get(key, key)

    def _note_storages(self, mine: Any, theirs: Any) -> None:
        pairs = zip(compat.pytree.tree_leaves(mine), compat.pytree.tree_leaves(theirs), strict=False)
        for one, other in pairs:
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                keys = compat.storage_key(one), self._memory(other)
                if self._storages.setdefault(keys[0], keys[1]) != keys[1]:
                    raise _DiffersError("a trace with symbolic sizes shares other memory")
                size = self._number(one.untyped_storage().nbytes(), other.untyped_storage().nbytes())
                if isinstance(size, _Number):
                    self._bytes[keys[0]] = size

    def _value(self, mine: Any, theirs: Any) -> Any:
        """What a node gives, with symbolic sizes."""
        if isinstance(mine, (list, tuple)):
            if type(mine) is not type(theirs) or len(mine) != len(theirs):
                raise _DiffersError("a trace with symbolic sizes has other results")
            items = [self._value(a, b) for a, b in zip(mine, theirs, strict=True)]
            return items if isinstance(mine, list) else tuple(items)
        if type(mine) is int:
            return self._number(mine, theirs)
        if mine is None and isinstance(theirs, torch.SymInt):  # attention's longest sequence, taken from its results
            return None
        if not isinstance(mine, torch.Tensor):
            if type(mine) is not type(theirs) or mine != theirs:
                raise _DiffersError("a trace with symbolic sizes has another result")
            return mine
        if not isinstance(theirs, torch.Tensor) or _plain(mine) != _plain(theirs):
            raise _DiffersError("a trace with symbolic sizes has another tensor")
        shape = tuple(map(self._number, mine.shape, theirs.shape))
        strides = tuple(map(self._stride, mine.shape, mine.stride(), theirs.stride()))
        offset = self._number(mine.storage_offset(), theirs.storage_offset())
        key = compat.storage_key(mine)
        is_open = key in self._bytes or any(isinstance(number, _Number) for number in (offset, *shape, *strides))
        return _Value(mine, key, offset, shape, strides) if is_open else mine

    # ---- a graph of other sizes ----

    def at(self, sizes: Sequence[int], start: float) -> StepGraph:
        """The graph where the symbolic sizes are ``sizes``; its capture began at ``start``."""
        numbers = [self._sizes.at(number, sizes) for number in self._numbers]
        storages: dict[int, torch.UntypedStorage] = {}
        graph, made = fx.Graph(), []

        def filled(value: Any) -> Any:
            kind = type(value)
            if kind is _Earlier:
                return made[value.place]
            if kind is _Number:
                return numbers[value.place]
            if kind is list or kind is tuple:
                return kind([filled(item) for item in value])
            if kind is dict:
                return {key: filled(item) for key, item in value.items()}
            if kind is slice:
                return slice(filled(value.start), filled(value.stop), filled(value.step))
            return tensor(value) if kind is _Value else value

        def tensor(value: _Value) -> torch.Tensor:
            if value.storage not in storages:
                size = self._bytes.get(value.storage)
                own = value.like.untyped_storage() if size is None else compat.fake_storage(filled(size))
                storages[value.storage] = own
            memory = storages[value.storage], *map(filled, (value.offset, value.shape, value.strides))
            like = value.like
            return compat.fake_tensor(like.fake_mode, like.device, like.dtype, *memory)

        with compat.collector_off():
            for node in self._nodes:
                created = graph.create_node(node.op, node.target, filled(node.args), filled(node.kwargs), node.name)
                created.meta = dict(node.meta)
                if node.value is not None:
                    created.meta["val"] = filled(node.value)
                made.append(created)
        module = compat.lazy_graph_module(self._attributes, graph)
        inputs = [
            dataclasses.replace(spec, tensor=spec.tensor.clone()) if isinstance(spec.what, GroupValue) else spec
            for spec in self._step.inputs
        ]
        changed = {"inputs": inputs, "outputs": list(self._step.outputs), "axes": dict(self._step.axes)}
        seconds = time.perf_counter() - start
        return dataclasses.replace(self._step, module=module, executable=module, log=[], capture_s=seconds, **changed)


def _is_whole(node: fx.Node) -> bool:
    """Whether a slice, or its gradient, is all of its argument whatever the symbolic sizes are."""
    if node.target not in (aten.slice.Tensor, aten.slice_backward.default):
        return False
    form, given = (
        [*value.shape, *value.stride(), value.storage_offset()]
        for value in (node.meta["val"], node.args[0].meta["val"])
    )
    return len(form) == len(given) and all(map(_is_same_size, form, given))


def _is_same_size(one: Any, other: Any) -> bool:
    expressions = [size.node.expr if isinstance(size, torch.SymInt) else size for size in (one, other)]
    return expressions[0] == expressions[1]


def _plain(tensor: torch.Tensor) -> tuple:
    """What must agree of two tensors besides their sizes."""
    return type(tensor), tensor.dtype, tensor.device, tensor.ndim, tensor.is_conj(), tensor.is_neg(), tensor.layout
