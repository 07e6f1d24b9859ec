"""The state that a training step changes: read, kept on the host, and put back in place.

Captured steps and CUDA graphs write into fixed memory, so tensors get their values back where they lie, and modules
and optimizers hold the same objects as before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepgraph.capture.python.host_random import HostRandom
from stepgraph.capture.state import model_slots, unwrap
from stepgraph.run.bound import RandomState
from stepgraph.run.cuda_graph import spanned

#: What a tensor of the state is ("parameter", "buffer", "gradient", "optimizer", "batch"), and its name.
Key = tuple[str, str]


@dataclass
class State:
    """What a step reads and writes. ``leaves``: the batch's. ``generators``: the model's own."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    leaves: Sequence[Any]
    generators: Sequence[torch.Generator] = ()

    def tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """The live local tensors, detached, each once."""
        names = {}
        for slot in model_slots(self.model):
            names[id(slot.tensor)] = slot.name
            yield from _parts("parameter" if slot.is_parameter else "buffer", slot.name, slot.tensor)
            if slot.tensor.grad is not None:
                yield from _parts("gradient", slot.name, slot.tensor.grad)
        for optimizer in self.optimizers:
            for param, entries in optimizer.state.items():
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        yield from _parts("optimizer", f"{names.get(id(param), 'unknown')}.{key}", value)
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                yield from _parts("batch", f"batch.{i}", leaf)

    def read(self) -> dict[Key, torch.Tensor]:
        """Copies of all tensors, on the host."""
        return {key: tensor.to("cpu", copy=True) for key, tensor in self.tensors()}

    def holders(self) -> Iterator[dict]:
        """The dictionaries in which modules and optimizer hold things."""
        for module in self.model.modules():
            yield from (vars(module), module._parameters, module._buffers)
        for optimizer in self.optimizers:
            yield from (vars(optimizer), optimizer.state)
            yield from optimizer.state.values()
            yield from optimizer.param_groups

    def devices(self) -> set[torch.device]:
        """The CUDA devices of its tensors."""
        return {tensor.device for _, tensor in self.tensors() if tensor.device.type == "cuda"}

    def random(self) -> RandomState:
        """The states of torch's generators."""
        return RandomState(self.devices(), self.generators)


def _parts(kind: str, name: str, tensor: torch.Tensor) -> Iterator[tuple[Key, torch.Tensor]]:
    inner, _ = unwrap(tensor.detach())
    for i, part in enumerate(inner):
        yield (kind, name if len(inner) == 1 else f"{name}#{i}"), part


class Snapshot:
    """``state`` at one moment, with the random generators; `restore` puts all of it back."""

    def __init__(self, state: State):
        self._state = state
        self._values = [(tensor, spanned(tensor).to("cpu", copy=True)) for _, tensor in state.tensors()]
        self._holders = [(holder, dict(holder)) for holder in state.holders()]
        self._grads = [(param, param.grad) for param in state.model.parameters()]
        self._random = HostRandom(state.model), state.random()

    def restore(self) -> None:
        """Everything as it was: the same objects in the same places, with the same values."""
        for holder, before in self._holders:
            if holder.keys() != before.keys() or any(holder[key] is not before[key] for key in before):
                holder.clear()
                holder.update(before)
        for param, grad in self._grads:
            param.grad = grad
        with torch.no_grad():
            for tensor, saved in self._values:
                spanned(tensor).copy_(saved)
        for random in self._random:
            random.restore()
