"""Keep, recompute or offload each forward result that backward reads, so that the step meets the requested peak.

Matches: results that forward leaves for backward, after fusion has decided what they are. Before -> after: see
`recompute` and `offload`. Each way to give a result up has a price in seconds: to compute it again, or, for copies that
hide behind computation, a share of their time. `least_time` chooses what to recompute at a price per stored byte; what
is stored is offloaded from the first result on, as far as copies hide. The price rises until the peak is low enough.
Equal blocks make the same choice, except that some may use one price and the others the next, so that a compiler sees
few different pieces. Results that need not be given up after all are kept.
Exact: the same bits as `recompute` and `offload`. Preconditions: a flat graph with phases. Modules that the policy
names are not touched, except that they offload where it says so.
Source: see `least_time`.
"""

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch import fx

from stepgraph.costs.attention import transient_bytes
from stepgraph.costs.hardware import HOST_COPY_S, HOST_LINK, host_copy_seconds
from stepgraph.costs.memory import lifetimes
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.host_copies import device_bytes, on_host
from stepgraph.graph.provenance import provenance
from stepgraph.graph.step_graph import StepGraph, name_of, type_of
from stepgraph.graph.values import OptimizerState
from stepgraph.options import StepOptions
from stepgraph.passes.contract import PassReport, Target, register
from stepgraph.passes.memory import offload
from stepgraph.passes.memory.least_time import LeastTime, Stores
from stepgraph.passes.memory.norms import apart, joined
from stepgraph.passes.memory.policy import module_actions, parse_policy
from stepgraph.passes.memory.recompute import Plan
from stepgraph.passes.memory.rematerialize import rematerialize

#: The price of a copy that hides: the share of its time that computation loses to its traffic. Not measured.
_HIDDEN_PRICE = 0.1
#: Bytes from which on a copy takes longer than it takes to begin.
_LEAST_COPY = HOST_COPY_S * HOST_LINK
#: How often the prices between which a report shows other peaks are halved.
_HALVINGS = 3
#: Results at most that are tried to be kept after all.
_GIVEN_BACK = 32
#: Lines of a report.
_SHOWN = 12


@dataclass(frozen=True)
class FitOptions:
    """``peak``: GiB of the whole step, or a share of the GPU's memory by ``peak_is_fraction``; 0: only ``modules`` (see
    `MemoryPolicy`) count. ``memory``: bytes of the GPU. ``limit``: the bytes that this graph may take as the pass
    counts them, None for no limit: `stepgraph.lower` finds it for the whole step. ``beyond``: bytes that the
    whole step takes more than that. ``host``: bytes of host memory for this rank, None where unknown. ``compiled``:
    whether a compiler joins nodes. ``carry_least``: whether it will carry the fewest bytes (see `rematerialize`).
    ``simulated``: whether the host is a forecast machine's, where the optimizer's state does not lie yet.
    ``trial``: whether `stepgraph.lower` only tries this ``limit``: what a lower peak would cost is not asked."""

    peak: float = 0.0
    peak_is_fraction: bool = False
    modules: tuple[tuple[str, str], ...] = ()
    memory: float | None = None
    limit: float | None = None
    beyond: float = 0.0
    host: float | None = None
    compiled: bool = False
    carry_least: bool = False
    simulated: bool = False
    trial: bool = False

    @property
    def peak_bytes(self) -> float:
        """The requested bytes of the whole step. ``ValueError`` for a share of unknown memory."""
        if self.peak_is_fraction and not self.memory:
            raise ValueError(
                f"memory peak={self.peak:.0%} is a share of a GPU's memory, which is not known here; use GiB, as in "
                "peak=8GiB"
            )
        return self.peak * ((self.memory or 0.0) if self.peak_is_fraction else 2**30)


def _from_options(options: StepOptions) -> dict[str, object] | None:
    policy = parse_policy(options.memory)
    if policy.policy != "peak" and all(action != "offload" for _, action in policy.modules):
        return None
    compiled = options.passes == "default" and options.compiles_all
    carry = compiled and "rematerialize" not in options.disable_pass
    own = {"peak": policy.peak, "peak_is_fraction": policy.peak_is_fraction, "modules": policy.modules}
    return own | {"compiled": compiled, "carry_least": carry}


