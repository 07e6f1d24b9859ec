"""Traces an optimizer's own ``step``: its operators go to the graph, its numbers to a tape.

Scalar tensors on the CPU that follow from nothing but counts and options (``state["step"]``, which torch's optimizers
keep as a tensor) are of the tape too: no operator on them is recorded, and ``.item()`` gives a number of the tape.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from stepgraph import compat
from stepgraph.capture.optimizer import factors
from stepgraph.capture.optimizer.tape import Constant, Ref, Tape, is_number, line_in_use, wrapped
from stepgraph.errors import CaptureError

aten = torch.ops.aten
Tensor = torch.Tensor

_ITEMS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default)
#: These make a tensor of numbers alone.
_MAKERS = ("aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor")


#: Operators that work element by element and are not marked so by torch, or make a tensor like another.
_ELEMENTWISE = frozenset(
    ("copy_", "detach", "alias", "zero_", "fill_", "zeros_like", "ones_like", "full_like", "full", "scalar_tensor")
) | {"clone", "lift_fresh", "_to_copy", "empty_like", "_local_scalar_dense"}


def is_elementwise(func: Any) -> bool:
    """Whether each element of an operator's result depends only on the same elements of its arguments."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
        return True
    name = func.overloadpacket.__name__
    if name.startswith("_foreach_"):
        packet = getattr(aten, name.removeprefix("_foreach_"))
        return name.removesuffix("_") != "_foreach_norm" and any(
            torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
        )
    return name in _ELEMENTWISE or torch.Tag.pointwise in func.tags


class HostOperator:
    """An operator on scalar tensors of the tape, or on lists of one each. One that writes in place gives what it would
    write."""

    def __init__(self, func: Any, spec: compat.pytree.TreeSpec):
        self.func, self.spec = func, spec
        self.in_place = func._schema.is_mutable
        self.on_lists = func._schema.name.startswith("aten::_foreach_")
        self.name = f"{func}{spec}"

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = compat.pytree.tree_unflatten(list(leaves), self.spec)
        with compat.without_modes(), torch.no_grad():
            if self.in_place:
                args = (compat.pytree.tree_map(torch.clone, args[0]), *args[1:])
            result = self.func(*args, **kwargs)
        result = args[0] if self.in_place else result
        return result[0] if self.on_lists else result


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
        #: Called for an operator that does not work element by element; None where parameters are whole.
        self.refuse_shards: Callable[[str], NoReturn] | None = None
        self.places: dict[int, int] = {}
        self._device: torch.device | None = None
        self.written: set[int] = set()
        #: Storages of scalars that are state of the optimizer and of the tape.
        self.state: set[int] = set()
        self._kept: list[Tensor] = []
        #: Scalar tensors of neither options nor state, which the host reads before the step.
        self.outside: list[Tensor] = []
        self._numbers: dict[int, int] = {}

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
        if not compat.is_fake(tensor):  # such as a learning rate that is a tensor
            with compat.without_modes():
                value = tensor.detach().clone()
            self.outside.append(tensor)
            return self.tape.read(f"tensor.{self._number(tensor)}", value, lambda: tensor)
        return self.places.get(compat.storage_key(tensor))

    def _number(self, tensor: Tensor) -> int:
        return self._numbers.setdefault(id(tensor), len(self._numbers))

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
        if func is aten.lift_fresh.default and on_tape and not compat.is_fake(tensors[0]):
            with compat.without_modes():
                literal = Constant(tensors[0].detach().clone())
            return self.scalar(self.tape.computed(literal, (), literal.value))
        if on_tape and (tensors or self._makes_scalar(func, args, kwargs)):
            found = self._on_host(func, args, kwargs, leaves, spec)
            if found is not NotImplemented:
                return found
        self._note(func, tensors, args, kwargs)
        if any(place is not None for place in places):
            # Where the others are: a CUDA graph would keep the value of a scalar on the CPU.
            self._device = next((t.device for t, place in zip(tensors, places, strict=True) if place is None), None)
            args, kwargs = compat.pytree.tree_map(self._in_graph, (args, kwargs))
            args, kwargs = tuple(args), dict(kwargs)
        if self.refuse_shards is not None and not is_elementwise(func):
            self.refuse_shards(f"({line_in_use()}) computes by {func}")
        if any(map(is_number, leaves)):
            return factors.call(func, args, kwargs, self._factor, is_number)
        return func(*args, **kwargs)

    def attribute_to(self, path: str) -> None:
        """What follows belongs to the module ``path``, until an operator takes another one's tensor."""
        self._path = path
        self.attribute(path)

    def _note(self, func: Any, tensors: Sequence[Tensor], args: tuple, kwargs: dict) -> None:
        """Note what is written, and whose parameter it is."""
        for tensor in tensors:
            path = self.owners.get(_storage(tensor))
            if path is not None and path != self._path:
                self.attribute_to(path)
                break
        if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
            return
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [given.get(a.name) for a in func._schema.arguments if a.is_write]
        for tensor in compat.pytree.tree_leaves(written):
            if isinstance(tensor, Tensor):
                if self.place_of(tensor) is not None:
                    self._to_graph(tensor)
                self.written.add(_storage(tensor))

    def _to_graph(self, tensor: Tensor) -> None:
        """A scalar of the tape is about to be written from tensors of the graph: it is one of these from here on."""
        storage = compat.storage_key(tensor)
        if storage in self.state:
            raise NotOfHost(tensor)
        made = self._in_graph(tensor).clone()
        del self.places[storage]
        compat.same_in_trace(tensor, made)

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

    def _on_host(self, func: Any, args: tuple, kwargs: dict, leaves: list, spec: compat.pytree.TreeSpec) -> Any:
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
            self._write(args[0], place)
            return args[0]
        return self.scalar(place)

    def _write(self, tensor: Tensor, place: int) -> None:
        if not compat.is_fake(tensor):
            raise CaptureError(
                f"the optimizer's step ({line_in_use()}) writes a tensor that is not in its state; keep it in the "
                "state of a parameter"
            )
        self.places[compat.storage_key(tensor)] = place

    def _each(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operator on lists, element by element."""
        n, results = len(args[0]), []
        for i in range(n):
            one = tuple([arg[i]] if isinstance(arg, list | tuple) and len(arg) == n else arg for arg in args)
            leaves, spec = compat.pytree.tree_flatten((one, kwargs))
            operator = HostOperator(func, spec)
            place = self.tape.computed(
                operator, tuple(map(self._ref, leaves)), operator(*(self._value(leaf) for leaf in leaves))
            )
            if func._schema.is_mutable:
                self._write(args[0][i], place)
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
        return self.place_input(place, entry.value.dtype, self._device or leaf.device)

    def _factor(self, number: Any, device: torch.device) -> Tensor:
        return self.place_input(number.node.number.place, torch.float64, device)


class NotOfHost(Exception):
    """A scalar tensor that seemed to be on the tape is written from a value that is not. ``tensor``: its stand-in."""

    def __init__(self, tensor: Tensor):
        super().__init__("a scalar tensor of the state is written from tensors of the step")
        self.tensor = tensor


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
