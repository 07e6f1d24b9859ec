"""The state that an optimizer's own ``step`` makes in its first step, made before that step.

A first trace of ``step`` alone notes what it puts into ``optimizer.state``: what follows from shapes, parameters and
options alone can be made before. A second trace, with that state, must give the same operators: only then is the
first step a step like all others. An optimizer that fills its momentum with the first gradient, say, gets a graph for
its first step, which gives its state.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.batch_reads import reads_shape
from stepgraph.capture.optimizer.own_run import Run, run_step
from stepgraph.capture.optimizer.own_step import Again, OwnStep, StandIn, as_held, parts_of
from stepgraph.capture.optimizer.spread import momentum_alone
from stepgraph.capture.optimizer.tape import is_number, wrapped
from stepgraph.capture.state import unwrap, wrap
from stepgraph.errors import CaptureError

Tensor = torch.Tensor
#: For each parameter of each group: the parameter, its local stand-in, the path of its module.
Groups = Sequence[Sequence[tuple[Tensor, Tensor, str]]]
#: Traces that may begin again, each with one more thing learned.
_MOST = 100


class Made:
    """State that ``step`` makes in a trace. ``by_param``: for each parameter, by key what makes the value. ``nodes``:
    that make it in the graph. ``is_early``: whether all of it can be made before the step. ``takes_numbers``: whether
    options are read for it."""

    def __init__(self, live_of: Mapping[fx.Node, Tensor]):
        self.by_param: defaultdict[Tensor, dict[str, Callable[[], Any]]] = defaultdict(dict)
        self.nodes: set[fx.Node] = set()
        self.is_early, self.takes_numbers = True, False
        self._live_of = live_of

    def __call__(self, run: Run, member: StandIn, key: str, value: Any) -> Any:
        """See `stepgraph.capture.optimizer.own_run.Early`."""
        entries, made = run.tape.entries, self.by_param[member.live]
        no_place = dict, key
        if is_number(value) or type(value) in (int, float):
            start = value.node.number.value if is_number(value) else value
            made[key] = lambda: start
            return wrapped(run.tape, run.count(f"state.{key}", start, no_place))
        if not isinstance(value, Tensor):
            made[key] = lambda: copy.deepcopy(value)
            self.is_early = self.is_early and not isinstance(value, dict | list | tuple)  # it may be filled later
            return value
        is_scalar = member.tensor.ndim == 0
        if (place := run.mode.place_of(value)) is not None:
            with compat.without_modes():
                start = entries[place].value.clone()
            made[key] = start.clone
            if run.own.learned.on_tape.setdefault((key, is_scalar), True) is False:  # later written from the graph
                del run.mode.places[compat.storage_key(value)]
                run.give_input(f"state {id(member.live)} {key}", value)
                return value
            return run.stand_for(run.count(f"state.{key}", start, no_place), value)
        if value.ndim == 0 and value.device.type == "cpu":
            run.own.learned.on_tape[key, is_scalar] = False
        parts, wrapping = unwrap(value)
        histories = [self._history(run, compat.node_of_trace(part), member) for part in parts]
        if None in histories:
            self.is_early = False
            return value
        self.nodes |= {node for nodes in histories for node, live in nodes.items() if live is None}
        made[key] = lambda: wrap([_computed(nodes) for nodes in histories], wrapping)
        for name, part in _named(key, parts):
            run.give_input(f"state {id(member.live)} {name}", part)
        return value

    def _history(self, run: Run, node: fx.Node | None, member: StandIn) -> dict[fx.Node, Tensor | None] | None:
        """The nodes that make a value from parameters of before the step, in order, those of parameters with these;
        None if it depends on more."""
        found: dict[fx.Node, Tensor | None] = {}
        pending: list[tuple[fx.Node | None, bool]] = [(node, True)]
        while pending:
            node, reads = pending.pop()
            value = node.meta.get("val") if node is not None else None
            if not isinstance(value, Tensor) or (reads and compat.storage_key(value) in run.mode.written):
                return None
            live = self._live_of.get(node)
            if live is None and node.op == "placeholder" and reads:
                live = next((t for t, made in run.numbers() if compat.node_of_trace(made) is node), None)
                self.takes_numbers = self.takes_numbers or live is not None
            if live is None and not reads and (value.shape, value.dtype) == (member.tensor.shape, member.tensor.dtype):
                live = member.live  # the gradient, say, of which only the shape counts
            found[node] = live
            if live is None:
                target = node.target
                if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
                    return None
                if torch.Tag.nondeterministic_seeded in target.tags:
                    return None
                pending += [(source, not reads_shape(node)) for source in node.all_input_nodes]
        return {node: found[node] for node in sorted(found)}


def _named(key: str, parts: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The plain tensors inside a tensor of the state, by name."""
    return [(key if len(parts) == 1 else f"{key}#{i}", part) for i, part in enumerate(parts)]


def _computed(nodes: Mapping[fx.Node, Tensor | None]) -> Tensor:
    """The value of the last node; for a parameter, its local tensor."""
    env: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node, live in nodes.items():
            if live is not None:
                env[node] = live
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
        return env[node] if live is None else env[node].detach().clone()


def prepare(own: OwnStep, groups: Groups, mode: compat.FakeTensorMode) -> "Fresh | None":
    """Make the state that the first step of ``own`` makes, where that can be done before it; None where nothing is
    made. Raises CaptureError where ``step`` cannot be traced."""
    state = own.optimizer.state
    if all(state.get(live) for group in groups for live, _, _ in group):
        if not own.learned.is_tried:
            _tried(own, groups, mode, False)
        return None
    first, made = _tried(own, groups, mode, True)
    if not made.is_early or not made.by_param:
        return None
    fresh = Fresh(own, made)
    later, _ = _tried(own, groups, mode, False)
    if first != later:
        fresh.drop()
        return None
    return fresh


