"""Where each node of the graph comes from (module path, phase, source line, region), and whose gradient it reduces.

Nodes are attributed as the trace creates them, while calls of modules keep the path of the one that is running. A
backward operator belongs to the forward operator that created its autograd node: autograd numbers its nodes, the number
is noted when the forward operator runs and looked up when the node's backward does. The additions with which autograd
sums several gradients of one tensor run after the node that produced the last of them, and keep its provenance. A
collective that runs where autograd works on what forward made only from one parameter reduces its gradient.

It also decides which calls of ``torch.utils.checkpoint`` a captured step runs twice. Eager runs a checkpointed function
again in backward, on what its tensors hold then. Where that is what they held in forward, and nothing is written, the
graph has one run, and a pass may recompute its results. All others are traced twice, with the same random numbers.
"""

import contextlib
import functools
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from stepgraph import compat
from stepgraph.capture import autocast
from stepgraph.capture.formulas import BY_GRADIENTS, EagerFormulas
from stepgraph.capture.python.values import is_pythons
from stepgraph.capture.roles import Owners, made_from
from stepgraph.capture.state import OutsideError, TrainsError, named_modules, unwrap
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.collectives import stage_of
from stepgraph.graph.facts import is_mutating, is_random
from stepgraph.graph.provenance import KEY, Provenance, phase_of, provenance
from stepgraph.regions import listening

aten = torch.ops.aten


def calls_to_repeat(graph: fx.Graph) -> frozenset[int]:
    """The calls of which a second run would write again into what was there before the first one, or would read what
    forward has written since. ``graph``: a trace of forward in which each call ran once."""
    aliases, found = Aliases(graph), set()
    call = {node: place.checkpoint if (place := provenance(node)) else None for node in graph.nodes}
    if set(call.values()) == {None}:
        return frozenset()
    nodes = list(aliases.position)
    for node, inside in call.items():
        if inside is None or inside in found or node.op != "call_function":
            continue
        written = written_arguments(node) if is_mutating(node) else []
        outside = [aliases.root(source) for source in node.all_input_nodes if call[aliases.root(source)] != inside]
        later = [nodes[at] for root in outside for at in aliases.writes.get(root, ()) if at > aliases.position[node]]
        if any(aliases.root(w) in outside for w in written) or any(phase_of(w) in ("forward", "loss") for w in later):
            found.add(inside)
    return frozenset(found)


class RunAgain(Exception):
    """Ends a trace in which each call ran once: ``calls`` must run twice."""

    def __init__(self, calls: Collection[int]):
        super().__init__()
        self.calls = calls


