"""What runs while an optimizer's own ``step`` is traced: its operators go to the graph, its numbers to a tape.

Scalar tensors on the CPU that follow from nothing but counts and options (``state["step"]``, which torch's optimizers
keep as a tensor) are of the tape too: no operator on them is recorded, and ``.item()`` gives a number of the tape.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stepgraph import compat
from stepgraph.capture.optimizer import factors
from stepgraph.capture.optimizer.tape import Ref, Tape, is_number, wrapped

aten = torch.ops.aten
Tensor = torch.Tensor

_ITEMS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default)
#: These make a tensor of numbers alone.
_MAKERS = ("aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor")


class HostOperator:
    """An operator on scalar tensors of the tape. One that writes in place gives what it would write."""

    def __init__(self, func: Any, spec: Any):
        self.func, self.spec = func, spec
        self.in_place = func._schema.is_mutable
        self.name = f"{func}{spec}"

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = compat.pytree.tree_unflatten(list(leaves), self.spec)
        with compat.without_modes(), torch.no_grad():
            if self.in_place:
                args = (args[0].clone(), *args[1:])
            return self.func(*args, **kwargs)


def as_number(value: Tensor) -> Any:
    """What ``.item()`` gives."""
    return value.item()


class OnTape(compat.TorchDispatchMode):
    """``place_input``: makes the graph's input of (a place on the tape, dtype, device). ``owners``: by storages, the
    module path of a parameter, its gradient and its state; ``attribute`` is called with it before an operator."""

    def __init__(
        self,
        tape: Tape,
        mode: compat.FakeTensorMode,
        place_input: Callable[[int, torch.dtype, torch.device], Tensor],
        owners: Mapping[int, str],
        attribute: Callable[[str], None],
    ):
        super().__init__()
        self.tape, self.fake_mode, self.place_input = tape, mode, place_input
        self.owners, self.attribute, self._path = owners, attribute, None
        self.places: dict[int, int] = {}
        self.written: set[int] = set()
        self._kept: list[Tensor] = []

    # ---- scalar tensors of the tape ----

    def scalar(self, place: int) -> Tensor:
        """A stand-in for the scalar tensor at ``place``."""
        value = self.tape.entries[place].value
        with compat.without_modes(), self.fake_mode:
            made = torch.empty((), dtype=value.dtype)
        self._kept.append(made)
        self.places[compat.storage_key(made)] = place
        return made

    def place_of(self, tensor: Any) -> int | None:
        """The place of a scalar tensor of the tape; None for another."""
        if not isinstance(tensor, Tensor) or tensor.ndim or tensor.device.type != "cpu":
            return None
        if not compat.is_fake(tensor):  # a literal
            with compat.without_modes():
                literal = _Literal(tensor.detach().clone())
            return self.tape.computed(literal, (), literal.value)
        return self.places.get(compat.storage_key(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves, spec = compat.pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = [self.place_of(t) for t in tensors]
        on_tape = None not in places
        if func in _ITEMS and on_tape:
            return self._item(places[0])
        if func is aten.lift_fresh.default and on_tape:
            return self.scalar(places[0])
        if on_tape and (tensors or self._makes_scalar(func, args, kwargs)):
            found = self._on_host(func, args, kwargs, leaves, spec)
            if found is not NotImplemented:
                return found
        self._note(func, tensors, args, kwargs)
        if any(place is not None for place in places):
            args, kwargs = compat.pytree.tree_map(self._in_graph, (args, kwargs))
            args, kwargs = tuple(args), dict(kwargs)
        if any(map(is_number, leaves)):
            return factors.call(func, args, kwargs, self._factor, is_number)
        return func(*args, **kwargs)

    def _note(self, func: Any, tensors: Sequence[Tensor], args: tuple, kwargs: dict) -> None:
        """Note what is written, and whose parameter it is."""
        for tensor in tensors:
            path = self.owners.get(_storage(tensor))
            if path is not None and path != self._path:
                self._path = path
                self.attribute(path)
                break
        if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
            return
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [given.get(a.name) for a in func._schema.arguments if a.is_write]
        for tensor in compat.pytree.tree_leaves(written):
            if isinstance(tensor, Tensor):
                if self.place_of(tensor) is not None:
                    raise NotOfHost(tensor)
                self.written.add(_storage(tensor))

    def _item(self, place: int) -> Any:
        with compat.without_modes():
            value = self.tape.entries[place].value.item()
        place = self.tape.computed(as_number, (Ref(place),), value)
        if type(value) is bool:
            self.tape.decide(place, value)
        return wrapped(self.tape, place)

    def _makes_scalar(self, func: Any, args: tuple, kwargs: dict) -> bool:
        if not isinstance(func, torch._ops.OpOverload) or func._schema.name not in _MAKERS:
            return False
        shape = args[0] if func._schema.name != "aten::scalar_tensor" else ()
        return len(shape) == 0 and torch.device(kwargs.get("device") or "cpu").type == "cpu"

    def _on_host(self, func: Any, args: tuple, kwargs: dict, leaves: list, spec: Any) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
            return NotImplemented
        if func._schema.name.startswith("aten::_foreach_"):
            return self._each(func, args, kwargs)
        if not func._schema.is_mutable and any(r.alias_info for r in func._schema.returns):  # a view of all of it
            with compat.without_modes(), self.fake_mode:
                found = func(*args, **kwargs)
            return found if isinstance(found, Tensor) and found.ndim == 0 else NotImplemented
        values = [self._value(leaf) for leaf in leaves]
        operator = HostOperator(func, spec)
        result = operator(*values)
        if not isinstance(result, Tensor) or result.ndim or result.device.type != "cpu":
            return NotImplemented
        place = self.tape.computed(operator, tuple(map(self._ref, leaves)), result)
        if operator.in_place:
            self.places[compat.storage_key(args[0])] = place
            return args[0]
        return self.scalar(place)

    def _each(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operator on lists, element by element."""
        n, results = len(args[0]), []
        for i in range(n):
            one = tuple([arg[i]] if isinstance(arg, list | tuple) and len(arg) == n else arg for arg in args)
            leaves, spec = compat.pytree.tree_flatten((one, kwargs))
            operator = _FirstOf(func, spec)
            place = self.tape.computed(
                operator, tuple(map(self._ref, leaves)), operator(*(self._value(leaf) for leaf in leaves))
            )
            if func._schema.is_mutable:
                self.places[compat.storage_key(args[0][i])] = place
            else:
                results.append(self.scalar(place))
        return results or None

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.tape.entries[self.place_of(leaf)].value
        return leaf.node.number.value if is_number(leaf) else leaf

    def _ref(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Ref(self.place_of(leaf))
        return Ref(leaf.node.number.place) if is_number(leaf) else leaf

    def _in_graph(self, leaf: Any) -> Any:
        place = self.place_of(leaf)
        if place is None:
            return leaf
        entry = self.tape.entries[place]
        if not entry.leaves:
            with compat.without_modes():
                value = entry.value.item()
            return torch.full((), value, dtype=entry.value.dtype)
        return self.place_input(place, entry.value.dtype, leaf.device)

    def _factor(self, number: Any, device: torch.device) -> Tensor:
        return self.place_input(number.node.number.place, torch.float64, device)


class NotOfHost(Exception):
    """A scalar tensor that was taken for one of the tape is written from what is not. ``tensor``: its stand-in."""

    def __init__(self, tensor: Tensor):
        super().__init__("a scalar tensor of the state is written from tensors of the step")
        self.tensor = tensor


class _Literal:
    def __init__(self, value: Tensor):
        self.value = value
        self.name = f"{value.dtype}:{value.item()!r}"

    def __call__(self) -> Tensor:
        return self.value


class _FirstOf(HostOperator):
    """An operator on lists of one tensor."""

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = compat.pytree.tree_unflatten(list(leaves), self.spec)
        with compat.without_modes(), torch.no_grad():
            if self.in_place:
                args = ([args[0][0].clone()], *args[1:])
            result = self.func(*args, **kwargs)
        return args[0][0] if self.in_place else result[0]


def _storage(tensor: Tensor) -> int:
    return 0 if compat.is_traceable_wrapper_subclass(tensor) else compat.storage_key(tensor)


@contextlib.contextmanager
def tensors_of_numbers() -> Iterator[None]:
    """Inside, ``torch.tensor`` and ``torch.as_tensor`` take numbers of a tape, and ``.item()`` gives them."""
    plain = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}

    def taking(make: Callable) -> Callable:
        def run(data: Any, *args: Any, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
            if is_number(data):
                return torch.full((), data, dtype=dtype, device=device)
            return make(data, *args, dtype=dtype, device=device, **options)

        return run

    item = Tensor.item

    def ours(self: Tensor) -> Any:
        found = item(self)
        return found.node.number if is_number(found) else found

    with compat.replaced(torch, **{name: taking(make) for name, make in plain.items()}):
        Tensor.item = ours
        try:
            yield
        finally:
            del Tensor.item
