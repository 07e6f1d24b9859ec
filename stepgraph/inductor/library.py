"""What this process has compiled, by structure: captures of one process share their pieces as equal layers do.

A second capture of the same step, one with another length of the batch, and a step with another optimizer reuse the
pieces that they have in common. Nothing here keeps a piece alive: it goes with the last step that calls it.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from torch import fx

from stepgraph import compat
from stepgraph.inductor.compiled import Compiled, Function
from stepgraph.inductor.lengths import ForLengths, generalize, numbers, skeleton

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
                self.failed = "what the compiler had to know of the length holds for one alone"
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

    ``any_length``: if one that differs in its length alone was compiled or noted before, this one serves any length.
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
    """Whether this process has a compiled piece of that ``structure`` and ``config``, for its length alone."""
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
