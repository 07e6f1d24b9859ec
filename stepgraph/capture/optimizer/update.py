"""Puts the optimizers into the graph, with their state and learning rates as inputs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stepgraph import compat
from stepgraph.capture.optimizer import host_state as host
from stepgraph.capture.optimizer.adafactor import AdafactorRule
from stepgraph.capture.optimizer.adam import AdamRule
from stepgraph.capture.optimizer.host import Host
from stepgraph.capture.optimizer.master import MasterAdamW
from stepgraph.capture.optimizer.own_run import Run, run_step
from stepgraph.capture.optimizer.own_step import OwnStep, StandIn, as_held
from stepgraph.capture.optimizer.prepare import Fresh, prepare
from stepgraph.capture.optimizer.rule import Member, Rule
from stepgraph.capture.optimizer.sgd import SGDRule
from stepgraph.capture.optimizer.skip import Skip
from stepgraph.capture.state import Slot
from stepgraph.graph.host_copies import on_host
from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import OptimizerState

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
        self,
        optimizers: Optimizers,
        shapes: Mapping[int, Sequence[int]] | None = None,
        room: float = math.inf,
    ):
        self.room, self._has_room = room, room == math.inf
        self.optimizers = tuple(optimizers) if isinstance(optimizers, list | tuple) else (optimizers,)
        if not self.optimizers:
            raise ValueError("the list of optimizers is empty; give None to step the model yourself")
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
                        f"{type(optimizer).__name__}; give it to one of them"
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
        """Whether the graph reads the learning rate of a group as it is; an optimizer's own ``step`` may compute with
        it first."""
        return self._groups()[group][0] not in self.own

    def prepare(self, slots: Mapping[int, Any], mode: compat.FakeTensorMode, home: torch.device) -> None:
        """Make the missing state of optimizers that are traced by their own ``step``. ``slots``: of the model, by the
        ids of their tensors."""
        for own in self.own.values():
            groups = []
            for group in own.optimizer.param_groups:
                params = [p for p in self.present(group["params"]) if p.requires_grad and id(p) in slots]
                with torch.no_grad():
                    groups.append([(p, _local(p, mode, home), slots[id(p)].path) for p in params])
            self._fresh[own.optimizer] = prepare(own, groups, mode)

    def code(self) -> dict[str, Any]:
        """What runs in a step of optimizers that are traced by their own ``step``, by what to call it."""
        return {name: part for own in self.own.values() for name, part in own.code().items()}

    def without_state(self) -> list[torch.Tensor]:
        """The parameters that have no state yet."""
        return [p for optimizer, g in self._groups() for p in g["params"] if not optimizer.state.get(p)]

    def drop_state(self, params: Iterable[torch.Tensor]) -> None:
        """Forget the state of ``params``."""
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
