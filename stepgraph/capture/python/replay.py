"""Python that reads values of a step to store them: it runs again after the step, with the values.

A loss function such as a Trainer's ``compute_loss`` often reads numbers that it only stores or logs:
``self.seen.append(accuracy.item())``. A trace has no values, so what is read becomes an output of the graph, and after
each step the function runs again as a *rehearsal*: modules are not called but give tensors of the shapes that they
gave, operators give only shapes, and a read gets the step's value. Python then branches, adds up and stores as in
eager. Operators whose shapes depend on values (``x[mask]``) run on the step's tensors, which become outputs.

Modules without parameters, such as a loss that the function makes, are Python like the rest.

That is right only if nothing that is read reaches the loss. Each tensor of a run therefore has a *key*, made of the
operator that made it and the keys of its arguments, back to the batch, to parameters, and to what modules gave. When a
step is captured, rehearsals with made-up values must give the loss the key that the trace gave it, or the line that
reads is refused. A rehearsal with the values of a step must do so too.

What reaches the loss may still follow from the batch, as the places of a mask do: the lines that read it are then given
what the batch holds, which belongs to the form of the step, see `KnownValues`. Other lines are not, or a count that is
only stored would cause a capture for each batch.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stepgraph import compat
from stepgraph.capture.python.reads import Change, Reads
from stepgraph.capture.recorder import user_frame
from stepgraph.capture.state import Slot
from stepgraph.compat.replaced import replaced
from stepgraph.errors import CaptureError

aten, pytree = torch.ops.aten, compat.pytree
#: What every read gives while a step is traced; where other reads depend on it, the second.
FILLS = (1.0, 0.0)
_PROBES = (0.0, 1.0, -1.5, 1e4)  # with these the loss must be the same
#: Elements of the largest tensor that is made up, and of one from outside that is known by its content: a literal.
_LARGEST, _LITERAL = 1 << 24, 64

_state = SimpleNamespace(made_up=False)


def is_probing() -> bool:
    """Whether a loss function runs with values that are made up: what it sends elsewhere is to be dropped."""
    return _state.made_up


def _made_up() -> contextlib.AbstractContextManager[None]:
    return replaced(_state, made_up=True)


class ReplayError(CaptureError):
    """Python reads a value in a way that rehearsals cannot serve. ``source``: the line that the loss depends on."""

    source = ""


class _Parted(Exception):
    """The loss, or what modules are given, is not what the trace had; the line of a read that it is made of."""


class _UnknownRead(_Parted):
    """A read of a value that the trace did not see; its line."""


class _Form(NamedTuple):
    key: int
    tensor: torch.Tensor  # on the meta device
    device: torch.device
    requires_grad: bool


class Replay:
    """What one trace of a loss function found: see the module's docstring.

    ``wanted``: tensors of the trace that a rehearsal needs, by their keys, and ``sources``: the lines that read them.
    ``fill``: the number that the trace reads in their place. ``lines``: the source lines that read values of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable,
        slots: Sequence[Slot],
        mode: compat.FakeTensorMode,
        fill: float,
        lines: frozenset[str] = frozenset(),
    ):
        self._model, self._loss_fn, self._slots = model, loss_fn, slots
        self.mode, self.fill, self.lines = mode, fill, lines
        self.wanted: dict[int, torch.Tensor] = {}
        self.sources: dict[int, str] = {}
        self.constants: dict[int, Any] = {}
        #: What operators gave at these lines: by key, in leaves.
        self.answers: dict[int, tuple[list[Any], Any]] = {}
        #: Calls of modules from outside of modules: the module, the key of its arguments, its result in leaves.
        self.calls: list[tuple[nn.Module, int, list[Any], Any]] = []
        self.loss: int | None = None
        self._table: dict[Any, int] = {}

    def key(self, *of: Any) -> int:
        """The key of a value made ``of`` these."""
        return self._table.setdefault(of, len(self._table))

    @contextlib.contextmanager
    def traced(self, names: Mapping[int, str], batch: Any, knows: Callable, of_batch: Callable) -> Iterator[Callable]:
        """Inside, the trace runs the loss function; give its loss to what this yields. ``names``: of the model's
        tensors, by their ids. ``knows``: whether a value follows from literals; ``of_batch``: or from the batch."""
        self.batch = batch
        run = _Trace(self, names, knows, of_batch)
        try:
            with _made_up(), run.active():
                yield run.end
        except _Parted as parted:
            raise _reaches_the_loss(str(parted)) from None

    def after(self, values: Mapping[str, torch.Tensor]) -> None:
        """Run the loss function's Python again with the ``values`` of a step, by the names of its outputs."""
        try:
            self._rehearse(lambda key, _: values[str(key)])
        except _Parted as parted:
            raise RuntimeError(
                f"with the values of this step, Python in the loss reads or computes different values ({parted}) "
                "than when the step was captured, and its loss may not be eager's: decide by tensors, not in Python"
            ) from parted

    def prove(self, model: nn.Module) -> list[Change]:
        """What rehearsals change outside of the ``model``, all of it set back. Raises `ReplayError` for a value that
        reaches the loss, and where what is read depends on another value that is read."""
        reads = Reads(model, self._loss_fn)
        with reads.noted(), _made_up(), contextlib.redirect_stdout(io.StringIO()):
            for fill in (self.fill, *_PROBES):
                if not self._holds(lambda _, fill=fill: fill):
                    if not self.wanted:  # what it changes in Python itself decides: `writes.check` says what that is
                        return []
                    found = (k for k in self.wanted if not self._holds(lambda key, k=k: (self.fill, fill)[key == k]))  # noqa: B023
                    raise _reaches_the_loss(self.sources[next(found, next(iter(self.wanted)))])
            found = reads.changes()
        return [change for change in found if not change.of_model]

    def _holds(self, fill: Callable[[int], float]) -> bool:
        """Whether the loss is computed in the same way where reads give numbers by ``fill`` of their keys."""
        try:
            self._rehearse(lambda key, like: _filled(like, fill(key)))
        except _UnknownRead as read:
            raise ReplayError(
                f"{read} reads a value of the step in Python that another value decides on, in a way that a "
                "captured step cannot follow: compute both as tensors, and read them without a condition"
            ) from None
        except _Parted:
            return False
        except (ArithmeticError, AssertionError, ValueError, IndexError, RuntimeError):  # it takes no such value
            return True
        return True

    def _rehearse(self, real: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        """Run the loss function without its modules. ``real(key, tensor)``: what is read."""
        run = _Rehearsal(self, {id(slot.tensor): slot.name for slot in self._slots}, real)
        with compat.without_modes(), self.mode, torch.enable_grad(), run.active():
            run.end(self._loss_fn(self._model, self.batch))


class _Run(compat.TorchDispatchMode):
    """One run of the loss function, which gives keys to its tensors."""

    supports_higher_order_operators = True

    def __init__(self, replay: Replay, names: Mapping[int, str]):
        super().__init__()
        self.replay, self.depth, self.epoch, self.count = replay, 0, 0, 0
        self.keys = {of: replay.key("tensor", name) for of, name in names.items()}
        self.tensors: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []
        self.hosted: dict[int, tuple[torch.Tensor, str]] = {}  # made of values, and the line that did so
        for i, leaf in enumerate(pytree.tree_leaves(replay.batch)):
            if isinstance(leaf, torch.Tensor):
                self.name(leaf, replay.key("batch", i))

    def name(self, tensor: torch.Tensor, key: int) -> None:
        self.keys[id(tensor)], self.tensors[key] = key, tensor
        self._alive.append(tensor)  # so that no other tensor has its id

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, operators and calls of modules are noted."""
        plain = nn.Module.__call__

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self.depth or next(module.parameters(), None) is None:
                return plain(module, *args, **kwargs)
            number, self.count = self.count, self.count + 1
            return self.outermost(number, lambda: plain(module, *args, **kwargs), module, self.of((args, kwargs)))

        with replaced(nn.Module, __call__=call), _Truth(), self:
            yield

    def of(self, tree: Any) -> int:
        """The key of an argument of an operator or a module."""
        leaves, spec = pytree.tree_flatten(tree)
        return self.replay.key(str(spec), tuple(map(self._leaf, leaves)))

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf)
        plain = bool | int | float | complex | str | torch.dtype | torch.device | None
        return repr(leaf) if isinstance(leaf, plain) else type(leaf).__qualname__

    def _tensor(self, tensor: torch.Tensor) -> int:
        if id(tensor) in self.hosted:
            raise _Parted(self.hosted[id(tensor)][1])
        if id(tensor) not in self.keys:  # from outside
            literal = not compat.is_fake(tensor) and tensor.device.type == "cpu" and tensor.numel() <= _LITERAL
            with compat.without_modes():
                content = (str(tensor.dtype), repr(tensor.tolist())) if literal else id(tensor)
            self.name(tensor, self.replay.key("outside", content))
        return self.keys[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(id(tensor) in self.hosted for tensor in given):
            return self._with_values(func, args, kwargs, given)
        key = self.replay.key(str(func), self.of((args, kwargs)), self.epoch)
        needs = _needs_values(func, args)
        if needs and not self.is_answered(key, _deciding(func, args, given)):
            return self._with_values(func, args, kwargs, given)
        made = self.answer(key, func, args, kwargs) if needs else func(*args, **kwargs)
        for i, tensor in enumerate(pytree.tree_leaves(made)):
            if isinstance(tensor, torch.Tensor):
                self.name(tensor, self.replay.key(key, i))
        if _has_effects(func):
            self.epoch = key
        return made

    def _with_values(self, func: Any, args: tuple, kwargs: Mapping[str, Any], given: list[torch.Tensor]) -> Any:
        """Run an operator on values."""
        sources = (self.hosted[id(t)][1] for t in given if id(t) in self.hosted)
        source = next(sources, "") or user_frame(sys._getframe(1))
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            raise _Parted(source)
        values = {id(t): t if id(t) in self.hosted else self._value(t, source) for t in given}
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: values[id(t)], (args, kwargs))
        with compat.without_modes(), torch.no_grad():
            made = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.hosted[id(tensor)] = tensor, source
        return made

    def _value(self, tensor: torch.Tensor, source: str) -> torch.Tensor:
        key = self.replay.key("read", self._tensor(tensor), self.epoch)
        if not compat.is_fake(tensor):
            return tensor
        if (known := self.known(tensor, key)) is not None:  # it follows from literals
            return known
        self.replay.sources.setdefault(key, source)
        return self.real(tensor, key)

    def known(self, tensor: torch.Tensor, key: int) -> torch.Tensor | None:
        return self.replay.constants.get(key)

    def end(self, loss: Any) -> None:
        """The loss function returned ``loss``: in the first run noted, later compared."""
        self.depth += 1
        if isinstance(loss, torch.Tensor):
            key = self.replay.key("loss", self._tensor(loss), self.epoch)
            self.replay.loss = key if self.replay.loss is None else self.replay.loss
            if key != self.replay.loss:
                raise _Parted("the loss")


class _Truth(TorchFunctionMode):
    """Inside, a truth value is asked for as in a trace, see `compat.truth`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return compat.truth(*args) if func is torch.Tensor.__bool__ else func(*args, **(kwargs or {}))


class _Trace(_Run):
    """The run that is traced: what is read is noted, and made up."""

    def __init__(self, replay: Replay, names: Mapping[int, str], *knows: Callable[[torch.Tensor], bool]):
        super().__init__(replay, names)
        self._knows, self._of_batch = knows

    def is_answered(self, key: int, deciding: Sequence[torch.Tensor]) -> bool:
        """Whether the batch says what an operator gives, and its line takes that."""
        return user_frame(sys._getframe(2)) in self.replay.lines and all(map(self._of_batch, deciding))

    def answer(self, key: int, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        made = func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(made)
        forms = [_form(x, self.replay.key(key, i)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(leaves)]
        self.replay.answers[key] = forms, spec
        return made

    def outermost(self, number: int, run: Callable, module: nn.Module, arguments: int) -> Any:
        self.depth += 1
        try:
            result = run()
        finally:
            self.depth -= 1
        leaves, spec = pytree.tree_flatten(result)
        outputs = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in self.keys:
                    self.name(leaf, self.replay.key("module", number, i))
                leaf = _form(leaf, self.keys[id(leaf)])
            outputs.append(leaf)
        self.replay.calls.append((module, arguments, outputs, spec))
        return result

    def known(self, tensor: torch.Tensor, key: int) -> torch.Tensor | None:
        if self._knows(tensor) and tensor.numel() <= _LITERAL:
            flat = [tensor.reshape(-1)[i].item() for i in range(tensor.numel())]  # as `KnownValues` gives them
            with compat.without_modes():
                self.replay.constants[key] = torch.tensor(flat, dtype=tensor.dtype).reshape(tensor.shape)
        return self.replay.constants.get(key)

    def real(self, tensor: torch.Tensor, key: int) -> torch.Tensor:
        if key not in self.replay.wanted:
            self.replay.wanted[key] = tensor.detach().clone()
        picks_all = tensor.dtype == torch.bool and tensor.ndim > 0  # a mask: nothing has no least element
        return _filled(tensor, 1.0 if picks_all else self.replay.fill)


class _Rehearsal(_Run):
    """A run without modules. ``values(key, tensor)``: what is read."""

    def __init__(self, replay: Replay, names: Mapping[int, str], values: Callable[[int, torch.Tensor], torch.Tensor]):
        super().__init__(replay, names)
        self._values = values

    def outermost(self, number: int, run: Callable, module: nn.Module, arguments: int) -> Any:
        calls = self.replay.calls
        called, given, outputs, spec = calls[number] if number < len(calls) else (None, 0, [], None)
        if called is not module or given != arguments:
            raise _Parted("a call of a module")
        return self._given(outputs, spec)

    def is_answered(self, key: int, deciding: Sequence[torch.Tensor]) -> bool:
        """Whether the trace knew from the batch what an operator gives."""
        return key in self.replay.answers

    def answer(self, key: int, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        return self._given(*self.replay.answers[key])

    def _given(self, leaves: Sequence[Any], spec: compat.pytree.TreeSpec) -> Any:
        return pytree.tree_unflatten([self._made(x) if isinstance(x, _Form) else x for x in leaves], spec)

    def _made(self, form: _Form) -> torch.Tensor:
        if form.key not in self.tensors:
            self.depth += 1
            made = torch.empty_like(form.tensor, device=form.device)
            made = made.requires_grad_().clone() if form.requires_grad else made  # no leaf, as what modules give
            self.depth -= 1
            self.name(made, form.key)
        return self.tensors[form.key]

    def known(self, tensor: torch.Tensor, key: int) -> torch.Tensor | None:
        found = super().known(tensor, key)
        return compat.literal_of(tensor) if found is None else found  # of a branch that the trace did not take

    def real(self, tensor: torch.Tensor, key: int) -> torch.Tensor:
        if key not in self.replay.wanted:
            raise _UnknownRead(self.replay.sources[key])
        return self._values(key, tensor)


def _reaches_the_loss(source: str) -> ReplayError:
    error = ReplayError(
        f"{source} reads a value of the step in Python, and the loss depends on it; a captured step computes the loss "
        "in one way for all values: use torch.where or masks there, and in Python only store what is read"
    )
    error.source = source
    return error


def _form(tensor: torch.Tensor, key: int) -> _Form:
    with compat.without_modes():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return _Form(key, like, tensor.device, tensor.requires_grad)


def _filled(like: torch.Tensor, fill: float) -> torch.Tensor:
    if like.numel() > _LARGEST or like.is_complex():
        raise CaptureError(
            f"the loss reads values of a {like.dtype} tensor of shape {list(like.shape)} in Python; reduce it to real "
            "numbers first, or report it by stepgraph.metric"
        )
    with compat.without_modes():
        return torch.full(like.shape, fill if like.is_floating_point() else int(fill)).to(like.dtype)


def _needs_values(func: Any, args: tuple) -> bool:
    """Whether an operator gives Python a value, or a shape that depends on one."""
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return isinstance(func, torch._ops.OpOverload) and not depends.isdisjoint(func.tags)


def _deciding(func: Any, args: tuple, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors, among those ``given`` to an operator, whose values it needs."""
    if func is aten.masked_select.default:
        return args[1:2]
    masks = func is aten.index.Tensor
    return [index for index in args[1] if index is not None and index.dtype == torch.bool] if masks else given


def _has_effects(func: Any) -> bool:
    """Whether an operator writes into its arguments or draws random numbers."""
    known = isinstance(func, torch._ops.OpOverload)
    return not known or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags
