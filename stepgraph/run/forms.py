"""The forms in which a step was captured: one for each form of batch, options and training flags."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from stepgraph.errors import warn_caller
from stepgraph.run.bound import BoundStep

#: How many forms are kept; the least recently used goes first.
MAX_CAPTURES = 64
#: More than this many are a cause for a warning. With CUDA graphs, each with memory of its own, no more are kept.
FEW_CAPTURES = 8


class Forms:
    """A step's captured forms by signature, the one used last at the end."""

    def __init__(self):
        self._bound: OrderedDict[tuple, BoundStep] = OrderedDict()
        self._changed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._bound)

    def __iter__(self) -> Iterator[BoundStep]:
        return iter(self._bound.values())

    @property
    def latest(self) -> BoundStep | None:
        """The form that was used last; None without one."""
        return next(reversed(self._bound.values()), None)

    def of(self, signature: tuple) -> BoundStep | None:
        """The form with this signature; None if there is none, or if what it was specialized on has changed since."""
        bound = self._bound.get(signature)
        if bound is None:
            return None
        replaced, change = bound.watch.sees_change(), bound.plain.change()
        if change:
            self._say(change)
        if replaced or change:
            del self._bound[signature]
            return None
        self._bound.move_to_end(signature)
        return bound

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

    def make_room(self) -> None:
        """Before another form is captured: drop one if no more are kept, and say what many forms cost."""
        captured = len(self._bound)
        recorded = captured and any(graph.recording is not None for graph in self.latest.traced.program.graphs.values())
        most = FEW_CAPTURES if recorded else MAX_CAPTURES
        if captured in (FEW_CAPTURES, most):
            dropping = "; dropping the least recently used" if captured == most else ""
            warn_caller(
                f"{captured} forms of the step are captured already{dropping}. Each costs a capture: pad batches to "
                "few shapes, and let schedules change the learning rate alone: betas, eps and weight decay are "
                "constants."
            )
        if captured == most:
            self._bound.popitem(last=False)

    def keep(self, signature: tuple, bound: BoundStep) -> None:
        """Keep a form, as the one used last."""
        self._bound[signature] = bound

    def drop_exceeded(self, conditions: Iterable[str]) -> None:
        """Drop the forms that were captured with what ``conditions``, which a step exceeded, have outgrown."""
        for signature in [key for key, bound in self._bound.items() if bound.traced.grow.keys() & set(conditions)]:
            del self._bound[signature]
