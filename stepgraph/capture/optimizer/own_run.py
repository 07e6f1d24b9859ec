"""One run of an optimizer's own ``step`` in a trace: its stand-ins, and what graph and host write after it."""

import contextlib
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.capture.known import KnownValues
from stepgraph.capture.optimizer.host import Count, Host, Place, Wrapped, equal, frozen, same
from stepgraph.capture.optimizer.on_tape import NotOfHost, OnTape, tensors_of_numbers
from stepgraph.capture.optimizer.own_step import NUMBERS, OF_TORCH, Again, OwnStep, StandIn, leaves_of, parts_of
from stepgraph.capture.optimizer.spread import Matrix, Spread, cuts_of
from stepgraph.capture.optimizer.tape import TORCHS, Constant, Tape, is_number, line_in_use, python_on_tape, wrapped
from stepgraph.capture.recorder import user_source
from stepgraph.capture.state import unwrap
from stepgraph.errors import CaptureError, first_line
from stepgraph.graph.aliases import memory_span

Tensor = torch.Tensor
pytree = compat.pytree


#: What a user of an optimizer that cannot be captured can do.
_ALONE = "capture without the optimizer and call its step() after each step"


def _is_object(value: Any) -> bool:
    """Whether ``value`` has attributes that ``step`` may change: neither a tensor or number nor a constant."""
    return hasattr(value, "__dict__") and not (is_number(value) or isinstance(value, Tensor | Enum | type | tuple))


def _kept(value: Any) -> Any:
    """What a graph keeps of a value of the state: neither tensors nor numbers."""
    if isinstance(value, Tensor) or type(value) in NUMBERS:
        return None
    return tuple(None if isinstance(leaf, Tensor) else frozen(leaf) for leaf in pytree.tree_leaves(value))


class State(dict):
    """The state of a parameter while ``step`` is traced. ``kept``: called with a new key and its value."""

    def __init__(self, content: Mapping, kept: Callable[[Any, Any], Any]):
        super().__init__(content)
        self._kept = kept

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, self._kept(key, value) if key not in self else value)

    update = MutableMapping.update  # by `__setitem__`, which a dict's own passes by

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


class States(defaultdict):
    """``optimizer.state`` while ``step`` is traced. ``read``: the stand-ins whose state was read. ``asked``: what was
    looked up in it, by stand-in or key. ``is_whole``: whether all keys were read. ``live``: the optimizer's."""

    def __init__(self, own: OwnStep, members: Mapping[int, StandIn], new_state: Callable, live: Mapping):
        super().__init__()
        self._own, self._members, self._new_state, self.live = own, members, new_state, live
        self.read: dict[int, StandIn] = {}
        self.asked: list[Any] = []
        self.is_whole = False

    def __getitem__(self, param: Any) -> State:
        if (member := self._members.get(id(param))) is not None:
            self.read[id(param)] = member
        return super().__getitem__(param)

    def __missing__(self, param: Any) -> State:
        self[param] = {}
        return super().__getitem__(param)

    def __contains__(self, param: Any) -> bool:
        self.asked.append(param)
        if id(param) not in self._members and param in self.live:
            self._refuse(param)
        return super().__contains__(param)

    def get(self, param: Any, default: Any = None) -> Any:
        return self[param] if param in self else default  # noqa: SIM401 (it is get)

    def _all(self) -> None:
        """All keys are read; each must be a parameter's."""
        self.is_whole = True
        known = {id(member.live): member for member in self._members.values()}
        for key in self.live:
            if id(key) not in known:
                self._refuse(key)
        self.read |= {id(member.tensor): member for member in known.values()}

    def __len__(self) -> int:
        self._all()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._all()
        return super().__iter__()

    # By the methods of this class, which a dict's own pass by.
    setdefault, update = State.setdefault, MutableMapping.update
    keys, values, items = Mapping.keys, Mapping.values, Mapping.items

    def _refuse(self, key: Any) -> NoReturn:
        what = f"a {type(key).__name__}" if id(key) not in self._members else "a parameter, but no dict"
        raise CaptureError(
            f"{self._own.name}.step ({line_in_use()}) keeps state of {what}; a captured step takes a dict for "
            "each parameter that has a gradient"
        )

    def form(self) -> Callable[[], tuple]:
        """A function that returns, before each call, the form of what was read: keys, in order, and constant values."""
        read, keys, is_whole = [member.live for member in self.read.values()], [], self.is_whole
        for key in self.asked:
            member = self._members.get(id(key))
            keys.append(key if member is None else member.live)
        optimizer = self._own.optimizer  # a loaded checkpoint replaces its state
        members = () if self._own.is_torchs else [member.live for member in self._members.values()]

        def form() -> tuple:
            state = optimizer.state
            inside = [(*held, *map(_kept, held.values())) for held in (state.get(param, {}) for param in read)]
            marks = [frozen(vars(param)) for param in members]
            return tuple(map(id, state)) if is_whole else (), tuple(key in state for key in keys), *inside, *marks

        return form

    def __setitem__(self, param: Any, state: Any) -> None:
        member = self._members.get(id(param))
        if member is None or not isinstance(state, dict):
            self._refuse(param)
        kept = State({}, partial(self._new_state, member))
        super().__setitem__(param, kept)
        kept.update(state)


