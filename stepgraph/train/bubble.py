"""How long the ranks of a pipeline wait for each other: the bubble of a run's steps, measured."""

import statistics

from stepgraph.parallel.ranks import Ranks


class Bubble:
    """Of the timed steps of a run. ``share``: of their time, in [0, 1], the mean of all ranks; None until `measure`."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._waited_s = self._steps_s = 0.0

    def add(self, waited_s: float, step_s: float) -> None:
        """A step took ``step_s`` seconds, of which this rank waited ``waited_s`` for other stages."""
        self._waited_s += waited_s
        self._steps_s += step_s

    def measure(self, ranks: Ranks) -> str:
        """Ask all ranks for their share; what to print, "" if no step was timed."""
        if not self._steps_s:
            return ""
        shares = ranks.gather(lambda: self._waited_s / self._steps_s)
        self.share = statistics.fmean(shares)
        return f"bubble {self.share:.1%} of the step on average, {max(shares):.1%} on the rank that waits longest"
