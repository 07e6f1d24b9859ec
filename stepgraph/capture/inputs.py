"""The inputs of a graph while they are collected: each with its live tensor and its fake tensor."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from stepgraph import compat
from stepgraph.capture.optimizer import Update, host_state
from stepgraph.capture.state import Slot, Wrapping, unwrap
from stepgraph.graph.step_graph import InputSpec
from stepgraph.graph.values import Accumulator, BatchLeaf, Before, GroupValue, HostValue, Input, OptimizerState, Ratio


class Inputs:
    """The inputs of one graph. ``specs``: what they are bound to. ``fakes``: what they are traced with. ``home``: the
    device that tensors on the meta device count as being on."""

    def __init__(self, mode: compat.FakeTensorMode, home: torch.device) -> None:
        self.mode, self.home = mode, home
        self.specs: list[InputSpec] = []
        self.fakes: list[torch.Tensor] = []

    def add(
        self, what: Callable[[int | None], Input], tensor: torch.Tensor, device: torch.device | None = None
    ) -> tuple[slice, Wrapping | None]:
        """Add the local tensors inside ``tensor``: (where they are, how to wrap them again). ``what``: what each is, by
        its number, or by None where there is one. ``device``: that they are traced on; None: theirs."""
        # A wrapper is detached in its own class, slowly; what needs no gradient is taken out of it first.
        inner, wrapping = unwrap(compat.detached(tensor) if tensor.requires_grad else tensor)
        inner = inner if tensor.requires_grad else [compat.detached(one) for one in inner]
        start = len(self.specs)
        for i, t in enumerate(inner):
            found = what(None if len(inner) == 1 else i)
            self.specs.append(InputSpec(found, None if isinstance(found, BatchLeaf) else t))
            self.fakes.append(fake(self.mode, t, self.home) if device in (None, t.device) else self._like(t, device))
        return slice(start, len(self.specs)), wrapping

    def _like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        with compat.without_modes():
            return compat.empty_fake(self.mode, tensor.shape, tensor.stride(), tensor.dtype, device)

    def add_slots(self, slots: Sequence[Slot]) -> list[tuple[slice, Wrapping | None]]:
        """Add parameters and buffers."""
        return [self.add(slot.what, slot.tensor) for slot in slots]

    def add_before(self, where: slice) -> slice:
        """Add what the inputs at ``where``, tensors of the model, were before the step."""
        start = len(self.specs)
        for spec, now in zip(self.specs[where], self.fakes[where], strict=True):
            self.specs.append(InputSpec(Before(spec.what)))
            self.fakes.append(self._like(now, now.device))
        return slice(start, len(self.specs))

    def add_ratio(self, condition: str) -> int:
        """Add the highest ratio of ``condition``, an fp64 scalar, on the device of the first input; where it is."""
        with self.mode:
            self.fakes.append(torch.empty((), dtype=torch.float64, device=self.fakes[0].device))
        self.specs.append(InputSpec(Ratio(condition)))
        return len(self.specs) - 1

    def add_host(self, live: torch.Tensor) -> torch.Tensor:
        """Add a scalar that the host computes in every step, while the graph is traced; its stand-in."""
        with compat.without_modes():
            made = fake(self.mode, live, self.home)
        number = sum(isinstance(spec.what, HostValue) for spec in self.specs)
        compat.input_of_trace(made, f"host_{number}")
        self.specs.append(InputSpec(HostValue(number), live))
        return made

    def add_drawn(self, value: torch.Tensor, device: torch.device, place: int) -> torch.Tensor:
        """Add what the host draws, leaf number ``place`` of the batch, while the graph is traced; its stand-in, of one
        row for each microbatch. ``value``: an example of a row."""
        with compat.without_modes(), self.mode:
            made = torch.empty((1, *value.shape), dtype=value.dtype, device=device)
        compat.input_of_trace(made, f"batch_{place}")
        self.specs.append(InputSpec(BatchLeaf(place)))
        return made

    def add_accumulator(self, name: str, param: torch.Tensor) -> int:
        """Add the sum of the gradients of ``param``, a local fake tensor; where it is."""
        with self.mode, torch.no_grad():
            like = compat.as_accumulated(torch.empty(param.shape, dtype=param.dtype, device=param.device), param)
        self.specs.append(InputSpec(Accumulator(name)))
        self.fakes.append(like)
        return len(self.specs) - 1


def add_optimizer(
    update: Update, slots: Sequence[Slot], inputs: Inputs, entries: Sequence[tuple[slice, Wrapping | None]]
) -> list[dict[str, Any]]:
    """Add the optimizer's state and learning rates to the inputs; per group, what `Update.record` needs."""
    index_of = {id(slot.tensor): i for i, slot in enumerate(slots)}
    groups = [{"options": g, "members": [], "paths": {}, "live": {}, "lr": None} for g in update.groups]
    for group_index, param in update.owned():
        if id(param) not in index_of or not param.requires_grad:  # the loss does not reach it, or it is frozen
            continue
        group = groups[group_index]
        state = update.init_state(param, group_index)
        i = index_of[id(param)]
        where = {}
        for key, value in state.items():
            # State may be on the host; it is traced as if it were not.
            away = value.device != param.device and host_state.stays(value, param)
            device = inputs.fakes[entries[i][0]][0].device if away else None
            where[key], _ = inputs.add(partial(OptimizerState, slots[i].name, key), value, device)
        # A step count on the host: parameters may differ in it.
        fused = group["options"].get("fused") or not update.has_lr_input(group_index)
        count = 0.0 if fused or "step" not in state else float(state["step"])
        group["members"].append((i, entries[i][0], where, count))
        group["paths"][i] = slots[i].path
        group["live"][i] = param
    for group_index, group in enumerate(groups):
        if group["members"] and update.has_lr_input(group_index):
            first = inputs.specs[group["members"][0][1]][0].tensor
            lr = update.lr_input(group_index, first.device)
            group["lr"], _ = inputs.add(lambda _, n=group_index: GroupValue(n), lr)
    return groups


def fake(mode: compat.FakeTensorMode, tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
    """What ``tensor`` is traced with. ``home``: see `Inputs`."""
    if tensor.device.type == "meta":
        with compat.without_modes():
            return compat.empty_fake(mode, tensor.size(), tensor.stride(), tensor.dtype, home)
    if isinstance(tensor, compat.FakeTensor):
        return compat.detached(tensor)
    return mode.from_tensor(tensor, static_shapes=True)
