"""``memory="peak=70GiB"``: each graph's share of memory such that the whole step is forecast to peak there.

`fit_memory` counts one graph, in the middle of the passes. What the whole step takes follows from rewriting it without
compiling: gathered parameters, fusion, accumulation, and the microbatches that a pipeline has in flight. A few of these
rewritings find the limit for the graphs. Optimizer state goes to the host where the curve of time over peak says that
recomputation and offload cost more for as many bytes, or do not suffice; the shorter of the two steps is taken.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.state import unwrap
from stepgraph.costs.hardware import host_copy_seconds
from stepgraph.costs.memory import peak_bytes, state_bytes
from stepgraph.costs.timeline import assumed_timeline
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.host_copies import on_host
from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import OptimizerState
from stepgraph.lower.spec import StepSpec
from stepgraph.passes import Pass, Target, resolve
from stepgraph.passes.memory.policy import check_modules
from stepgraph.passes.optimizer.offload import state_sizes

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
    search = peak_search(program, spec, target, rewritten)
    if search is None:
        return spec, target
    found, where = search.best(), search.target
    if where.host_memory is not None and not where.simulated:  # what is left for activations
        where = replace(where, host_memory=where.host_memory - sum(map(tensor_bytes, _state_on_host(found.made))))
    return replace(spec, passes=search.passes(found), disable=()), where


def peak_search(
    program: StepProgram,
    spec: StepSpec,
    target: Target | None,
    rewritten: Callable[[StepProgram, StepSpec, Target | None], StepProgram],
) -> "PeakSearch | None":
    """The search of `fitted`, before it begins; None where no peak is asked for."""
    where = target or Target.on(spec.device)
    passes = resolve(spec.passes, spec.disable, where)
    for p in passes:
        if p.name == "recompute":
            check_modules(p.options.modules, dict(spec.model.named_modules()))
    fit = next((p.options for p in passes if p.name == "fit_memory"), None)
    if fit is None or not fit.peak or fit.limit is not None or not spec.backward:
        return None
    asked = fit.peak_bytes
    where = replace(where, memory=asked)  # other passes' budget too
    held = _locked_bytes(program)
    if where.host_memory is not None:
        where = replace(where, host_memory=where.host_memory + held)
    return PeakSearch(program, replace(spec, passes=passes, disable=()), where, asked, rewritten, held)


def room_for_state(spec: StepSpec, target: Target | None) -> float:
    """Bytes of optimizer state that may be on the GPU when the step of ``spec`` is traced, before it is known how much
    is to stay there: as much as the peak that was asked for leaves."""
    passes = {p.name: p.options for p in resolve(spec.passes, spec.disable, target or Target.on(spec.device))}
    offload, fit = passes.get("offload_optimizer"), passes.get("fit_memory")
    if offload is not None and offload.state:
        return 0.0
    if offload is None or fit is None or not spec.backward:
        return math.inf
    parts = [part for p in spec.model.parameters() for part in unwrap(p.detach())[0] if not part.is_meta]
    return max(fit.peak_bytes - sum(part.nbytes for part in parts), 0.0)


def _state_on_host(program: StepProgram) -> list[fx.Node]:
    return [n for step in program.graphs.values() for n in step.placeholders(OptimizerState) if on_host(n)]


def _locked_bytes(program: StepProgram) -> int:
    """Bytes of optimizer state that lie in page-locked memory already."""
    live = [s.tensor for step in program.graphs.values() for s in step.inputs if isinstance(s.what, OptimizerState)]
    plain = [t for t in live if t is not None and t.device.type == "cpu" and not compat.is_fake(t)]
    return sum(t.nbytes for t in plain if t.is_pinned()) if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class PeakTry:
    """A rewriting under a ``limit``: bytes at the ``peak`` of the whole step, and of the largest graph as `fit_memory`
    counts it. ``tiles``: of the sequence; None: as many as were asked for. ``state``: bytes of optimizer state on the
    host. ``curve``: (bytes at the peak of the whole step, seconds that it costs) as far as `fit_memory` lowers it."""

    limit: float = math.inf
    part_bytes: int | None = None
    tiles: int | None = None
    state: float = 0.0
    peak: float = 0.0
    graph: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    made: StepProgram = field(default_factory=lambda: StepProgram({}, []), compare=False, repr=False)


class PeakSearch:
    """Rewritings of copies of ``program``, for a peak of ``asked`` bytes. ``held``: bytes of optimizer state that are
    on the host: they stay there, or a step's forms for other batches would be captured again and again."""

    def __init__(
        self,
        program: StepProgram,
        spec: StepSpec,
        target: Target,
        asked: float,
        rewritten: Callable[[StepProgram, StepSpec, Target | None], StepProgram],
        held: int,
    ):
        self.program, self.spec, self.target, self.asked, self.rewritten = program, spec, target, asked, rewritten
        self.fused = any(p.name == "fit_memory" and p.options.compiled for p in spec.passes)
        self.state = held if any(p.name == "offload_optimizer" and not p.options.state for p in spec.passes) else 0
        self.stays = ""
        """Why the optimizer's state cannot go to the host."""
        self._begun: tuple[list[Pass], StepProgram] = [], program
        """The passes before `fit_memory` of the latest attempt, and what they made of ``program``."""

    def passes(self, found: PeakTry, trial: bool = False) -> list[Pass]:
        """The passes of the step with the choice ``found``, or of a ``trial`` of it."""
        own = {"limit": found.limit, "beyond": found.peak - found.graph, "peak": self.asked / 2**30, "trial": trial}
        made = []
        for p in self.spec.passes:
            if p.name == "fit_memory":
                p = p.with_options(**own, peak_is_fraction=False)
            elif p.name == "fuse_loss" and found.part_bytes:
                p = p.with_options(part_bytes=found.part_bytes)
            elif p.name == "tile_sequence" and found.tiles:
                p = p.with_options(tiles=found.tiles)
            elif p.name == "offload_optimizer" and found.state:
                p = p.with_options(state=found.state)
            made.append(p)
        return made

    def attempt(self, like: PeakTry, **changes: float | None) -> PeakTry:
        """What the step takes with the choices of ``like`` and ``changes``."""
        unknown = replace(like, peak=0.0, graph=0.0, **changes)
        passes, begun = self.passes(unknown, True), self.program
        if self.spec.pipeline is None:  # whose stages are cut among the passes
            at = next(i for i, p in enumerate(passes) if p.name == "fit_memory")
            first, passes = passes[:at], passes[at:]
            if first != self._begun[0]:
                self._begun = first, self._rewritten(self.program, first)
            begun = self._begun[1]
        made = self._rewritten(begun, passes)
        peak = peak_bytes(made, fused=self.fused)
        if self.target.device == "cuda":
            peak += _FRAGMENTED * (peak - state_bytes(made)) + _WORKSPACES
        report = max(made.reports, key=lambda report: report.peak, default=None)
        graph, points = (report.peak, report.peak_curve) if report else (0, [])
        curve = tuple((peak - graph + size, price) for size, price in points)
        return replace(unknown, peak=peak, graph=graph, curve=curve, made=made)

    def _rewritten(self, program: StepProgram, passes: list[Pass]) -> StepProgram:
        return self.rewritten(program, replace(self.spec, passes=passes), replace(self.target, simulated=True))

    def best(self) -> PeakTry:
        """The shortest step of the rewritings that were tried and take at most what was asked for."""
        tried = [least := self._best(PeakTry(state=self.state))]
        if least.limit < math.inf or least.peak > self.asked:
            tried.append(self._with_state(least))
        for tiles in self._tiles():
            if min(found.peak for found in tried) > self.asked:
                tried.append(self._best(PeakTry(tiles=tiles, state=self.state)))
                tried.append(self._with_state(tried[-1]))
        met = [found for found in tried if found.peak <= self.asked]
        if met:
            return met[0] if len(met) == 1 else min(met, key=self._seconds)
        least = min(tried, key=lambda found: found.peak)
        enough = math.ceil(least.peak / 2**30 * 1e3) / 1e3
        raise ValueError(
            f"memory peak={self.asked / 2**30:.4g}GiB cannot be met: with all that can be recomputed or offloaded the "
            f"step takes {least.peak / 2**30:.4g} GiB; ask for at least peak={enough:g}GiB, or make the batch smaller"
            + (f" ({self.stays})" if self.stays else "")
        )

    def least(self, like: PeakTry | None = None) -> PeakTry:
        """The rewriting with the lowest peak: `best` finds one for every peak from there on. ``like``: whose tiles and
        parts are taken; None: all are tried."""
        tries = [PeakTry(tiles=tiles) for tiles in (None, *self._tiles()[-1:])] if like is None else [like]
        return min(map(self._least, tries), key=lambda found: found.peak)

    def _least(self, like: PeakTry) -> PeakTry:
        for state in self._amounts()[-1:]:
            with contextlib.suppress(ValueError):  # it cannot go to the host
                return self._in_parts(self.attempt(like, limit=0.0, state=state), 0.0)
        return self._in_parts(self.attempt(like, limit=0.0, state=self.state), 0.0)

    def _tiles(self) -> tuple[int, ...]:
        return _TILES if any(p.name == "tile_sequence" and p.options.search for p in self.spec.passes) else ()

    def _seconds(self, found: PeakTry) -> float:
        """Seconds of a step, as it is forecast to run."""
        return sum(n * assumed_timeline(step.graph, self.fused).step_seconds for step, n in found.made.counted())

    def _with_state(self, plain: PeakTry) -> PeakTry:
        """``plain`` with as much of the optimizer's state on the host as makes the step shortest, by its curve of time
        over peak; ``plain`` itself where that is none."""
        amounts = self._amounts()
        if self.stays or not amounts:
            return plain
        found, calls = plain, plain.made.microbatches

        def price(state: float) -> float:
            costs = [seconds for size, seconds in plain.curve if size - (state - plain.state) <= self.asked]
            return calls * min(costs, default=math.inf) + (host_copy_seconds(state) if state else 0.0)

        state = min([plain.state, *amounts], key=price)
        if price(state) == math.inf:
            state = amounts[-1]
        while state > plain.state:
            try:
                found = self._best(replace(plain, state=state), plain.limit + state - plain.state)
            except ValueError as error:
                self.stays = str(error)
                return plain
            if found.peak <= self.asked or state == amounts[-1]:
                break
            state = next(size for size in amounts if size >= min(state + found.peak - self.asked, amounts[-1]))
        return found

    def _amounts(self) -> list[float]:
        """Bytes of state that can go to the host: of the last parameter, of the last two, and so on; no more than the
        host has room for. Ranks must choose the same, and may have unequal hosts: `offload_optimizer` looks then."""
        if not any(p.name == "offload_optimizer" and not p.options.state for p in self.spec.passes):
            return []
        sizes = [size for step in self.program.graphs.values() for size in state_sizes(step)]
        host = None if self.program.main.mesh is not None else self.target.host_memory
        found = itertools.accumulate(sizes)
        return [size for size in found if size > self.state and (host is None or size <= host)]

    def _best(self, like: PeakTry, limit: float = math.inf) -> PeakTry:
        """Among rewritings with the tiles and state of ``like``, the one with the highest peak within the target; if
        none is within it, the one with the lowest peak. ``limit``: where to begin, if that is known about."""
        over, under = replace(like, limit=math.inf, graph=math.inf), None
        if limit == math.inf:
            over = self.attempt(over)
            if over.peak <= self.asked:
                return over
            limit = over.graph - (over.peak - self.asked)
        for _ in range(_MOST):
            found = self._in_parts(self.attempt(over, limit=max(limit, 0.0)), self.asked)
            over = replace(over, part_bytes=found.part_bytes)
            if found.peak > self.asked:
                if found.graph > found.limit:  # nothing is left to give up
                    return under or found
                over, limit = found, found.graph - 1.02 * (found.peak - self.asked)
                continue
            if under is not None and found.graph == under.graph:  # the same choice
                break
            under = found if under is None or found.peak > under.peak else under
            if self.asked - found.peak <= _CLOSE * self.asked:
                break
            limit = found.limit + 0.9 * (self.asked - found.peak)
            limit = limit if limit < over.limit else (found.limit + min(over.limit, over.graph)) / 2
        return under or self._in_parts(self.attempt(over, limit=0.0), self.asked)

    def _in_parts(self, found: PeakTry, goal: float) -> PeakTry:
        """``found``; where nothing is left to give up, with smaller parts of the logits, as long as they help and the
        peak is above ``goal``."""
        parts = found.part_bytes or next((p.options.part_bytes for p in self.spec.passes if p.name == "fuse_loss"), 0)
        if not any(report.name == "fuse_loss" and report.matched for report in found.made.reports):
            return found
        while found.peak > goal and found.graph > found.limit and parts > _LEAST_PART:
            parts //= 4
            smaller = self.attempt(found, part_bytes=parts)
            if smaller.peak >= found.peak:
                break
            found = smaller
        return found
