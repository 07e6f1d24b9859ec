"""The forms in which a step was captured: one for each form of batch, options and training flags."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stepgraph.capture.batch import leaves_by_name
from stepgraph.errors import warn_caller
from stepgraph.run.bound import BoundStep

#: How many forms are kept; the least recently used goes first.
MAX_CAPTURES = 64
#: More than this many are a cause for a warning.
FEW_CAPTURES = 8
#: After this many, a value of the batch that is another one in each is named.
_NAMED = 3


class Forms:
    """A step's captured forms by signature, the one used last at the end. Several have one signature if Python read
    other values of their batches, or if the optimizer's code decided otherwise by numbers, such as a count of steps."""

    def __init__(self):
        self._bound: OrderedDict[BoundStep, tuple] = OrderedDict()
        self._alike: defaultdict[tuple, list[BoundStep]] = defaultdict(list)
        self._changed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._bound)

    def __iter__(self) -> Iterator[BoundStep]:
        return iter(self._bound)

    @property
    def latest(self) -> BoundStep | None:
        """The form that was used last; None without one."""
        return next(reversed(self._bound), None)

    def of(self, signature: tuple, leaves: Sequence[Any]) -> BoundStep | None:
        """The form with this signature for the ``leaves`` of a batch; None if there is none, or if what it was
        specialized on has changed since."""
        for bound in [bound for bound in self._alike.get(signature, ()) if bound.fits(leaves)]:
            replaced, change = bound.watch.sees_change(), bound.plain.change()
            if change:
                self._say(change)
            if replaced or change:
                self._drop(bound)
            elif all([host.holds() for host in bound.traced.hosts]):
                self._bound.move_to_end(bound)
                return bound
        return None

    def _drop(self, bound: BoundStep) -> None:
        signature = self._bound.pop(bound)
        self._alike[signature].remove(bound)
        if not self._alike[signature]:
            del self._alike[signature]

    def _say(self, change: str) -> None:
        """Warn of a change that costs a capture; of one that comes again and again, what to do, and then less often."""
        what = change.partition(" ")[0]
        self._changed[what] += 1
        times, advice = self._changed[what], ""
        if times >= 3:
            advice = (
                f"; {what} has changed {times} times, each time for a capture: pass it in the batch as a tensor, or "
                "keep it in a buffer of the model"
            )
        if times <= 3 or str(times).strip("0") == "1":
            warn_caller(f"{change}: the step is captured again{advice}")

    def make_room(self, batch: Any, signature: tuple) -> None:
        """Before the form of ``batch``, which has this signature, is captured: drop one if no more are kept, and say
        what many forms cost."""
        captured = len(self._bound)
        if captured == _NAMED and (name := self._varying(batch, signature)) is not None:
            warn_caller(
                f"{name} differs in each of {captured + 1} variants of the step, and each variant is captured: "
                "leave it out of the batch, or pass it as a tensor"
            )
        if captured in (FEW_CAPTURES, MAX_CAPTURES):
            dropping = "; dropping the least recently used" if captured == MAX_CAPTURES else ""
            if len(self.latest.traced.batch_reads):
                dropping += "; each value of the batch that Python reads, such as a length, makes a form"
            warn_caller(
                f"{captured} variants of the step are captured already{dropping}. Each costs a capture: pad batches to "
                "few shapes, and let schedules change only the learning rate: the other options of fused Adam, SGD "
                "and Adafactor are constants."
            )
        if captured == MAX_CAPTURES:
            self._drop(next(iter(self._bound)))

    def _varying(self, batch: Any, signature: tuple) -> str | None:
        """The name of a value of the batch, no tensor, that is another one in each form."""
        forms = [form for form, *_ in (*self._bound.values(), signature)]
        for i, name in enumerate(leaves_by_name(batch), start=1):
            of_leaf = [form[i] if i < len(form) else None for form in forms]
            plain = isinstance(of_leaf[-1], tuple) and of_leaf[-1] and isinstance(of_leaf[-1][0], type)
            if plain and len(set(of_leaf)) == len(forms):
                return name
        return None

    def keep(self, signature: tuple, bound: BoundStep) -> None:
        """Keep a form, as the one used last."""
        self._bound[bound] = signature
        self._alike[signature].append(bound)

    def drop_exceeded(self, conditions: Iterable[str]) -> None:
        """Drop the forms captured with limits that ``conditions``, which a step exceeded, have outgrown."""
        for bound in [bound for bound in self._bound if bound.traced.grow.keys() & set(conditions)]:
            self._drop(bound)