def _for_target(options: FitOptions, target: Target) -> FitOptions:
    carry = options.carry_least and target.device == "cuda"
    host = target.host_memory
    if host and not target.simulated:  # what is free differs from start to start, and is a part of a saved step's key
        host -= host % 2.0 ** (math.frexp(host)[1] - 3)
    of_machine = {"memory": target.memory, "host": host, "simulated": target.simulated}
    return replace(options, carry_least=carry, **of_machine)


@register(
    "fit_memory",
    "exact",
    options=FitOptions(),
    after=("recompute", "fuse_norm", "fuse_loss"),
    from_options=_from_options,
    for_target=_for_target,
)
def fit_memory(step: StepGraph, options: FitOptions, report: PassReport) -> None:
    """Keep, recompute or offload each saved result, for a peak of memory that was asked for."""
    if not any(step.nodes("backward")):
        return
    if options.carry_least:
        rematerialize(step)
    norms = apart(step) if options.compiled and options.limit is not None else {}
    fit = Fit(step, options)
    report.matched = len(fit.plan.saved)
    if options.limit is not None:
        fit.solve(options.limit)
    _refuse_host(fit)
    report.peak = fit.peak()
    report.peak_curve = [(peak + round(options.beyond), price) for peak, price in fit.path]
    report.peak_chosen = report.peak + round(options.beyond), sum(fit.prices.values())
    sizes = {
        action: sum(map(tensor_bytes, roots)) for action, roots in (("recompute", fit.dropped), ("offload", fit.gone))
    }
    if len(curve := report.peak_curve) > 1:
        shown = [curve[i * (len(curve) - 1) // 4] for i in range(5)] if len(curve) > 5 else curve
        steps = ", ".join(f"{peak / 2**30:.4g} GiB +{price * 1e3:.3g} ms" for peak, price in shown)
        report.notes.append(f"forecast peak of the step and its cost: {steps}")
    report.notes += fit.lines()
    report.changed = len(fit.dropped) + len(fit.gone)
    report.summary = (
        f"{len(fit.dropped)} saved results recomputed ({sizes['recompute'] / 2**20:.0f} MiB), {len(fit.gone)} "
        f"offloaded ({sizes['offload'] / 2**20:.0f} MiB), {report.matched - report.changed} kept; price "
        f"{sum(fit.prices.values()) * 1e3:.2f} ms per microbatch"
    )
    fit.rewrite()
    joined(norms)


def _refuse_host(fit: "Fit") -> None:
    need = fit.step.in_flight * sum(map(tensor_bytes, fit.gone))
    if fit.host is not None and need > max(fit.host, 0.0):
        raise ValueError(
            f"offloading needs {need / 2**30:.1f} GiB of host memory for each rank and {fit.host / 2**30:.1f} GiB "
            "are free: offload fewer modules, or recompute some"
        )


class Fit:
    """A choice for each saved result of ``step``. ``dropped``: what is recomputed. ``gone``: what is offloaded.
    ``prices``: seconds for each. ``path``: (bytes at the peak, price) at each look while the peak fell. ``host``: bytes
    of host memory for them, None where unknown."""

    def __init__(self, step: StepGraph, options: FitOptions):
        self.step, self.options = step, options
        self.plan = plan = Plan(step)
        self.trips = offload.Trips(plan, options.compiled)
        aliases = self.position = plan.aliases.position
        find = module_actions(options.modules)
        actions = {r: find(p.path) if (p := provenance(r)) else None for r in plan.saved} if options.modules else {}
        fixed = {root for root, action in actions.items() if action}
        movable = self.trips.can_go()
        self.gone = {r for r in movable if (a := actions.get(r)) and a[0] == "offload"}
        self.movable = movable - fixed
        again = plan.full() if step.blocks else plan.selective()
        self.again = {n for n in again if n not in fixed}
        self.fixed = frozenset(self.gone)  # as the policy says
        self.dropped: set[fx.Node] = set()
        self.prices: dict[fx.Node, float] = {}
        self.path: list[tuple[int, float]] = []
        state = sum(map(tensor_bytes, filter(on_host, step.placeholders(OptimizerState)))) if options.simulated else 0
        self.host = None if options.host is None else options.host - state
        self.sizes = {node: device_bytes(node) for node in plan.nodes}
        self._reads()
        self._base(aliases)

    def _reads(self) -> None:
        """Where each saved result is read last in forward, and first and last in backward."""
        plan = self.plan
        self.last_forward: dict[fx.Node, int] = {}
        self.needs: dict[fx.Node, tuple[int, int]] = {}
        for root in plan.saved:
            places = plan.aliases.reads(root)
            back = [p for p in places if plan.is_backward(plan.nodes[p])]
            self.last_forward[root] = max([self.position[root], *(p for p in places if p < min(back))])
            self.needs[root] = min(back), max(back)

    def _base(self, position: dict[fx.Node, int]) -> None:
        """Memory over time of all but the saved results, as differences from node to node."""
        plan, graph = self.plan, self.step.graph
        self.base = np.zeros(len(plan.nodes) + 1, dtype=np.int64)
        self.base[0] = sum(self.sizes[n] for n in plan.nodes if n.op in ("placeholder", "get_attr"))
        self.last: dict[fx.Node, int] = {}
        for node, made, freed in lifetimes(graph, plan.aliases, self.trips.fusion):
            for root in freed:
                self.last[root] = position[node]
                if root not in plan.saved:
                    self.base[position[node] + 1] -= self.sizes[root]
            if made and node not in plan.saved:
                self.base[position[node]] += self.sizes[node]
            if transient := transient_bytes(node):
                self.base[position[node]] += transient
                self.base[position[node] + 1] -= transient

    def intervals(self) -> dict[fx.Node, list[tuple[int, int]]]:
        """Where each saved result, and what is kept or made again for it, lies in memory: from node to node."""
        plan, needs = self.plan, dict(self.needs)
        queue = [(-self.position[root], root) for root in needs]
        heapq.heapify(queue)
        gone: list[tuple[fx.Node, int, int]] = []
        found: dict[fx.Node, list[tuple[int, int]]] = {}
        delays: dict[int, float] = defaultdict(float)
        runs: set[fx.Node] = set()
        while queue:
            _, root = heapq.heappop(queue)
            if root in found:
                continue
            (first, last), made = needs[root], self.position[root]
            saved = root in self.needs
            if root in self.dropped or (not saved and root in self.again):
                found[root] = [*([(made, self.last_forward[root])] if saved else []), (first, last)]
                if (operator := plan.operator(root)) not in runs:
                    runs.add(operator)
                    delays[first] += self._seconds(root)
                for source in plan.sources(root):
                    if source.op != "call_function":
                        continue
                    before = needs.get(source)
                    needs[source] = (min(before[0], first), max(before[1], first)) if before else (first, first)
                    if before is None:
                        heapq.heappush(queue, (-self.position[source], source))
            elif root in self.gone:
                gone.append((root, self.last_forward[root], first))
                found[root] = [(made, self.last_forward[root]), (first, last)]
            else:
                found[root] = [(made if saved else self.last.get(root, made), last)]
        self.trips.delay(delays)
        self.routes = self.trips.schedule(gone)
        for root, trip in self.routes.items():
            made, forward = found[root][0]
            found[root] = [(made, max(forward, trip.away)), (trip.back, found[root][1][1])]
        return found

    def curve(self) -> np.ndarray:
        """Bytes in memory while each node runs."""
        change = self.base.copy()
        for root, spans in self.intervals().items():
            size = self.sizes[root]
            for begin, end in spans:
                change[begin] += size
                change[max(begin, end) + 1] -= size
        return np.cumsum(change)[:-1]

    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return int(self.curve().max())

    def solve(self, limit: float) -> None:
        """Recompute or offload results, whichever take the least time, until the peak is at most ``limit`` or no
        result is left."""
        self._note(self.curve())
        if self.peak() > limit:
            self._in_least_time(limit)
        self._give_back(limit)
        if not self.options.trial:
            chosen = set(self.dropped), set(self.gone), dict(self.prices)
            self._lowest()  # what other peaks would cost
            self.dropped, self.gone, self.prices = chosen
        path = sorted(set(self.path), key=lambda point: (-point[0], point[1]))
        self.path = [point for i, point in enumerate(path) if all(point[1] < other[1] for other in path[i + 1 :])]

    @cached_property
    def _stores(self) -> LeastTime:
        return LeastTime(self.plan, self.needs, self.again, self.sizes, self._seconds)

    def _lowest(self) -> Stores:
        """The choice with the lowest peak among those at several prices, with copies. All are noted, without too."""
        found = [self._stores.at(0.0), self._stores.at(math.inf)]
        for _ in range(_HALVINGS):
            middles = [self._stores.between(*pair) for pair in pairwise(found)]
            found = [each for pair in zip(found, [*middles, None], strict=True) for each in pair if each is not None]
        for each in found:
            self._choose_all(each.of_all, False)
        return min(found, key=lambda each: self._choose_all(each.of_all, True))

    def _in_least_time(self, limit: float) -> None:
        """Choose by `LeastTime` at the lowest price at which the peak is at most ``limit``; between two prices, as few
        blocks as suffice take the higher one, and as few results as suffice are offloaded. If no price is enough, the
        lowest peak."""
        stores = self._stores
        low, high = stores.at(0.0), stores.at(_HIDDEN_PRICE / HOST_LINK)
        copies = self._choose_all(high.of_all, False) > limit
        if copies:
            low = high
            if self._choose_all(high.of_all, True) > limit:
                high = self._lowest()
                if self._choose_all(high.of_all, True) > limit:
                    return
        while middle := stores.between(low, high):
            if self._choose_all(middle.of_all, copies) <= limit:
                high = middle
            else:
                low = middle
        self._mix(low, high, copies, limit)
        away, dropped = sorted(self.gone - self.fixed, key=self.position.__getitem__), set(self.dropped)
        self._fewest(len(away), lambda n: self._set(dropped, away[:n]) <= limit)

    def _choose_all(self, dropped: set[fx.Node], copies: bool) -> int:
        """The peak where ``dropped`` are recomputed and, with ``copies``, all others are offloaded for which
        computation does not wait: the first ones, as what is sent first leaves memory first."""
        away: list[fx.Node] = []
        if copies:
            room = math.inf
            if self.host is not None and self.step.mesh is None:  # ranks must choose the same
                room = self.host / self.step.in_flight - sum(self.sizes[r] for r in self.fixed)
            for root in sorted(self.movable - dropped, key=self.position.__getitem__):
                if _LEAST_COPY <= self.sizes[root] <= room:
                    away.append(root)
                    room -= self.sizes[root]
        peak = self._set(dropped, away)
        while waits := [root for root in away if not self.routes[root].hidden]:
            away = [root for root in away if root not in waits]
            peak = self._set(dropped, away)
        return peak

    def _set(self, dropped: set[fx.Node], away: list[fx.Node]) -> int:
        """The peak where ``dropped`` are recomputed and ``away`` are offloaded."""
        paid: set[fx.Node] = set()
        self.dropped, self.gone = set(dropped), {*self.fixed, *away}
        self.prices = {r: self._again_seconds(r, paid) for r in sorted(dropped, key=self.position.__getitem__)}
        self.prices |= {r: _HIDDEN_PRICE * host_copy_seconds(self.sizes[r]) for r in away}
        self._note(curve := self.curve())
        return int(curve.max())

    def _mix(self, low: Stores, high: Stores, copies: bool, limit: float) -> None:
        """Let as few blocks as suffice choose as in ``high``, the others as in ``low``: the last blocks, so that copies
        can begin early, or the first or the middle ones, so that what is read soon is kept."""
        size, found = len(low.dropped), []
        numbers = [i for i in range(size) if low.dropped[i] != high.dropped[i]]
        middle = sorted(numbers, key=lambda i: abs(2 * i - size))
        for order in (numbers[::-1], numbers, middle):

            def meets(count: int, order: list[int] = order) -> bool:
                return self._choose_all(high.mixed(low, {*order[:count]}), copies) <= limit

            self._fewest(len(order), meets)
            found.append((sum(self.prices.values()), set(self.dropped)))
        self._choose_all(min(found, key=lambda pair: pair[0])[1], copies)

    @staticmethod
    def _fewest(most: int, meets: Callable[[int], bool]) -> None:
        """Leave chosen what ``meets`` chooses for the least number for which it holds, as it does for ``most``."""
        least, met = 0, most
        while least < met:
            middle = (least + met) // 2
            least, met = (least, middle) if meets(middle) else (middle + 1, met)
        meets(met)

    def _note(self, curve: np.ndarray) -> None:
        self.path.append((int(curve.max()), sum(self.prices.values())))

    def _give_back(self, limit: float) -> None:
        """Keep what need not be given up, the most expensive first."""
        if self.peak() > limit:
            return
        for root in sorted(self.prices, key=lambda root: (-self.prices[root], -self.position[root]))[:_GIVEN_BACK]:
            price, chosen = self.prices.pop(root), self.dropped if root in self.dropped else self.gone
            chosen.remove(root)
            if self.peak() > limit:
                self.prices[root] = price
                chosen.add(root)

    def _seconds(self, root: fx.Node) -> float:
        """Seconds of the operator behind ``root``. A compiler joins operators to kernels, each of which has the seconds
        of one of its nodes; what it would have written without need is a kernel of its own."""
        joined = 0.0 if root in self.plan.gathers else self.trips.seconds.get(self.plan.operator(root), 0.0)
        return self.plan.seconds(root) if not joined and root in self.plan.saved else joined

    def _again_seconds(self, root: fx.Node, paid: set[fx.Node] | None = None) -> float:
        """Seconds to recompute ``root`` from results that are saved, or dropped and already paid for. ``paid``:
        operators that run again anyway; those of ``root`` are added."""
        seen: set[fx.Node] = set() if paid is None else paid
        queue, seconds = [root], 0.0
        while queue:
            node = queue.pop()
            operator = self.plan.operator(node)
            if operator in seen or node.op != "call_function" or (node is not root and node in self.needs):
                continue
            if node not in self.again:
                continue
            seen.add(operator)
            seconds += self._seconds(node)
            queue += self.plan.sources(node)
        return seconds

    def lines(self) -> list[str]:
        """What is given up and at what price, by module and operator, the most bytes first."""
        groups: dict[tuple[str, str, str, str], list[fx.Node]] = defaultdict(list)
        for root in (*self.dropped, *self.gone):
            found = provenance(root)
            path = re.sub(r"(?<![^.])\d+(?![^.])", "*", found.path if found else "")
            name = name_of(self.plan.operator(root).target)
            groups["recomputed" if root in self.dropped else "offloaded", path, name, type_of(root)].append(root)
        rows = []
        for (action, path, name, kind), roots in groups.items():
            size, price = sum(map(tensor_bytes, roots)), sum(self.prices.get(root, 0.0) for root in roots)
            rows.append(
                (
                    -size,
                    f"{action}: {len(roots)} x {kind} of {name} in {path or 'the model'}, "
                    f"{size / 2**20:.1f} MiB, {price * 1e3:.2f} ms",
                )
            )
        rows.sort()
        rest = rows[_SHOWN:]
        more = [f"and {-sum(size for size, _ in rest) / 2**20:.1f} MiB of {len(rest)} other kinds"] if rest else []
        return [line for _, line in rows[:_SHOWN]] + more

    def rewrite(self) -> None:
        """Change the graph."""
        again = self.dropped | {n for n in self.again if n not in self.needs} if self.dropped else set()
        self.intervals()
        offload.rewrite(self.plan, self.routes, again)