class Fresh:
    """State that was made before the first step. That may come much later: parameters are loaded in between, and
    learning rates set."""

    def __init__(self, own: OwnStep, made: Made):
        self._own, self._made = own, made
        self._rates = self._look()
        self._entries = [(live, {k: make() for k, make in by.items()}) for live, by in made.by_param.items()]
        for live, found in self._entries:
            own.optimizer.state[live].update(found)
        self._versions = {id(v): v._version for _, by in self._entries for v in by.values() if isinstance(v, Tensor)}

    def _look(self) -> list:
        return [float(group.get("lr", 0)) for group in self._own.optimizer.param_groups]

    def drop(self, params: Container[int] | None = None) -> None:
        """Remove it; of those of ``params``, ids of parameters."""
        for live, _ in self._entries:
            if params is None or id(live) in params:
                self._own.optimizer.state.pop(live, None)

    def settle(self) -> bool:
        """Make tensors again from the current parameters, right before the first step. Where a learning rate that they
        are made of has changed, they are removed: False."""
        state = self._own.optimizer.state
        entries = [(live, key, value) for live, by in self._entries for key, value in by.items()]
        entries = [(live, k, v) for live, k, v in entries if state.get(live, {}).get(k) is v and isinstance(v, Tensor)]
        untouched = [(live, k, v) for live, k, v in entries if self._versions[id(v)] == v._version]
        if self._made.takes_numbers and untouched and self._look() != self._rates:
            self.drop()
            return False
        with torch.no_grad():
            for live, key, value in untouched:
                value.copy_(self._made.by_param[live][key]())
        self._versions = {id(value): value._version for _, _, value in untouched}
        return True


def _tried(own: OwnStep, groups: Groups, mode: compat.FakeTensorMode, makes: bool) -> tuple[list[str], Made]:
    """The operators of one trace of ``step`` alone, as text; and the state that it made."""
    for _ in range(_MOST):
        with contextlib.suppress(Again):
            found = _Alone(own, groups, mode, makes).text()
            own.learned.is_tried = True
            return found
    raise CaptureError(f"{own.name}.step shows something else in each trace, and cannot be captured")


class _Alone:
    """A trace of ``step`` alone."""

    def __init__(self, own: OwnStep, groups: Groups, mode: compat.FakeTensorMode, makes: bool):
        self.own, self.groups, self.mode, self.makes = own, groups, mode, makes
        self.state = {live: own.state_tensors(live) for group in groups for live, _, _ in group}
        self.labels: dict[fx.Node, str] = {}

    def text(self) -> tuple[list[str], Made]:
        names, forms = [], []
        for live, tensor, _ in (member for group in self.groups for member in group):
            state = [(f"state {id(live)} {n}", part) for key, value in self.state[live].items()
                     for n, part in _named(key, parts_of(value))]  # fmt: skip
            names += [f"param {id(live)}", f"grad {id(live)}", *(name for name, _ in state)]
            forms += [tensor, tensor, *(part for _, part in state)]
        with torch.no_grad(), self.mode:
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in forms]
        found: list[Any] = []

        def traced(*flat: Tensor) -> list[Tensor]:
            self.labels = dict(zip(compat.graph_of_trace().find_nodes(op="placeholder"), names, strict=True))
            found.extend(self._run(iter(flat)))
            return []

        with torch.no_grad(), self.mode, compat.trace_context(self.mode), compat.inline_compiled():
            module = compat.trace(traced, fakes)
        run, made = found
        return self._lines(module.graph, run, made.nodes), made

    def _run(self, flat: Any) -> tuple[Run, Made]:
        groups, live_of = [], {}
        for group in self.groups:
            groups.append([])
            for live, _, path in group:
                param, grad = next(flat).requires_grad_(), next(flat)
                live_of[compat.node_of_trace(param)] = live
                state = {key: as_held(value, [next(flat) for _ in parts_of(value)])
                         for key, value in self.state[live].items()}  # fmt: skip
                groups[-1].append(StandIn(live, param, grad, state, path))
        made = Made(live_of)
        early = made if self.makes else None
        return run_step(self.own, groups, self._give_input, lambda _: None, self.mode, early, momentum_alone), made

    def _give_input(self, name: str, tensor: Tensor) -> Tensor:
        if not compat.is_fake(tensor):
            with compat.without_modes():
                tensor = self.mode.from_tensor(tensor)
        self.labels[compat.input_of_trace(tensor, "host")] = name
        return tensor

    def _lines(self, graph: fx.Graph, run: Run, without: set[fx.Node]) -> list[str]:
        """The operators of a graph, by what they compute with and not by names; what is decided and written."""
        names, lines = dict(self.labels), []
        for node in graph.nodes:
            if node.op in ("placeholder", "output") or (node in without and node.users.keys() <= without):
                continue
            names[node] = f"%{len(lines)}"
            args = fx.map_arg((node.args, node.kwargs), lambda n: names[n])
            lines.append(f"{node.target}{args}")
        entries = run.tape.entries
        lines += [f"{entry.key}={entry.expected!r}" for entry in entries if entry.is_decision]
        writes = run.host.writes.items()
        return lines + sorted(f"{key} {entries[place].key}" for place, places in writes for _, key in places)