class Early(Protocol):
    """What takes the state that ``step`` makes, and gives what the rest of the trace has in its place. ``is_early``:
    whether all of it can be made before the step."""

    is_early: bool

    def __call__(self, run: "Run", member: StandIn, key: str, value: Any) -> Any: ...


def run_step(
    own: OwnStep,
    groups: Sequence[Sequence[StandIn]],
    give_input: Callable[[str, Tensor], Tensor],
    attribute: Callable[[str], None],
    mode: compat.FakeTensorMode,
    early: Early | None = None,
    muon: Callable | None = None,
) -> "Run":
    """Run the ``step`` of ``own`` in the running trace on the stand-ins of each parameter group.

    ``give_input``: makes a live scalar tensor an input of the graph, by a name. ``early``: takes the state that
    ``step`` makes. ``muon``: see `compat.muon_replaced`. Raises `Again` to begin the trace again.
    """
    run = Run(own, groups, give_input, attribute, mode, early)
    if muon is None and own.sharded is not None and isinstance(own.optimizer, torch.optim.Muon):
        muon = run.spread_muon
    run.run(muon)
    return run


def _form(tensor: Tensor) -> tuple:
    """What a replacement of a tensor of the state must have in common with it."""
    return type(tensor), [(part.shape, part.dtype) for part in parts_of(tensor)]


