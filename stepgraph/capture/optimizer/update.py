"""Puts the optimizers into the graph, with their state and learning rates as inputs.

It also makes the state that an optimizer's own ``step`` would make in its first step, before that step.

A first trace of ``step`` alone notes what it puts into ``optimizer.state``: what follows from shapes, parameters and
options alone can be made before. A second trace, with that state, must give the same operators: only then is the
first step a step like all others. An optimizer that fills its momentum with the first gradient, say, gets a graph for
its first step, which gives its state.
"""

import contextlib
import copy
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.batch_reads import reads_shape
from stepgraph.capture.optimizer import host_state as host
from stepgraph.capture.optimizer.host import Host
from stepgraph.capture.optimizer.own_run import Run, run_step
from stepgraph.capture.optimizer.own_step import Again, OwnStep, StandIn, as_held, parts_of
from stepgraph.capture.optimizer.rule import AdafactorRule, AdamRule, MasterAdamW, Member, Rule, SGDRule, Skip
from stepgraph.capture.optimizer.spread import momentum_alone
from stepgraph.capture.optimizer.tape import is_number, wrapped
from stepgraph.capture.state import Slot, unwrap, wrap
from stepgraph.errors import CaptureError
from stepgraph.graph.facts import is_pure
from stepgraph.graph.host_copies import on_host
from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import OptimizerState

Tensor = torch.Tensor
#: For each parameter of each group: the parameter, its local stand-in, the path of its module.
Groups = Sequence[Sequence[tuple[Tensor, Tensor, str]]]
#: Traces that may begin again, each with one more thing learned.
_MOST = 100


class Made:
    """State that ``step`` makes in a trace. ``by_param``: by key what makes each parameter's. ``nodes``: that make it.
    ``is_early``: whether all of it can be made before the step. ``takes_numbers``: it reads options."""

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
            return run.make_stand_in(run.count(f"state.{key}", start, no_place), value)
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
        """The nodes that make a value from parameters of before the step, in order; None if it depends on more."""
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
    """State that was made before the first step. That may come much later: what it is made of may change."""

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
    raise CaptureError(f"{own.name}.step differs from one trace to the next, and cannot be captured")


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
        names, lines, unread = dict(self.labels), [], set[fx.Node]()
        for node in reversed(graph.nodes):  # torch 2.15 also leaves the number that a step count starts as
            if (node in without or is_pure(node)) and node.users.keys() <= unread:
                unread.add(node)
        for node in graph.nodes:
            if node.op in ("placeholder", "output") or node in unread:
                continue
            names[node] = f"%{len(lines)}"
            args = fx.map_arg((node.args, node.kwargs), lambda n: names[n])
            lines.append(f"{node.target}{args}")
        entries = run.tape.entries
        lines += [f"{entry.key}={entry.expected!r}" for entry in entries if entry.is_decision]
        writes = run.host.writes.items()
        return lines + sorted(f"{key} {entries[place].key}" for place, places in writes for _, key in places)


