"""Known values: values that follow only from literals, such as positions by ``arange``, which Python may read.

A step is traced without values, so ``if (positions.diff() != 1).any():`` has no answer in general. It has one if the
tensor depends on no input of the step: its nodes are then computed on the CPU when Python asks for the value. So Python
takes the same branch as in eager: Hugging Face models, for example, leave out masks that are only causal.

In a training step the integers of the batch are known as well, and how its other numbers compare; so are buffers that
the step does not change, and tensors from outside of the step. What Python learns from them, such as lengths and how
many elements a mask selects, holds for this form of the step: see `BatchReads`.

An operator that writes known values in place into a tensor that the trace made is recomputed with all that led to it.
These values stay unknown: random tensors, uninitialized tensors that were not fully written, tensors that other
operators wrote to, and tensors with more elements than `LARGEST`.
"""

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import starmap
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from stepgraph import compat
from stepgraph.capture.autocast import CALL_OTHERS
from stepgraph.capture.batch import has_values, warn_of_mask
from stepgraph.capture.batch_reads import BatchReads, computed, packet, sources
from stepgraph.capture.python.values import counts
from stepgraph.errors import noting_refusals
from stepgraph.graph.facts import is_view
from stepgraph.kernels.ctc import ctc_loss

aten = torch.ops.aten

#: Elements of the largest tensor that is computed for a value.
LARGEST = 1 << 24

#: Elements that are computed before each call, for one value that Python reads of the batch.
LARGEST_OF_BATCH = 1 << 25

#: Elements of the results that become literals of a graph.
LARGEST_LITERAL = 1 << 12

_TOLIST = Tensor.tolist

#: Operators that are captured with the sizes of their results, and not with their values.
_SIZED = (aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten._ctc_loss.Tensor)

_PUTS = (
    *(aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default),
    *(aten._index_put_impl.default, aten._index_put_impl_.default),
)

#: On floating-point numbers, these give the same bits on a CPU and on a GPU.
_SAME_ANYWHERE = (
    *("add", "sub", "mul", "div", "neg", "abs", "floor", "ceil", "round", "trunc", "clamp", "where", "masked_fill"),
    *("_to_copy", "clone", "lift_fresh_copy", "scalar_tensor", "zeros", "ones", "full", "cat", "index", "gather"),
    *("triu", "tril", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
)

#: These give truth values of floating-point numbers, the same ones everywhere.
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "signbit", "any", "all")

_UNINITIALIZED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")

#: Higher-order operators that go by a value, or whose bodies a graph would hold separately, out of sight of passes.
_CONTROL_FLOW = ("cond", "while_loop", "while_loop_stack_output", "scan", "associative_scan", "map_impl")