class Run:
    """One run of ``step`` in a trace. ``host``: what each call does on the host. ``created``: tensors of new state."""

    def __init__(self, own: OwnStep, groups: Any, give_input: Any, attribute: Any, mode: Any, early: Early | None):
        self.own, self.optimizer, self.groups, self.early = own, own.optimizer, groups, early
        self.host = Host(Tape(), own.options, own.options(), own.learn_changes)
        self.tape = self.host.tape
        self.inputs: dict[str, Tensor] = {}
        self.created: list[Tensor] = []
        self.give_input = give_input
        self.members: dict[int, StandIn] = {id(m.tensor): m for group in groups for m in group}
        owners = {compat.storage_key(part): m.path for m in self.members.values()
                  for t in (m.tensor, m.grad, *m.state.values()) if t is not None for part in parts_of(t)}  # fmt: skip
        self.mode = OnTape(self.tape, mode, self.number_input, owners, attribute)
        self.mode.refuse_shards = own.refuse_shards if own.sharded else None
        self.host.outside = self.mode.outside
        self._counts: dict[str, list[Count]] = defaultdict(list)
        self._first: dict[int, int] = {}
        self._before: dict[tuple[int, str], tuple[Any, list]] = {}
        self._made: set[tuple[int, str]] = set()
        self._assigned: list[tuple[Tensor, Tensor]] = []
        self._of_fakes: set[str] = set()

    # ---- numbers ----

    def number_input(self, place: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The graph's input that has the value at ``place``."""
        name = f"{self.tape.entries[place].key}:{dtype}:{device}"
        if name not in self.inputs:
            with compat.without_modes():
                live = torch.empty((), dtype=dtype, device=device)
                if self.early is not None:
                    value = self.tape.entries[place].value
                    live.copy_(value) if isinstance(value, Tensor) else live.fill_(value)
            self.host.values.append((place, live))
            self.inputs[name] = self.give_input(name, live)
        return self.inputs[name]

    def numbers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(live scalar, its stand-in) of each input that is a number."""
        return zip((live for _, live in self.host.values), self.inputs.values(), strict=True)

    def count(self, key: str, value: Any, place: Place) -> int:
        """Where on the tape a live number or scalar tensor is; equal ones of one key share one."""
        with compat.without_modes():
            for count in self._counts[key]:
                if equal(self.tape.entries[count.place].value, value):
                    count.places.append(place)
                    return count.place
            copied = value.detach().clone() if isinstance(value, Tensor) else value
        holder, at = place
        found = self.tape.read(f"{key}.{len(self._counts[key])}", copied, lambda: holder()[at])
        self._counts[key].append(Count([place], found))
        self.host.counts.append(self._counts[key][-1])
        return found

    def make_stand_in(self, place: int, tensor: Tensor | None = None) -> Any:
        """What ``step`` has for the live value at ``place``; ``tensor``: a scalar that it has already."""
        if not isinstance(self.tape.entries[place].value, Tensor):
            return wrapped(self.tape, place)
        made = self.mode.scalar(place) if tensor is None else tensor
        self.mode.places[compat.storage_key(made)] = self._first[id(made)] = place
        self.mode.state.add(compat.storage_key(made))
        return made

    # ---- the run ----

    def run(self, muon: Callable | None) -> None:
        optimizer, own = self.optimizer, self.own
        groups, attributes = [dict(group) for group in optimizer.param_groups], dict(vars(optimizer))
        listed, held = list(optimizer.param_groups), optimizer.param_groups
        try:
            self._put_stand_ins()
            places = [compat.storage_key(m.tensor) for m in self.members.values()]
            names = {cls.__module__ for cls in type(optimizer).__mro__[:-1]} - {"builtins", "typing"}
            muons = compat.muon_replaced(muon) if muon else contextlib.nullcontext()
            known = KnownValues()
            with tensors_of_numbers(), python_on_tape({n: sys.modules[n] for n in names}), muons, known, self.mode:
                own.step(optimizer)
                if places != [compat.storage_key(m.tensor) for m in self.members.values()]:
                    raise CaptureError(
                        f"{own.name}.step assigns .data of a parameter, and a captured step keeps its state in the "
                        "same memory; write in place, as by .data.copy_(...)"
                    )
                if optimizer.param_groups is not held or len(held) != len(listed):
                    raise CaptureError(
                        f"{own.name}.step changes its list of parameter groups; add groups between steps"
                    )
                self._write_back(groups, attributes)
        except (CaptureError, Again):
            raise
        except NotOfHost as found:
            self._learn_of(found.tensor)
            raise Again from None
        except Exception as error:
            raise CaptureError(self._explained(error)) from error
        finally:
            held[:] = listed
            for group, before in zip(listed, groups, strict=True):
                group.clear()
                group.update(before)
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            for member in self.members.values():
                member.tensor.grad = None
                for key in self._attributes_of(member):
                    vars(member.tensor).pop(key, None)
        self.host.state = self.state.form()
        self.host.form = self.host.state()
        if not same(own.options(), self.host.expected):
            raise CaptureError(f"{own.name}.step changes what its attributes hold; {_ALONE}")
        if self.early is None:
            self._check_decisions()

    def spread_muon(
        self, _: Callable, params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], **options: Any
    ) -> None:
        """torch's ``muon`` over shards."""
        live = [self.members[id(param)].live for param in params]
        cuts = [cuts_of(param, self.own.shapes.get(id(param))) for param in live]
        refuse, self.mode.refuse_shards = self.mode.refuse_shards, None
        update = Spread(options, partial(self.mode.attribute_to, ""))
        update.update([Matrix(*given) for given in zip(params, grads, momenta, cuts, strict=True)])
        self.mode.refuse_shards = refuse

    def _put_stand_ins(self) -> None:
        optimizer = self.optimizer
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                group[key] = self._moving(index, key, value, lambda index=index: optimizer.param_groups[index])
            group["params"] = [member.tensor for member in self.groups[index]]
        for key, value in list(vars(optimizer).items()):
            vars(optimizer)[key] = self._moving(None, key, value, lambda: vars(optimizer))
        live = optimizer.state
        optimizer.state = self.state = States(self.own, self.members, self.new_state, live)
        for member in self.members.values():
            member.tensor.grad = member.grad
            self._of_fakes |= vars(member.tensor).keys()
            vars(member.tensor).update(self._attributes_of(member))
            if (held := live.get(member.live)) is not None:
                content = {key: self._stand_in_of(member, key, value) for key, value in held.items()}
                dict.__setitem__(self.state, member.tensor, State(content, partial(self.new_state, member)))

    def _moving(self, group: int | None, key: str, value: Any, holder: Callable[[], Any]) -> Any:
        """An option as ``step`` sees it."""
        if not self.own.learned.is_moving(group, key, value):
            return value
        name = f"{'self' if group is None else f'group.{group}'}.{key}"
        if type(value) in NUMBERS:
            return wrapped(self.tape, self.count(name, value, (holder, key)))
        places = (self.count(f"{name}.{i}", v, (lambda: holder()[key], i)) for i, v in enumerate(value))
        return type(value)(wrapped(self.tape, place) for place in places)

    def _attributes_of(self, member: StandIn) -> dict[str, Any]:
        """What the user has put on a parameter, such as a factor of its learning rate."""
        return {} if self.own.is_torchs else vars(member.live)

    def _holder(self, member: StandIn) -> Callable[[], Any]:
        return lambda: self.optimizer.state[member.live]

    def _stand_in_of(self, member: StandIn, key: str, value: Any) -> Any:
        """What ``step`` has for the state under ``key``."""
        spec, names = pytree.tree_structure(value), leaves_of(key, value)
        found = []
        for name, leaf in names:
            if name in member.state:
                found.append(member.state[name])
            elif (isinstance(leaf, Tensor) or type(leaf) in NUMBERS) and name == key:
                found.append(self.make_stand_in(self.count(f"state.{key}", leaf, (self._holder(member), key))))
            else:
                found.append(leaf)
        self._before[id(member.tensor), key] = spec, found
        return found[0] if [name for name, _ in names] == [key] else pytree.tree_unflatten(found, spec)

    def new_state(self, member: StandIn, key: str, value: Any) -> Any:
        """What is kept of state that ``step`` makes."""
        if self.early is None:
            return value
        kept = self.early(self, member, key, value)
        if not isinstance(kept, dict | list | tuple):  # it may be filled later
            self._before[id(member.tensor), key] = pytree.tree_structure(kept), [kept]
            self._made.add((id(member.tensor), key))
        return kept

    # ---- after the run ----

    def _write_back(self, groups: Sequence[dict], attributes: Mapping[str, Any]) -> None:
        for member in self.members.values():
            now = dict.get(self.state, member.tensor, {})
            if dict.__contains__(self.state, member.tensor) and member.live not in self.state.live:
                self.host.touched.append(self._holder(member))
            had = {key for owner, key in self._before if owner == id(member.tensor)}
            if gone := had - now.keys():
                raise CaptureError(
                    f"{self.own.name}.step deletes state {sorted(gone)}, and a captured step keeps it; {_ALONE}"
                )
            for key, value in now.items():
                if objects := [leaf for leaf in pytree.tree_leaves(value) if _is_object(leaf)]:
                    raise CaptureError(
                        f"{self.own.name}.step keeps a {type(objects[0]).__name__} in state[{key!r}], whose attributes "
                        f"a captured step does not follow; keep its tensors and numbers there, or {_ALONE}"
                    )
                try:
                    self._write_state(member, key, value)
                except CaptureError as error:
                    if self.early is None or (id(member.tensor), key) not in self._made:
                        raise
                    compat.answer(error)
                    self.early.is_early = False  # made of one form, and of another at the end of the first step
            self._check_attributes(member)
        if self.optimizer.state is not self.state:
            raise CaptureError(f"{self.own.name}.step replaces its state as a whole; write into state[parameter]")
        self._refuse_shared()
        taken = [part for m in self.members.values() for t in (m.tensor, *m.state.values()) for part in parts_of(t)]
        values = gradients.unshared([value for _, value in self._assigned], taken)
        for (before, _), value in zip(self._assigned, values, strict=True):
            before.copy_(value)
        self.created = gradients.unshared(self.created, taken)
        for index, (group, before) in enumerate(zip(self.optimizer.param_groups, groups, strict=True)):
            for key, value in group.items():
                if key != "params":
                    self._write_option(index, key, before.get(key), value)
        for key, value in vars(self.optimizer).items():
            if key not in OF_TORCH:
                self._write_option(None, key, attributes.get(key), value)

    def _refuse_shared(self) -> None:
        """Raise where ``step`` leaves state in the memory of a parameter or of other state: eager's next step writes
        both at once."""
        found: dict[int, list[tuple[str, int, int, bool]]] = defaultdict(list)
        for member in self.members.values():
            held, owner = dict.get(self.state, member.tensor, {}), id(member.tensor)
            entries = [("the parameter", member.tensor, False)]
            for key, value in held.items():
                given = {id(leaf) for leaf in self._before.get((owner, key), ((), ()))[1]}
                leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel()]
                entries += [(f"state[{key!r}]", t, id(t) not in given) for t in leaves if self._place(t) is None]
            for name, part, is_new in ((name, part, new) for name, t, new in entries for part in parts_of(t)):
                storage, start, end = memory_span(part)
                for other, begin, stop, was_new in found[storage]:
                    if start < stop and begin < end and (is_new or was_new):
                        raise CaptureError(
                            f"{self.own.name}.step keeps {name} in the memory of {other}, and a captured step keeps "
                            "them apart; keep a clone()"
                        )
                found[storage].append((name, start, end, is_new))

    def _check_attributes(self, member: StandIn) -> None:
        """Raise if ``step`` has changed what is on a parameter."""
        held, now = self._attributes_of(member), vars(member.tensor)
        for key in held.keys() | {key for key in now.keys() - self._of_fakes if not key.startswith("_")}:
            if now.get(key) is not held.get(key):
                raise CaptureError(
                    f"{self.own.name}.step sets {key} of a parameter in Python, which a captured step runs only while "
                    "it is traced; keep it in the state of the parameter"
                )

    def _write_state(self, member: StandIn, key: str, value: Any) -> None:
        holder, known = self._holder(member), self._before.get((id(member.tensor), key))
        if known is None:
            self._create_state(member, key, value)
            return
        (spec, before), (leaves, now) = known, pytree.tree_flatten(value)
        if now != spec:
            raise CaptureError(f"{self.own.name}.step replaces state[{key!r}] by a value of a different form; {_ALONE}")
        for old, new in zip(before, leaves, strict=True):
            first, place = self._place(old, True), self._place(new)
            if first is None and isinstance(old, Tensor):
                if new is not old:
                    if not isinstance(new, Tensor) or _form(new) != _form(old):
                        raise CaptureError(
                            f"{self.own.name}.step replaces state[{key!r}], {old.dtype} of shape {list(old.shape)}, "
                            f"by a value of a different form; {_ALONE}"
                        )
                    self._assigned += zip(parts_of(old), parts_of(new), strict=True)
            elif first is None:
                if new is not old and not same(frozen(old), frozen(new)):
                    raise CaptureError(
                        f"{self.own.name}.step sets state[{key!r}] from {old!r} to {new!r} in Python, which a captured "
                        "step runs only while it is traced; keep numbers under keys of their own"
                    )
            elif place is None and isinstance(new, Tensor):
                raise NotOfHost(old if isinstance(old, Tensor) else new)
            elif place is None:
                self._write(self._constant(new), holder, key)
            elif place != first:
                self._write(place, holder, key)

    def _create_state(self, member: StandIn, key: str, value: Any) -> None:
        """State that the step makes: numbers on the host, tensors as outputs of the graph."""
        leaves, spec = pytree.tree_flatten(value)
        found: list[int | Wrapped] = []
        for leaf in leaves:
            place = self._place(leaf)
            if place is None and isinstance(leaf, Tensor):
                inner, wrapping = unwrap(leaf)
                self.created += inner
                place = Wrapped(len(inner), wrapping or unwrap(member.live.detach())[1])
            elif place is None:
                place = self._constant(leaf)
            found.append(place)
        self.host.made.append((self._holder(member), key, found, spec))

    def _write_option(self, group: int | None, key: str, old: Any, value: Any) -> None:
        learned, where = self.own.learned, f"self.{key}" if group is None else f"group[{key!r}]"
        optimizer = self.optimizer
        if value is old or same(frozen(old), frozen(value)):
            return
        moving = learned.is_moving(group, key, old)
        if type(old) in NUMBERS and (is_number(value) or type(value) in NUMBERS):
            if not moving:
                learned.moving.add((group, key))
                raise Again
            place = self._place(value) if is_number(value) else self._constant(value)
            if self.tape.entries[place].function is not None:
                holder = (lambda: vars(optimizer)) if group is None else (lambda: optimizer.param_groups[group])
                self._write(place, holder, key)
        elif not (moving and len(value) == len(old) and all(self._is_read(v) for v in value)):
            raise CaptureError(
                f"{self.own.name}.step sets {where} in Python, which a captured step runs only while it is traced; "
                "keep tensors in the state of a parameter"
            )

    def _is_read(self, value: Any) -> bool:
        return is_number(value) and self.tape.entries[self._place(value)].function is None

    def _write(self, place: int, holder: Callable[[], Any], key: str) -> None:
        self.host.writes.setdefault(place, []).append((holder, key))

    def _constant(self, value: Any) -> int:
        return self.tape.computed(Constant(value), (), value)

    def _place(self, value: Any, first: bool = False) -> int | None:
        if is_number(value):
            return value.node.number.place
        if first:
            return self._first.get(id(value))
        return self.mode.place_of(value) if isinstance(value, Tensor) else None

    def _check_decisions(self) -> None:
        """Raise where Python went by the very value of a number that the step itself changes."""
        written = {(id(holder()), key) for places in self.host.writes.values() for holder, key in places}
        counted = {c.place for c in self.host.counts if any((id(holder()), key) in written for holder, key in c.places)}
        for entry in self.tape.entries:
            if entry.exact and entry.leaves & counted:
                raise CaptureError(
                    f"{self.own.name}.step ({entry.line}) uses a count as a plain number, which would be a constant of "
                    "the graph; compute with it by Python's operators and math, or keep it in a tensor"
                )

    def _learn_of(self, tensor: Tensor) -> None:
        for (owner, key), (_, before) in self._before.items():
            if any(value is tensor for value in before):
                self.own.learned.on_tape[key, self.members[owner].tensor.ndim == 0] = False
                return
        raise CaptureError(
            f"{self.own.name}.step writes tensors of the step into a scalar that it made on the host; {_ALONE}"
        )

    def _explained(self, error: Exception) -> str:
        where = user_source(error)
        if not where:
            frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
            where = next((f"{f}:{n}" for f, n in reversed(frames) if TORCHS in f), "")
        operator = compat.operator_needing_values(error)
        if operator is not None:
            hosts = any(not group.get("capturable", True) for group in self.optimizer.param_groups)
            return (
                f"{self.own.name}.step ({where}) reads a tensor's value in Python ({operator}), to branch on it, "
                f"which a graph cannot: {'create it with capturable=True' if hosts else 'use torch.where'}, or capture "
                "without an optimizer and step it yourself"
            )
        return f"{self.own.name}.step ({where}) cannot be traced: {type(error).__name__}: {first_line(error)}"