_RULES: dict[type, Rule] = {
    torch.optim.AdamW: AdamRule(),
    MasterAdamW: AdamRule(),
    torch.optim.Adam: AdamRule(),
    torch.optim.SGD: SGDRule(),
    torch.optim.Adafactor: AdafactorRule(),
}

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Update:
    """One update by one or several optimizers that share no parameter. ``groups``: the parameter groups of all, in
    order, by whose place in this list learning rates are named. ``shapes``: see `OwnStep`. ``room``: bytes of state
    that may be on the GPU while the step is traced; what is beyond goes to page-locked host memory."""

    def __init__(
        self, optimizers: Optimizers, shapes: Mapping[int, Sequence[int]] | None = None, room: float = math.inf
    ):
        self.room, self._has_room = room, room == math.inf
        self.optimizers = tuple(optimizers) if isinstance(optimizers, list | tuple) else (optimizers,)
        if not self.optimizers:
            raise ValueError("the list of optimizers is empty; pass None to step the model yourself")
        for optimizer in self.optimizers:
            if (rule := _rule_of(optimizer)) is not None:
                rule.check(optimizer)
        self.own = {one: OwnStep(one, shapes or {}) for one in self.optimizers if _rule_of(one) is None}
        self._steps = list(map(_class_and_step, self.optimizers))
        self.check_hooks()
        #: What calls of the traced step do on the host.
        self.hosts: list[Host] = []
        #: Tensors of state that the traced step makes.
        self.created: list[torch.Tensor] = []
        self._fresh: dict[torch.optim.Optimizer, Fresh | None] = {}
        owners: dict[int, str] = {}
        for optimizer, group in self._groups():
            for param in group["params"]:
                if id(param) in owners:
                    raise ValueError(
                        f"a parameter of shape {list(param.shape)} is in {owners[id(param)]} and in "
                        f"{type(optimizer).__name__}; pass it to one of them"
                    )
                owners[id(param)] = type(optimizer).__name__

    def check_hooks(self) -> None:
        """Raise if the user hooked code to an optimizer's step, or replaced it."""
        if any(map(compat.has_step_hooks, self.optimizers)):
            raise ValueError("the optimizer has step hooks, which a captured step would not run; remove them")
        if any(map(compat.step_replaced, self.optimizers)):
            raise ValueError(
                "step was replaced on the optimizer object, which a captured step would not run; write a subclass of "
                "the optimizer, or remove it"
            )
        if list(map(_class_and_step, self.optimizers)) != self._steps:
            raise ValueError(
                "the optimizer's class, or its step, was replaced after the capture: capture the step again"
            )

    def check_gradients(self) -> None:
        """Raise if a parameter holds a gradient already: eager's update would take it too."""
        for _, param in self.owned():
            if param.grad is not None:
                raise ValueError(
                    f"a parameter of shape {list(param.shape)} holds a gradient from outside the step, which the "
                    "update in the graph would leave out; call optimizer.zero_grad() before the step"
                )

    def _groups(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        return [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for _, group in self._groups()]

    def present(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of ``params`` that are updated here, see `owned`."""
        here = {id(param) for _, param in self.owned()}
        return [param for param in params if id(param) in here]

    def owned(self) -> list[tuple[int, torch.Tensor]]:
        """(group index, parameter) of every parameter that is updated: not of those on the meta device, which other
        ranks of a pipeline hold, unless all are, as in a forecast."""
        given = [(i, param) for i, group in enumerate(self.groups) for param in group["params"]]
        return [(i, param) for i, param in given if not param.is_meta] or given

    def init_state(self, param: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
        """What the graph reads and writes of the state of ``param``, by key; created as in eager's first step."""
        optimizer, options = self._groups()[group]
        own = self.own.get(optimizer)
        found = None if own else _RULES[type(optimizer)].init_state(optimizer, param, options)
        if not self._has_room:
            host.require_room(optimizer, param, (p for _, p in self.owned()), self.room)
            self._has_room = True
        if self.room < math.inf:
            self.room -= host.device_bytes(optimizer, param)
            if self.room < 0:
                host.place(optimizer, param, on_host=True)
        return own.state_tensors(param) if own else {key: optimizer.state[param][key] for key in found}

    def settle(self, program: StepProgram, slots: Iterable[Slot]) -> None:
        """Move state to where the graphs of ``program`` have it, on the host or on its parameter's GPU, and bind their
        inputs to it. ``slots``: of the model."""
        tensors = {slot.name: slot.tensor for slot in slots}
        away = {
            what.parameter
            for step in program.graphs.values()
            for node, what in step.bound()
            if isinstance(what, OptimizerState) and on_host(node)
        }
        held = {param: one for one in self.optimizers for param in one.state}
        for step in program.graphs.values():
            for i, spec in enumerate(step.inputs):
                if not isinstance(spec.what, OptimizerState) or spec.what.part is not None:
                    continue
                param = tensors[spec.what.parameter]
                optimizer = held[param]
                host.place(optimizer, param, spec.what.parameter in away)
                value = optimizer.state[param].get(spec.what.key)
                if isinstance(value, torch.Tensor) and host.stays(value, param):
                    step.inputs[i] = replace(spec, tensor=host.local(value))

    def has_lr_input(self, group: int) -> bool:
        """Whether the graph reads the learning rate of a group as it is: an own ``step`` may compute with it."""
        return self._groups()[group][0] not in self.own

    def prepare(self, slots: Mapping[int, Any], mode: compat.FakeTensorMode, home: torch.device) -> None:
        """Make the missing state of optimizers that are traced by their own ``step``. ``slots``: by tensors' ids."""
        for own in self.own.values():
            groups = []
            for group in own.optimizer.param_groups:
                params = [p for p in self.present(group["params"]) if p.requires_grad and id(p) in slots]
                with torch.no_grad():
                    groups.append([(p, _local(p, mode, home), slots[id(p)].path) for p in params])
            self._fresh[own.optimizer] = prepare(own, groups, mode)

    def code(self) -> dict[str, Any]:
        """Objects that a traced optimizer's ``step`` runs, by name."""
        return {name: part for own in self.own.values() for name, part in own.code().items()}

    def without_state(self) -> list[torch.Tensor]:
        return [p for optimizer, g in self._groups() for p in g["params"] if not optimizer.state.get(p)]

    def drop_state(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            for optimizer in self.optimizers:
                optimizer.state.pop(param, None)

    def lr_input(self, group: int, device: torch.device) -> torch.Tensor:
        """The tensor through which the graph reads a group's learning rate.

        The CUDA fused kernels read an fp32 tensor; everything else takes fp64, so that a Python float keeps its value.
        """
        fused = self.groups[group].get("fused")
        dtype = torch.float32 if fused and device.type == "cuda" else torch.float64
        return torch.zeros((), dtype=dtype, device=device)

    def constants(self) -> tuple:
        """The options that are constants of the graph: when one changes, the step is captured again."""
        rules = ((_rule_of(optimizer), group) for optimizer, group in self._groups())
        return tuple((rule and rule.constants_of(group), len(group["params"])) for rule, group in rules)

    def record(
        self,
        groups: Sequence[dict[str, Any]],
        grads: dict[int, torch.Tensor],
        flat: Sequence[torch.Tensor],
        attribute: Callable[[str], None],
        skip: Skip,
        give_input: Callable[[torch.Tensor], torch.Tensor],
        mode: compat.FakeTensorMode,
    ) -> set[int]:
        """Record the update of every parameter that has a gradient; the slots updated.

        ``groups``: see `stepgraph.capture.inputs.add_optimizer`. ``flat``: the graph's inputs. ``attribute`` and
        ``skip``: see `Rule.trace`. ``give_input``: makes a live scalar tensor an input of the graph.
        """
        updated: set[int] = set()
        for own in self.own.values():
            trace = partial(run_step, own, give_input=lambda _, live: give_input(live), attribute=attribute, mode=mode)
            updated |= self._record_own(own, groups, grads, flat, skip, trace)
        for (optimizer, options), group in zip(self._groups(), groups, strict=True):
            if optimizer in self.own:
                continue
            members = [m for m in group["members"] if m[0] in grads]
            if not members:
                continue
            traced = []
            for i, part, wheres, seen in members:
                state = {key: flat[where][0] for key, where in wheres.items()}
                traced.append(Member(flat[part][0], grads[i], state, seen, group["paths"][i]))
            _RULES[type(optimizer)].trace(options, traced, flat[group["lr"]][0], attribute, skip)
            updated |= {i for i, _, _, _ in members}
        return updated

    def _record_own(
        self,
        own: OwnStep,
        groups: Sequence[dict[str, Any]],
        grads: dict[int, torch.Tensor],
        flat: Sequence[torch.Tensor],
        skip: Skip,
        trace: Callable[[Sequence[Sequence[StandIn]]], Run],
    ) -> set[int]:
        """Record the update of an optimizer by its own ``step``; the slots updated."""
        stand_ins, kept, updated = [], [], set()

        def stand_in(place: int) -> torch.Tensor:
            """What ``step`` writes: where the update may be left out, a copy."""
            if skip.flag is None:
                return flat[place]
            kept.append((flat[place], flat[place].clone()))
            return kept[-1][1]

        fresh = self._fresh.get(own.optimizer)
        if fresh is not None:  # eager makes no state where there is no gradient
            fresh.drop({id(live) for group in groups for i, live in group["live"].items() if i not in grads})
        for (optimizer, options), group in zip(self._groups(), groups, strict=True):
            if optimizer is not own.optimizer:
                continue
            known = {id(group["live"][i]): (i, part, wheres) for i, part, wheres, _ in group["members"]}
            stand_ins.append([])
            for param in self.present(options["params"]):
                if id(param) not in known:
                    continue
                i, part, wheres = known[id(param)]
                held = own.state_tensors(param)
                state = {
                    key: as_held(held[key], [stand_in(n) for n in range(where.start, where.stop)])
                    for key, where in wheres.items() if key in held
                }  # fmt: skip
                made = stand_in(part.start).requires_grad_()
                stand_ins[-1].append(StandIn(param, made, grads.get(i), state, group["paths"][i]))
                updated |= {i} & grads.keys()
        run = trace(stand_ins)
        for old, new in kept:
            skip.write(old, new)
        run.host.settle = fresh and fresh.settle
        self.hosts.append(run.host)
        self.created += run.created
        return updated

    def mark_stepped(self) -> None:
        """Tell learning rate schedulers that the optimizers have stepped."""
        for optimizer in self.optimizers:
            compat.mark_stepped(optimizer)


def _class_and_step(optimizer: torch.optim.Optimizer) -> tuple[type, Callable]:
    return type(optimizer), type(optimizer).step


def _rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The formula of an optimizer; None for one whose own ``step`` is traced."""
    rule = _RULES.get(type(optimizer))
    return rule if rule is not None and rule.knows(optimizer) else None


def _local(param: torch.Tensor, mode: compat.FakeTensorMode, home: torch.device) -> torch.Tensor:
    """A fake tensor of the form of this rank's part of ``param``."""
    part = param.to_local() if compat.is_traceable_wrapper_subclass(param) else param
    with mode:
        device = home if part.is_meta else part.device
        return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)