class KnownValues(compat.DispatchMode):
    """While active inside a trace, operators that give Python a value (``.item()``, ``if tensor:``) give known values;
    for others they fail as before. One per trace.

    ``batch``: tensors of the batch, and ``buffers``, by the placeholders of the trace. ``enters``: whether a tensor
    that existed before the trace is known too. What Python reads of all these goes to ``reads``.
    ``outside``: tensors from outside the step that gave such a value. ``exact``: whether a drawn 0.0 counts.
    ``caught``: errors of the trace alone: for a value that is not known, and refusals. Where the trace continues after
    one, forward has caught it, and does what it would not do in eager: the mode raises it at its end.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        batch: Mapping[fx.Node, Tensor] = MappingProxyType({}),
        buffers: Mapping[fx.Node, Tensor] = MappingProxyType({}),
        reads: BatchReads | None = None,
        exact: bool = True,
        enters: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        self._exact, self._enters = exact, enters
        self.caught: list[Exception] = []
        self._batch, self._reads = dict(batch) | dict(buffers), reads
        self._leaves = batch.keys()
        self._on_host: dict[fx.Node, Tensor] = {}
        self._fits: dict[fx.Node, bool] = {}
        self._writes: dict[int, list[fx.Node] | None] = {}  # storage -> its known writes; None: others too
        self.outside: list[Tensor] = []
        self._repeated = compat.RepeatedCalls(besides=CALL_OTHERS)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], compat.FakeTensor):
            # Autograd asks for devices twice as often as it calls operators. Where the mode of fake tensors, below all
            # others, answers, that takes an eighth of a trace.
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        latest = compat.latest_of_trace()
        try:
            return self._called(func, args, dict(kwargs or {}))
        except Exception as error:
            if not self._note(error):  # forward may catch it as in eager, and the node would fail in every step
                compat.erase_after(latest)
            raise

    def __enter__(self) -> Any:
        self._inside = contextlib.ExitStack()
        self._inside.enter_context(compat.failed_reads(self._note, counts))
        self._inside.enter_context(noting_refusals(self.caught))
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._inside.close()
        if kind is None and (caught := next((e for e in self.caught if not compat.is_answered(e)), None)):
            raise caught

    def _note(self, error: Exception) -> bool:
        """Whether ``error`` is one of the trace alone."""
        needs_value = compat.operator_needing_values(error) is not None
        self.caught += [error] * needs_value
        return needs_value

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _PUTS and self._needs_count(*args[1:]):  # else whatever a mask holds, the graph is the same
            args = args[0], self._all_places(args[1]), *args[2:]
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator: it may write to its arguments
            if func.name() in _CONTROL_FLOW:
                raise compat.DataDependentOutputException(func.name())
            self.note_writes((args, kwargs))
        elif func._schema.is_mutable:
            arguments = func._schema.arguments
            given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
            written = [given.get(a.name) for a in arguments if a.is_write]
            if _is_write(func):
                args = *args[:1], *self._entered(args[1:])
            if _is_write(func) and self._histories((args, kwargs)) is not None:
                return self._write(written[0], func(*args, **kwargs))
            self.note_writes(written)
        elif torch.Tag.data_dependent_output in func.tags or func is aten.is_nonzero.default:
            decided = _decided(compat.node_of_trace(args[0]), self._exact) if isinstance(args[0], Tensor) else None
            if decided is not None:
                return decided
            if self._knows_all((args, kwargs)):
                return self._ask(func, args, kwargs)
            value = func(*args, **kwargs)  # torch says what tensors from outside the step hold now
            leaves = compat.pytree.tree_leaves((args, kwargs))
            self.outside += [t for leaf in leaves if isinstance(leaf, Tensor) for t in _outside(leaf)]
            return value
        elif func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            return func(args[0], self._all_places(self._entered(args[1])))
        elif torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor:
            return self._sized(func, *self._entered((args, kwargs)))
        return self._repeated(func, args, kwargs)

    def _entered(self, arguments: Any) -> Any:
        """``arguments``, with nodes of the trace for tensors from outside."""

        def enter(tensor: Tensor) -> Tensor:
            return aten.alias.default(tensor) if has_values(tensor) and self._enters(tensor) else tensor

        return compat.pytree.tree_map_only(Tensor, enter, arguments)

    def _ask(self, function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """What ``function`` gives for known tensors."""

        def value(leaf: Any) -> Any:
            return self._value(leaf) if isinstance(leaf, Tensor) else leaf

        def node(leaf: Any) -> Any:
            return compat.node_of_trace(leaf) if isinstance(leaf, Tensor) else leaf

        given = args, kwargs or {}
        values, keywords = compat.pytree.tree_map(value, given)
        with compat.without_modes(), torch.no_grad():
            answer = function(*values, **keywords)
        given = compat.pytree.tree_map(node, given)
        asked = [leaf for leaf in compat.pytree.tree_leaves(given) if isinstance(leaf, fx.Node)]
        history = set().union(*(self._history(node) or () for node in asked))
        if self._reads is not None and (self._reads.open_sizes or not self._is_literal(history)):
            self._reads.note({node: _literal(node) for node in history}, function, *given, answer)
        return answer

    def _sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator whose result's shape depends on values. If they are known, the host computes the shape."""
        match func:
            case aten.nonzero.default if self._knows_all(args):
                return self._nonzero(args[0])
            case aten.masked_select.default if self._knows_all(args[1]):
                x, mask = torch.broadcast_tensors(*args)
                return aten.index.Tensor(x, self._places(mask))
            case aten.repeat_interleave.Tensor if self._knows_all(args[0]) and kwargs.get("output_size") is None:
                return func(args[0], output_size=self._ask(lambda repeats: int(repeats.sum()), args[:1]))
            case aten._ctc_loss.Tensor if self._knows_all(args[3]):
                blank, zero_infinity = (*args[4:], *(0, False)[len(args) - 4 :])
                return ctc_loss(*args[:4], blank, zero_infinity, self._ask(lambda n: int(n.max()), args[3:4]))
            case _ if func not in _SIZED and self._knows_all((args, kwargs)):
                return self._literals(func, args, kwargs)
        return func(*args, **kwargs)

    def _literals(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of an operator on known tensors, as literals in the graph."""
        device = next(leaf.device for leaf in compat.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        made = compat.pytree.tree_leaves(answer := self._ask(func, args, kwargs))
        if sum(tensor.numel() for tensor in made) > LARGEST_LITERAL:
            return func(*args, **kwargs)
        copies = [aten.lift_fresh_copy.default(tensor.contiguous()).to(device) for tensor in made]
        return compat.pytree.tree_unflatten(copies, compat.pytree.tree_structure(answer))

    def _nonzero(self, mask: Tensor) -> Tensor:
        return aten.nonzero_static.default(mask, size=self._ask(_count, (mask,)))

    def _needs_count(
        self, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *_: bool
    ) -> bool:
        """Whether ``values`` are as many as a known mask among ``indices`` selects, as in the gradient of an indexing.
        It still has its mask, and a GPU's kernel tells the host how many elements that selects."""
        masks = [i for i in indices if i is not None and i.dtype == torch.bool and self._knows_all(i)]
        held = [self._value(mask) for mask in masks]
        with compat.without_modes():
            return any(accumulate or (values.ndim and len(values) == _count(mask)) for mask in held)

    def _all_places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [place for index in indices for place in self._places(index)]

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """``index``, an argument of an indexing, with a known mask as the places of its elements."""
        mask = index is not None and index.dtype == torch.bool and index.ndim > 0
        return list(self._nonzero(index).unbind(1)) if mask and self._knows_all(index) else [index]

    def _knows_all(self, arguments: Any) -> bool:
        """Whether the values of all tensors among ``arguments`` follow from literals and the batch's integers."""
        histories = self._histories(arguments)
        return histories is not None and all(starmap(self._is_written_whole, histories.items()))

    def _histories(self, arguments: Any) -> dict[fx.Node, list[fx.Node]] | None:
        """The nodes that lead to each tensor among ``arguments``; None if one's do not say its value."""
        tensors = [leaf for leaf in compat.pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        found = {node: node and self._history(node) for node in map(compat.node_of_trace, tensors)}
        return None if None in found.values() else found

    def _is_written_whole(self, node: fx.Node, history: Sequence[fx.Node]) -> bool:
        """Whether ``node`` has one value, whatever the memory held that ``torch.empty`` gave."""
        if not any(packet(made) in _UNINITIALIZED for made in history):
            return True
        if self._reads is not None and self._reads.open_sizes:  # what was written may depend on the sizes
            return False
        least, greatest = (self._computed(node, history, bound) for bound in ("min", "max"))
        return torch.equal(least, greatest)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor of the running trace follow from literals."""
        if not self._knows_all(tensor):
            return False
        return self._is_literal(self._history(compat.node_of_trace(tensor)))

    def _is_literal(self, history: Collection[fx.Node]) -> bool:
        """Whether a value that ``history`` leads to follows from literals."""
        return self._batch.keys().isdisjoint(history) and not any(map(_is_outside, history))

    def knows_of_batch(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor of the running trace follow from literals and the batch's integers."""
        return compat.node_of_trace(tensor) is not None and self._knows_all(tensor)

    def hides_alike(self, mask: Tensor, leaves: Sequence[Any], microbatches: int) -> bool:
        """Whether the values of ``mask`` are known, and it hides something in each of the microbatches that ``leaves``
        of a batch are split into, or in none. Warns where it does in some."""
        if microbatches == 1 or not self.knows_of_batch(mask) or self.knows(mask):
            return self.knows_of_batch(mask)
        kept = self.kept_for_host(mask)
        with compat.without_modes(), torch.no_grad():
            parts = [self._reads.values([kept], leaves, k, microbatches)[0] for k in range(microbatches)]
            answers = {bool(part.all()) for part in parts}
        history = self._history(compat.node_of_trace(mask))
        own = all(node in self._batch or packet(node) == "_to_copy" for node in history)
        if len(answers) > 1 and not own:  # of the batch's own masks the step warns itself
            warn_of_mask(
                f"a mask of shape {list(mask.shape)} hides nothing in one microbatch, where eager drops it, and "
                "something in another: it is kept in all, which may change the last bits"
            )
        return len(answers) == 1

    def value_of(self, tensor: Tensor) -> Tensor:
        """What a known ``tensor`` of the example batch holds, on the CPU."""
        return self._value(tensor)

    def kept_for_host(self, tensor: Tensor) -> fx.Node:
        """A known ``tensor`` in `BatchReads`, which computes it before each step."""
        node = compat.node_of_trace(tensor)
        return self._reads.keep({node: _literal(node) for node in self._history(node)}, node)

    def listed(self, tensor: Tensor) -> list | None:
        """The values of ``tensor`` as a list, or None if they are not known."""
        return self._ask(_TOLIST, (tensor,)) if self._knows_all(tensor) else None

    def settle(self, model: nn.Module) -> None:
        """Give attributes of modules in which forward keeps tensors of the trace their values, where these are known,
        as of a number that it keeps: whether a later call depends on them is then seen by a second trace."""
        for module in model.modules():
            for key, kept in vars(module).items():
                if isinstance(kept, Tensor) and compat.is_fake(kept) and self._knows_all(kept):
                    value = self._value(kept)
                    with compat.without_modes():
                        vars(module)[key] = value.clone()

    def _write(self, tensor: Tensor, result: Tensor) -> Tensor:
        """Note that the node of ``result`` has written known values into ``tensor``."""
        storage = compat.storage_key(tensor)
        is_batch = any(storage in _storages(node) for node in self._batch)
        writes = self._writes.get(storage, [])
        self._writes[storage] = None if is_batch or writes is None else [*writes, compat.node_of_trace(result)]
        return result

    def is_written(self, node: fx.Node) -> bool:
        """Whether something has written to the storage of ``node``."""
        return not _storages(node).isdisjoint(self._writes)

    def note_writes(self, arguments: Any) -> None:
        """The values of the tensors among ``arguments`` are not known from here on."""
        pending = [leaf for leaf in compat.pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        for tensor in pending:
            if compat.is_traceable_wrapper_subclass(tensor):
                pending += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            else:
                self._writes[compat.storage_key(tensor)] = None

    def _history(self, node: fx.Node) -> list[fx.Node] | None:
        """The nodes that lead to the value of ``node``, in order; None if it is not known."""
        found: set[fx.Node] = set()
        pending = [node]
        while pending:
            if (source := pending.pop()) not in found:
                needed = self._needed(source)
                if needed is None:
                    return None
                pending += needed
                found.add(source)
        given = found.intersection(self._batch) | set(filter(_is_outside, found))
        return sorted(found) if not given or _is_exact(node, found, given, self._leaves) else None

    def _needed(self, node: fx.Node) -> list[fx.Node] | None:
        """The nodes that ``node`` is computed from, and that write to its storage; None if it cannot be computed."""
        writes = [self._writes.get(storage, ()) for storage in _storages(node)]
        if any(nodes is None for nodes in writes):
            return None
        needed = [write for nodes in writes for write in nodes or () if write is not node]
        if node in self._batch:
            return needed
        if node.op == "get_attr":
            self._fits[node] = not _is_outside(node) or (has_values(_literal(node)) and self._enters(_literal(node)))
        elif node not in self._fits:
            self._fits[node] = _computable(node)
        return [*sources(node), *needed] if self._fits[node] else None

    def _value(self, tensor: Tensor) -> Tensor:
        """The value of a known ``tensor``, on the CPU."""
        wanted = compat.node_of_trace(tensor)
        return self._computed(wanted, self._history(wanted))

    def _computed(self, wanted: fx.Node, history: Sequence[fx.Node], empty: str = "min") -> Tensor:
        """The value of ``wanted``; what ``torch.empty`` gives holds the ``empty`` number of its dtype, min or max."""
        values = {node: _literal(node) for node in history if node.op == "get_attr"}
        with compat.without_modes():  # a copy from a GPU would be fake
            for node in filter(self._batch.__contains__, history):
                values[node] = self._on_host[node] = self._on_host.get(node, self._batch[node]).cpu()
        uses = Counter(source for node in history for source in sources(node))
        with compat.without_modes(), torch.no_grad():
            for node in history:
                if node not in values:
                    values[node] = computed(node, values)
                    if packet(node) in _UNINITIALIZED:
                        values[node].fill_(_bound(values[node].dtype, empty))
                    uses.subtract(done := sources(node))
                    for source in done:
                        if not uses[source] and source is not wanted:
                            del values[source]
        return values[wanted]


def _bound(dtype: torch.dtype, which: str) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return math.inf if which == "max" else -math.inf
    return (which == "max") if dtype == torch.bool else getattr(torch.iinfo(dtype), which)


def _literal(node: fx.Node) -> Tensor | None:
    return getattr(compat.constants_of_trace(), node.target) if node.op == "get_attr" else None


def _storages(node: fx.Node) -> set[int]:
    """The storages in which the results of ``node`` lie."""
    return {compat.storage_key(value) for value in _results(node)}


def _is_write(func: Any) -> bool:
    """Whether ``func`` writes to one tensor, which it returns, and draws no random numbers."""
    returns = func._schema.returns
    one = sum(a.is_write for a in func._schema.arguments) == len(returns) == 1 and returns[0].alias_info is not None
    return one and func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags


def _decided(node: fx.Node | None, exact: bool) -> bool | None:
    """What a comparison of a number drawn from [0, 1) says whatever was drawn, as LayerDrop's with 0; else None.
    Without ``exact``, 0.0 counts as never drawn, one of 16 million numbers: peft's LoHa asks whether one is above 0."""
    if node is None or len(node.args) != 2 or not isinstance(node.args[1], int | float):
        return None
    drawn, bound = node.args
    if not isinstance(drawn, fx.Node) or drawn.target is not aten.rand.default:
        return None
    below, above = bound <= 0, bound >= 1  # no number, every number is below the bound
    none = bound < 0 if exact else below  # no number is at most the bound
    answers = {aten.lt.Scalar: above, aten.ge.Scalar: below, aten.le.Scalar: above, aten.gt.Scalar: none}
    opposite = {aten.lt.Scalar: below, aten.ge.Scalar: above, aten.le.Scalar: none, aten.gt.Scalar: above}
    if node.target not in answers or not (answers[node.target] or opposite[node.target]):
        return None
    return answers[node.target]


def _outside(tensor: Tensor) -> list[Tensor]:
    """The tensors from outside the step that the value of ``tensor`` comes from."""
    node = compat.node_of_trace(tensor)
    if node is None:
        return [tensor]
    pending, met = [node], dict[fx.Node, None]()
    while pending:
        if (node := pending.pop()) not in met:
            met[node] = None
            pending += node.all_input_nodes
    return [held for held in map(_literal, met) if held is not None]


def _is_outside(node: fx.Node) -> bool:
    """Whether the node is a constant that existed before the trace, and may change between steps, and no literal."""
    if node.op != "get_attr":
        return False
    literal = all(user.target is aten.lift_fresh_copy.default for user in node.users)
    return not (literal and _literal(node).untyped_storage().resizable())  # NumPy's memory is not


def _computable(node: fx.Node) -> bool:
    """Whether the node gives the same values in every step if its inputs do."""
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    target, values = node.target, compat.pytree.tree_leaves(node.meta.get("val"))
    return (
        target.namespace in ("aten", "prims")
        and (not target._schema.is_mutable or _is_write(target))
        and torch.Tag.nondeterministic_seeded not in target.tags
        and all(isinstance(v, Tensor) and _elements(v) <= LARGEST and v.device.type != "meta" for v in values)
    )


def _is_exact(node: fx.Node, history: set[fx.Node], given: Collection[fx.Node], batch: Collection[fx.Node]) -> bool:
    """Whether the value of ``node``, which follows from the ``given`` nodes by ``history``, may be computed on the CPU
    before each call: with the same bits, and without much work.

    The ``batch``'s numbers of floating point change in every step, and so may only be compared.
    """
    compared = any(map(_is_floating, history.intersection(batch)))
    if compared and _is_floating(node):
        return False
    elements = 0
    for made in history.difference(given):
        if is_view(made):
            continue
        if compared and not _is_floating(made) and any(map(_is_floating, sources(made))):
            exact = packet(made) in _COMPARISONS
        else:
            here = not compared and all(v.device.type == "cpu" for v in _results(made))
            exact = here or not _is_floating(made) or made.op == "get_attr" or packet(made) in _SAME_ANYWHERE
        if not exact:
            return False
        elements += sum(map(_elements, _results(made)))
    return elements <= LARGEST_OF_BATCH


def _results(node: fx.Node) -> list[Tensor]:
    return [v for v in compat.pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]


def _is_floating(node: fx.Node) -> bool:
    return any(v.is_floating_point() or v.is_complex() for v in _results(node))


def _elements(tensor: Tensor) -> int:
    """How many elements of a tensor lie apart in memory."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)


def _count(mask: Tensor) -> int:
    """How many elements are not zero; what is expanded is counted once."""
    times = 1
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if not stride:
            times, mask = times * size, mask.narrow(dim, 0, min(size, 1))
    return times * int(mask.count_nonzero())