class Repeats(compat.TorchDispatchMode):
    """The random numbers that ``calls`` draw in their first run, for their second one.

    ``where``: module path and source line of the running code.
    """

    supports_higher_order_operators = True

    def __init__(self, calls: Collection[int], where: Callable[[], str]):
        super().__init__()
        self.calls, self._where = calls, where
        self._first: list[list[torch.Tensor]] = []  # of open calls, outer ones first
        self._again: list[Iterator[torch.Tensor]] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[list[torch.Tensor]]:
        """The first run of a call; gives the numbers that it draws."""
        self._first.append([])
        try:
            yield self._first[-1]
        finally:
            self._first.pop()

    @contextlib.contextmanager
    def again(self, drawn: Sequence[torch.Tensor]) -> Iterator[None]:
        """The second run of a call that has ``drawn`` these numbers."""
        self._again.append(iter(drawn))
        try:
            yield
        finally:
            self._again.pop()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._first or self._again) or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        self._check(func, args, kwargs)
        if self._again:
            numbers = next(self._again[-1])
            if func is aten.native_dropout.default:
                scale = 1 / (1 - args[1]) if args[1] < 1 else 0.0
                made = aten.native_dropout_backward.default(args[0], numbers, scale), numbers
            else:
                made = args[0].copy_(numbers) if func._schema.is_mutable else numbers.clone()
        else:
            made = func(*args, **kwargs)
            numbers = made[1] if func is aten.native_dropout.default else made.clone()
        for drawn in self._first:
            drawn.append(numbers)
        return made

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise unless the numbers depend on no tensor, and so equal the first run's."""
        given = [leaf for leaf in compat.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shaped = func._schema.is_mutable or func.overloadpacket.__name__.endswith("_like")
        if len(given) > shaped and func is not aten.native_dropout.default:
            raise CaptureError(
                f"{self._where()} draws random numbers by {func} from values of tensors, under torch.utils.checkpoint "
                "of what writes its buffers; draw them outside of the checkpointed function"
            )


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return named.get("dropout_p", 1) != 0


_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_STEP = os.path.join(os.path.dirname(os.path.dirname(__file__)), "step.py")
_COMPAT = os.path.dirname(compat.__file__) + os.sep
_LOWER = os.path.join(os.path.dirname(_STEP), "lower", "")
_SAVED = os.path.join(os.path.dirname(_STEP), "run", "saved", "")
_SKIPPED = (_TORCH, _HERE, _STEP, _LOWER, _SAVED, _COMPAT, contextlib.__file__)


_TRITON = os.path.join("triton", "runtime", "")  # launches a model's kernels


def is_user_file(filename: str) -> bool:
    """Whether a file is neither torch's nor Triton's nor of this room."""
    return not filename.startswith((*_SKIPPED, "<")) and os.sep + _TRITON not in filename


def user_frame(frame: FrameType | None) -> str:
    """``file:line`` of the innermost frame outside torch and this room."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_source(error: BaseException) -> str:
    """``file:line`` of the innermost frame outside torch and this room that ``error`` came through."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [(file, line) for file, line in frames if is_user_file(file)]
    frames = [frame for frame in frames if not is_pythons(frame[0])] or frames
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


#: They round otherwise without gradients.
RECURRENT = (torch.ops.aten.mkldnn_rnn_layer.default,)


class Recorder:
    """Attributes every node of a graph as a trace creates it. One per trace.

    ``repeated``: the calls of ``torch.utils.checkpoint`` that run again in backward, see `calls_to_repeat`.
    ``exact``: how many microbatches have eager's bits, or 0.
    ``is_known``: whether the values of a tensor are known, and ``is_literal``, whether they follow from literals, see
    `stepgraph.capture.known`. ``reducing``: collectives of gradients -> the parameter's placeholder.
    """

    def __init__(self, model: nn.Module, repeated: Collection[int] = (), exact: int = 0):
        self.model, self.exact = model, exact
        self.phase = "loss"
        self.is_known: Callable[[torch.Tensor], bool] = lambda _: False
        self.is_literal = self.is_known
        self.latest: fx.Node | None = None
        self.stack: list[str] = []
        self._regions: list[str] = []  # open ones
        self.checkpoints = 0
        self.in_contexts: set[int] = set()  # checkpoints whose runs the user puts into contexts
        self._repeats = Repeats(repeated, self.where)
        self._open: int | None = None  # the outermost open call of checkpoint
        self._again = False
        self._apart: list[tuple[int, int]] = []  # of re-entrant checkpoints, inner ones first: the numbers of autograd
        self._results: set[Any] = set()  # (autograd node, output) of what these checkpoints return
        self._reentrant = 0  # open re-entrant checkpoints
        self._draws_anew = 0  # open checkpoints with preserve_rng_state=False
        self._sources: dict[str, str] = {"": ""}  # of each module's latest forward node
        self._forward: dict[int, Provenance] = {}
        self._forward_nodes: dict[int, list[fx.Node]] = defaultdict(list)
        self.origin: Provenance | None = None
        self._owner: fx.Node | None = None  # of the gradient that runs through backward
        self._placeholders: dict[int, fx.Node] = {}  # of parameters, by their ids
        self.reducing: dict[fx.Node, fx.Node] = {}

    @property
    def in_checkpoint(self) -> bool:
        """Whether a call of ``torch.utils.checkpoint`` is open."""
        return self._open is not None

    @contextlib.contextmanager
    def watch_graph(self) -> Iterator[None]:
        """Attribute the nodes that the trace creates."""
        graph, constants = compat.graph_of_trace(), compat.constants_of_trace()
        create = graph.create_node

        def create_attributed(*args: Any, **kwargs: Any) -> fx.Node:
            node = self.latest = create(*args, **kwargs)
            here = node.meta[KEY] = self._here(sys._getframe(1))
            if here and here.phase in ("forward", "loss"):
                self._forward_nodes[compat.current_sequence_nr()].append(node)
            elif self._owner is not None and not self._again and stage_of(node) == "begin":
                self.reducing[node] = self._owner
            if is_mutating(node):
                _refuse_written(node, constants)
            if self._draws_anew and is_random(node):
                _refuse_drawing_anew(node)
            if self._reentrant and (node.target in BY_GRADIENTS or (self.exact and node.target in RECURRENT)):
                _refuse_by_gradients(node)
            return node

        graph.create_node = create_attributed
        try:
            yield
        finally:
            del graph.create_node  # the class's method again

    def _here(self, frame: FrameType) -> Provenance | None:
        if self._again and self.phase == "backward":
            path = self.stack[-1] if self.stack else ""
            return self._inside(Provenance(path, "backward", user_frame(frame)))
        if self.phase == "backward" or self.origin is not None:
            return self._inside(self.origin) if self._regions and self.origin else self.origin
        source = user_frame(frame)
        phase = "forward" if self.phase == "loss" and self.stack else self.phase
        checkpoint = None if self._open in self._repeats.calls else self._open
        here = Provenance(self.stack[-1] if self.stack else "", phase, source, checkpoint)
        if self._regions:
            here = self._inside(here)
        if phase in ("forward", "loss"):
            self._forward.setdefault(compat.current_sequence_nr(), here)
            self._sources[here.path] = source
        return here

    def _inside(self, where: Provenance) -> Provenance:
        """``where``, in the open regions too. A backward that opens the regions of its forward is in them once."""
        inherited = where.region.split("/") if where.region else []
        return where._replace(region="/".join([*inherited, *(n for n in self._regions if n not in inherited)]))

    def where(self, frame: FrameType | None = None) -> str:
        """The module that runs and the user's line that led to ``frame``, by default the caller's, for messages."""
        return Provenance((self.stack and self.stack[-1]) or "", "", user_frame(frame or sys._getframe(1))).place

    @contextlib.contextmanager
    def watch_modules(self) -> Iterator[None]:
        """Keep the module path while the model's modules run."""
        paths = {id(module): path for path, module in named_modules(self.model)}
        run = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _refuse_wrapper(module)
            # No hooks: torch's transformer layers take another way where a module has one.
            if (path := paths.get(id(module))) is None:
                return run(module, *args, **kwargs)
            self.stack.append(path)
            made = run(module, *args, **kwargs)
            # After a failure the stack stays, for the error message. Where the model itself catches the failure, the
            # next module out clears what is left.
            while self.stack.pop() != path:
                pass
            return made

        try:
            with (
                compat.replaced(nn.Module, __call__=compat.for_this_thread(call, run)),
                compat.attention_as_in_eager(),
                listening() as self._regions,
                compat.watch_autocast(self._refuse_unclosed) as self._casts,
                autocast.Kept(self._casts),
                self._formulas(),
                compat.intercept_checkpoint(self._in_checkpoint, self._returned),
                self._repeats if self._repeats.calls else contextlib.nullcontext(),
            ):
                yield
        finally:
            self._regions = []

    def _formulas(self) -> EagerFormulas:
        flushes = compat.flushes_denormal()

        def look() -> None:
            """Setters in C that were imported under other names are detected by their effect."""
            for kind in ("cpu", "cuda"):
                if not self._casts and torch.is_autocast_enabled(kind):
                    torch.set_autocast_enabled(kind, False)
                    self._refuse_unclosed("a function of torch")
            if compat.flushes_denormal() != flushes:
                torch.set_flush_denormal(flushes)
                raise CaptureError(
                    f"{self.where()} changes torch's setting of flush denormal, and the operators of a captured step "
                    "run with the setting of its call; set it before"
                )

        return EagerFormulas(lambda mask: self.is_known(mask), lambda tensor: self.is_literal(tensor), look)

    def _refuse_unclosed(self, name: str) -> None:
        """Casts of weights that no ``torch.autocast`` ends stay in eager's cache."""
        raise CaptureError(
            f"{self.where()} switches autocast on by {name}, where eager keeps casts of the weights, also for later "
            "steps; use with torch.autocast(...)"
        )

    @contextlib.contextmanager
    def _in_checkpoint(self, same_random: bool, reentrant: bool, contexts: bool) -> Iterator[compat.Again | None]:
        """A call of ``torch.utils.checkpoint``; one inside another belongs to the outer one."""
        outer, draws_anew, before = self._open, self._draws_anew, self._reentrant
        self._draws_anew += not same_random
        self._reentrant += reentrant
        start = compat.current_sequence_nr()
        if outer is None:
            self._open = self.checkpoints
            self.checkpoints += 1
        if contexts:
            self.in_contexts.add(self._open)
        try:
            if self._open not in self._repeats.calls:
                yield None
            else:
                with self._repeats.first() as drawn:
                    yield functools.partial(self._run_again, self._open, list(self.stack), drawn)
        finally:
            self._open, self._draws_anew, self._reentrant = outer, draws_anew, before
            if reentrant:
                self._apart.append((start, compat.current_sequence_nr()))

    def _returned(self, result: Any) -> None:
        results = result if isinstance(result, tuple) else (result,)
        self._results.update((one.grad_fn, one.output_nr) for one in results if isinstance(one, torch.Tensor))

    @contextlib.contextmanager
    def _run_again(self, call: int, stack: list[str], drawn: list[torch.Tensor]) -> Iterator[None]:
        """The second run of a call of ``torch.utils.checkpoint`` that was made inside ``stack``."""
        before = self._open, self._again, list(self.stack)
        self._open, self._again, self.stack[:] = call, True, stack
        try:
            # `torch.autograd.grad` leaves such a mode of the trace.
            with self._repeats.again(drawn), self._formulas():
                yield
        finally:  # torch ends it by an exception once nothing more is needed
            self._open, self._again, self.stack[:] = before

    def watch_backward(self, roots: Sequence[Any], params: Sequence[torch.Tensor], frozen: Mapping[int, str]) -> None:
        """Attribute what runs in backward from the autograd nodes ``roots`` to the forward operators that made it
        necessary; from inside another backward, to the one that runs.

        Gradients may flow into ``params`` and into tensors of the step, which nobody reads them from: gradient
        checkpointing makes embeddings require one. Raises `CaptureError` if they flow into another tensor
        of the model (``frozen``: its name by its id), into a tensor from outside, or into one that a re-entrant
        checkpoint computes but does not return; also, where the step is to be ``exact``, if eager adds up a parameter's
        gradients in another order, see `_refuse_order`.
        """
        known = {id(p) for p in params}
        owners = self._owners(params)
        seen, queue = set(), [(root, self.origin) for root in roots]
        uses: dict[Any, list[int]] = defaultdict(list)
        while queue:
            node, user = queue.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (leaf := compat.leaf_of(node)) is not None:
                if id(leaf) in frozen or (id(leaf) not in known and not _made_in_trace(leaf)):
                    _refuse_foreign(leaf, frozen.get(id(leaf)), user)
                continue
            # A step that recorded no operator, such as a redistribution to where a DTensor lies, belongs to its reader.
            origin = self._forward.get(node._sequence_nr(), user)
            owner = owners and owners.of(node)
            node.register_prehook(self._prehook(origin and origin._replace(phase="backward"), owner))
            queue.extend((next_node, origin) for next_node, _ in node.next_functions)
            for one, output in node.next_functions if self._apart else ():
                if one is not None and self._leaves_checkpoint(node, one, output):
                    _refuse_stored(self._forward.get(one._sequence_nr()))
            if self._apart and self.exact:
                for one, _ in node.next_functions:
                    if id(compat.leaf_of(_uncast(one))) in known:
                        uses[one].append(node._sequence_nr())
        for one, numbers in uses.items():
            # Eager casts again in each re-entrant call: the gradients of one cast are those of one call, or of none.
            is_cast = _uncast(one) is not one
            in_order = self._is_in_order(sorted(numbers, reverse=True), self.exact > 1)
            if not in_order or (is_cast and len(set(self._groups(numbers))) > 1):
                _refuse_order(compat.leaf_of(_uncast(one)), self._forward.get(max(numbers)))

    def _leaves_checkpoint(self, user: Any, made: Any, output: int) -> bool:
        """Whether ``made`` belongs to an operator inside a re-entrant checkpoint, whose ``output`` the checkpoint does
        not return, and ``user`` to one outside. A cast of a parameter does not count: autocast caches it for both."""
        if (made, output) in self._results or compat.leaf_of(_uncast(made)) is not None:
            return False
        read, number = user._sequence_nr(), made._sequence_nr()
        return any(a < number <= b and not a < read <= b for a, b in self._apart)

    def _groups(self, numbers: Sequence[int]) -> list[int]:
        """For each of these ``numbers`` of autograd, the re-entrant checkpoint that it is of, or -1."""
        return [next((i for i, (a, b) in enumerate(self._apart) if a < number <= b), -1) for number in numbers]

    def _is_in_order(self, numbers: Sequence[int], accumulates: bool) -> bool:
        """Whether adding up a parameter's gradients one by one, from the operators with these ``numbers``, is what
        eager does, which adds up those of each re-entrant checkpoint, and those of all else, by themselves, and one
        after the other to those of earlier microbatches, where it ``accumulates``."""
        groups = self._groups(numbers)
        last = {group: place for place, group in enumerate(groups)}
        first = min(last, key=lambda group: last[group])
        whole = groups[: last[first] + 1].count(first) == last[first] + 1
        return whole and len(groups) - len(last) == last[first] and not (accumulates and len(last) > 1)

    def _owners(self, params: Sequence[torch.Tensor]) -> Owners | None:
        if not (dist.is_available() and dist.is_initialized()):
            return None  # there is nothing to reduce
        self._placeholders = {id(p): compat.node_of_trace(unwrap(p)[0][0]) for p in params}
        made = made_from(compat.graph_of_trace(), set(self._placeholders.values()))
        return Owners(self._placeholders, self._forward_nodes, made)

    def _prehook(self, origin: Provenance | None, owner: fx.Node | None) -> Any:
        def hook(_grad_outputs: Any) -> None:
            self.origin, self._owner = origin, owner

        return hook

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Operators run inside belong to ``phase``. After a failure inside, it stays, for the error message."""
        saved = self.phase
        self.phase, self.origin, self._owner = phase, None, None
        yield
        self.phase, self.origin, self._owner = saved, None, None

    def attribute(self, path: str, parameter: torch.Tensor | None = None) -> None:
        """What follows in this phase belongs to the module at ``path``, and works on the gradient of ``parameter``."""
        self._owner = self._placeholders.get(id(parameter))
        self.origin = Provenance(path, self.phase, self._sources.get(path) or self._sources[""])


def _made_in_trace(leaf: torch.Tensor) -> bool:
    """Whether the running trace made ``leaf``, or was given it in the batch."""
    nodes = [compat.node_of_trace(t) for t in unwrap(leaf)[0]]
    return all(node is not None and node.op != "get_attr" for node in nodes)


def _uncast(node: Any) -> Any:
    """The autograd node that ``node`` casts, if it is a cast, else ``node``."""
    return node.next_functions[0][0] if type(node).__name__ == "ToCopyBackward0" else node


def _refuse_foreign(tensor: torch.Tensor, frozen: str | None, user: Provenance | None) -> None:
    where = user.place if user else "the loss"
    if frozen:
        raise TrainsError(
            f"forward makes {frozen}, used in {where}, require a gradient, which it did not before; "
            "call requires_grad_() before the capture",
            frozen,
        )
    raise OutsideError(
        f"a tensor of shape {list(tensor.shape)} that requires a gradient is used in {where} but is not one of the "
        "model's parameters; register it as an nn.Parameter of the model, or of a module that the loss calls, and use "
        "no cached copy of a parameter",
        tensor,
    )


def _refuse_order(parameter: torch.Tensor, where: Provenance | None) -> None:
    """Eager's re-entrant checkpoint adds what it finds to ``parameter.grad`` when its own backward ends."""
    path, source = (where.path or "the model", where.source) if where else ("the model", "")
    raise CaptureError(
        f"a parameter of shape {list(parameter.shape)} is used several times in and around a re-entrant "
        f"torch.utils.checkpoint, such as in {path} ({source}), and eager adds up its gradients in another order than "
        "a captured step; use use_reentrant=False, or passes that round differently"
    )


def _refuse_stored(where: Provenance | None) -> None:
    """Eager runs a re-entrant checkpoint without gradients at first; only what the checkpoint returns gets one."""
    raise CaptureError(
        f"the loss depends on a tensor that {where.place if where else 'the model'} computes inside a re-entrant "
        "torch.utils.checkpoint, which does not return it, such as a router's logits; eager computes no gradient for "
        "it; pass use_reentrant=False"
    )


def _refuse_wrapper(module: nn.Module) -> None:
    """Raise for a module whose gradients, or parameters, ranks exchange in hooks of torch's, which no trace runs."""
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}
    found = names & {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel"}
    if found and (found != {"DistributedDataParallel"} or module.process_group.size() > 1):
        raise CaptureError(
            f"a captured step would not exchange between ranks what torch's {found.pop()} does in hooks; pass it the "
            "plain model, sharded or replicated by stepgraph.parallel.parallelize(model, mesh)"
        )


def _refuse_written(node: fx.Node, constants: nn.Module) -> None:
    """A tensor that is no input is written: torch would also write into the user's own while it traces. Or an empty one
    is, by an operator that, unlike ``add_``, may give it another size, as quantization's observers do at first."""
    where = provenance(node)
    resizes = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.name.endswith("_")
    for written in written_arguments(node):
        if written.op == "get_attr" and where.phase == "optimizer":
            raise CaptureError(
                "the optimizer's step writes into a tensor that is neither a parameter nor in its state; keep it in "
                "optimizer.state[parameter]"
            )
        if written.op == "get_attr":
            raise OutsideError(
                f"{where.place} writes into a tensor that is neither its parameter nor its buffer; register it as a "
                "buffer of a module that is part of the model, or that the loss reaches",
                getattr(constants, written.target),
            )
        filled = resizes and where.phase != "optimizer" and written.op == "placeholder"
        if filled and written.meta["val"].numel() == 0:
            raise CaptureError(
                f"{where.place} runs {node.target} on an empty buffer, which it may fill; call the model once first"
            )


def _refuse_by_gradients(node: fx.Node) -> None:
    """Eager's first run of a re-entrant checkpoint needs no gradient, and computes values by another algorithm."""
    raise CaptureError(
        f"{provenance(node).place} runs {node.target} under re-entrant torch.utils.checkpoint, whose two runs differ "
        "in eager; use use_reentrant=False"
    )


def _refuse_drawing_anew(node: fx.Node) -> None:
    """Backward of a checkpoint with ``preserve_rng_state=False`` is that of other random numbers than forward's."""
    raise CaptureError(
        f"{provenance(node).place} draws random numbers under torch.utils.checkpoint with preserve_rng_state=False, so "
        "that backward draws others than forward; a captured step has one set, use preserve_rng_state=True"
    )
