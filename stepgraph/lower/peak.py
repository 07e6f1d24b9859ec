"""``memory="peak=70GiB"``: what each graph may take so that the whole step, as it is forecast, peaks there.

`fit_memory` counts one graph, in the middle of the passes. What the whole step takes follows from rewriting it without
compiling: gathered parameters, fusion, accumulation, and the microbatches that a pipeline has in flight. A few of these
rewritings find the limit for the graphs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepgraph.costs.memory import peak_bytes, state_bytes
from stepgraph.graph.program import StepProgram
from stepgraph.lower.spec import StepSpec
from stepgraph.passes import Pass, Target, resolve
from stepgraph.passes.memory.policy import check_modules

#: What torch's allocator reserves beyond what is allocated: a share of all but parameters and optimizer state, which
#: are allocated once; and workspaces of cuBLAS. Not measured for each model.
_FRAGMENTED, _WORKSPACES = 0.01, 64 * 2**20
#: The search ends this close below what was asked for, or after as many rewritings.
_CLOSE, _MOST = 0.005, 6
#: Tiles of the sequence that are tried where recomputation and offload do not suffice.
_TILES = (4, 16)
#: Bytes of the logits below which smaller parts are not tried.
_LEAST_PART = 2**26


def fitted(
    program: StepProgram,
    spec: StepSpec,
    target: Target | None,
    rewritten: Callable[[StepProgram, StepSpec, Target | None], StepProgram],
) -> tuple[StepSpec, Target | None]:
    """``spec`` and ``target`` as they are where no peak is asked for; else with the passes that meet it. ``rewritten``:
    of a copy of ``program``. Raises ``ValueError``, in one line, for modules that are not there and for a peak that
    cannot be met, with the least that can."""
    where = target or Target.on(spec.device)
    passes = resolve(spec.passes, spec.disable, where)
    for p in passes:
        if p.name == "recompute":
            check_modules(p.options.modules, dict(spec.model.named_modules()))
    fit = next((p.options for p in passes if p.name == "fit_memory"), None)
    if fit is None or not fit.peak or fit.limit is not None or not spec.backward:
        return spec, target
    asked = fit.peak_bytes
    where = replace(where, memory=asked)  # other passes' budget too
    search = _Search(program, replace(spec, passes=passes, disable=()), where, asked, rewritten)
    return replace(spec, passes=search.passes(search.best()), disable=()), where


@dataclass(frozen=True)
class _Try:
    """A rewriting under a ``limit``: bytes at the ``peak`` of the whole step, and of the largest graph as `fit_memory`
    counts it. ``tiles``: of the sequence; None: as many as were asked for."""

    limit: float
    peak: float
    graph: float
    part_bytes: int | None
    tiles: int | None = None


class _Search:
    """Rewritings of copies of ``program``, for a peak of ``asked`` bytes."""

    def __init__(
        self,
        program: StepProgram,
        spec: StepSpec,
        target: Target,
        asked: float,
        rewritten: Callable[[StepProgram, StepSpec, Target | None], StepProgram],
    ):
        self.program, self.spec, self.target, self.asked, self.rewritten = program, spec, target, asked, rewritten
        self.fused = any(p.name == "fit_memory" and p.options.compiled for p in spec.passes)

    def passes(self, found: _Try) -> list[Pass]:
        """The passes of the step with what was ``found``."""
        own = {"limit": found.limit, "beyond": found.peak - found.graph, "peak": self.asked / 2**30}
        made = []
        for p in self.spec.passes:
            if p.name == "fit_memory":
                p = p.with_options(**own, peak_is_fraction=False)
            elif p.name == "fuse_loss" and found.part_bytes:
                p = p.with_options(part_bytes=found.part_bytes)
            elif p.name == "tile_sequence" and found.tiles:
                p = p.with_options(tiles=found.tiles)
            made.append(p)
        return made

    def attempt(self, limit: float, part_bytes: int | None = None, tiles: int | None = None) -> _Try:
        """What the step takes where `fit_memory` has this ``limit``."""
        unknown = _Try(limit, 0.0, 0.0, part_bytes, tiles)
        simulated = replace(self.target, simulated=True)
        made = self.rewritten(self.program, replace(self.spec, passes=self.passes(unknown)), simulated)
        peak = peak_bytes(made, fused=self.fused)
        if self.target.device == "cuda":
            peak += _FRAGMENTED * (peak - state_bytes(made)) + _WORKSPACES
        return replace(unknown, peak=peak, graph=max((r.peak for r in made.reports), default=0))

    def best(self) -> _Try:
        """The rewriting that keeps most, of those tried that take at most what was asked for; in the fewest tiles."""
        search = any(p.name == "tile_sequence" and p.options.search for p in self.spec.passes)
        least = self._best()
        for tiles in _TILES if search else ():
            if least.peak > self.asked:
                least = min(least, self._best(tiles), key=lambda found: found.peak)
        if least.peak <= self.asked:
            return least
        enough = math.ceil(least.peak / 2**30 * 1e3) / 1e3
        raise ValueError(
            f"memory peak={self.asked / 2**30:.4g}GiB cannot be met: with all that can be recomputed or offloaded the "
            f"step takes {least.peak / 2**30:.4g} GiB; ask for at least peak={enough:g}GiB, or make the batch smaller"
        )

    def _best(self, tiles: int | None = None) -> _Try:
        """The same with ``tiles``; if none takes so little, the one that takes least."""
        over, under = self.attempt(math.inf, None, tiles), None
        if over.peak <= self.asked:
            return over
        limit = over.graph - (over.peak - self.asked)
        for _ in range(_MOST):
            found = self._in_parts(self.attempt(max(limit, 0.0), over.part_bytes, tiles))
            if found.peak > self.asked:
                if found.graph > found.limit:  # nothing is left to give up
                    break
                over, limit = found, found.graph - 1.02 * (found.peak - self.asked)
                continue
            under = found if under is None or found.peak > under.peak else under
            if self.asked - found.peak <= _CLOSE * self.asked:
                break
            limit = found.limit + 0.9 * (self.asked - found.peak)
            limit = limit if limit < over.limit else (found.limit + min(over.limit, over.graph)) / 2
        return under or self.attempt(0.0, over.part_bytes, tiles)

    def _in_parts(self, found: _Try) -> _Try:
        """``found``; where nothing is left to give up, with smaller parts of the logits, as long as they help."""
        parts = next((p.options.part_bytes for p in self.spec.passes if p.name == "fuse_loss"), 0)
        while found.peak > self.asked and found.graph > found.limit and parts > _LEAST_PART:
            parts //= 4
            smaller = self.attempt(found.limit, parts, found.tiles)
            if smaller.peak >= found.peak:
                break
            found = smaller
        return found
