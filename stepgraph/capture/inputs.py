"""The inputs of a graph as they are collected: what each is bound to, and the fake tensor that it is traced with."""

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.capture.optimizer import Update
from stepgraph.capture.state import Slot, Wrapping, unwrap
from stepgraph.graph.step_graph import InputSpec


class Inputs:
    """The inputs of one graph. ``specs``: what they are bound to. ``fakes``: what they are traced with. ``home``: the
    device that tensors on the meta device count as being on."""

    def __init__(self, mode: compat.FakeTensorMode, home: torch.device) -> None:
        self.mode, self.home = mode, home
        self.specs: list[InputSpec] = []
        self.fakes: list[torch.Tensor] = []

    def add(self, kind: str, name: str, tensor: torch.Tensor) -> tuple[slice, Wrapping | None]:
        """Add the local tensors inside ``tensor``: (where they are, how to wrap them again)."""
        inner, wrapping = unwrap(tensor.detach())
        start = len(self.specs)
        for i, t in enumerate(inner):
            live = None if kind == "batch" else t
            self.specs.append(InputSpec(kind, name if len(inner) == 1 else f"{name}#{i}", live))
            self.fakes.append(fake(self.mode, t, self.home))
        return slice(start, len(self.specs)), wrapping

    def add_slots(self, slots: Sequence[Slot]) -> list[tuple[slice, Wrapping | None]]:
        """Add parameters and buffers."""
        return [self.add("parameter" if s.is_parameter else "buffer", s.name, s.tensor) for s in slots]

    def add_before(self, where: slice) -> slice:
        """Add what the inputs at ``where``, tensors of the model, were before the step."""
        start = len(self.specs)
        for spec, now in zip(self.specs[where], self.fakes[where], strict=True):
            with self.mode:
                like = torch.empty_strided(now.shape, now.stride(), dtype=now.dtype, device=now.device)
            self.specs.append(InputSpec("before", spec.name))
            self.fakes.append(like)
        return slice(start, len(self.specs))

    def add_level(self, name: str) -> int:
        """Add the highest level of the condition ``name``, an fp64 scalar, on the device of the first input."""
        with self.mode:
            self.fakes.append(torch.empty((), dtype=torch.float64, device=self.fakes[0].device))
        self.specs.append(InputSpec("level", name))
        return len(self.specs) - 1

    def add_accumulator(self, name: str, param: torch.Tensor) -> int:
        """Add the sum of the gradients of ``param``, a local fake tensor; where it is."""
        with self.mode, torch.no_grad():
            like = gradients.as_accumulated(torch.empty(param.shape, dtype=param.dtype, device=param.device), param)
        self.specs.append(InputSpec("accumulator", name))
        self.fakes.append(like)
        return len(self.specs) - 1


def add_optimizer(
    update: Update, slots: Sequence[Slot], inputs: Inputs, entries: Sequence[tuple[slice, Wrapping | None]]
) -> list[dict[str, Any]]:
    """Add the optimizer's state and learning rates to the inputs; per group, what `Update.record` needs."""
    index_of = {id(slot.tensor): i for i, slot in enumerate(slots)}
    groups = [{"options": g, "members": [], "paths": {}, "lr": None} for g in update.groups]
    for group_index, param in update.owned():
        if id(param) not in index_of or not param.requires_grad:  # the loss does not reach it, or it is frozen
            continue
        group = groups[group_index]
        state = update.init_state(param, group_index)
        i = index_of[id(param)]
        where = {key: inputs.add("optimizer", f"{slots[i].name}.{key}", state[key])[0] for key in state}
        # A step count on the host: parameters may differ in it.
        count = 0.0 if group["options"].get("fused") or "step" not in state else float(state["step"])
        group["members"].append((i, entries[i][0], where, count))
        group["paths"][i] = slots[i].path
    for group_index, group in enumerate(groups):
        if group["members"]:
            first = inputs.specs[group["members"][0][1]][0].tensor
            group["lr"], _ = inputs.add("lr", f"lr.{group_index}", update.lr_input(group_index, first.device))
    return groups


def fake(mode: compat.FakeTensorMode, tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
    if isinstance(tensor, compat.FakeTensor):
        return tensor.detach()
    if tensor.device.type == "meta":
        with mode:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=home)
    return mode.from_tensor(tensor, static_shapes=True)
