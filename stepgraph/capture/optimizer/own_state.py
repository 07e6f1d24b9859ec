"""The state of an optimizer while its own ``step`` is traced: dicts that note what ``step`` reads and makes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from stepgraph import compat
from stepgraph.capture.optimizer.host import frozen
from stepgraph.capture.optimizer.own_step import NUMBERS, OwnStep, StandIn
from stepgraph.capture.optimizer.tape import line_in_use
from stepgraph.errors import CaptureError

Tensor = torch.Tensor
pytree = compat.pytree


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

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **values: Any) -> None:
        for key, value in dict(*args, **values).items():
            self[key] = value


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

    def setdefault(self, param: Any, default: Any = None) -> Any:
        if param not in self:
            self[param] = default
        return self[param]

    def update(self, *args: Any, **values: Any) -> None:
        for param, state in dict(*args, **values).items():
            self[param] = state

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

    def keys(self) -> Any:
        self._all()
        return super().keys()

    def values(self) -> Any:
        self._all()
        return super().values()

    def items(self) -> Any:
        self._all()
        return super().items()

    def _refuse(self, key: Any) -> NoReturn:
        what = f"a {type(key).__name__}" if id(key) not in self._members else "a parameter, but no dict"
        raise CaptureError(
            f"{self._own.name}.step ({line_in_use()}) keeps state of {what}; a captured step takes a dict for "
            "each parameter that has a gradient"
        )

    def form(self) -> Callable[[], tuple]:
        """What gives, before each call, the form of what was read: keys, in order, and values that a graph keeps."""
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
