"""The state that a training step changes: read, kept on the host, restored in place, and compared after two runs.

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


#: Kinds of results, in the order of a report.
KINDS = ("loss", "metric", "gradient", "parameter", "buffer", "optimizer", "batch", "random state")


@dataclass(frozen=True)
class Difference:
    """One tensor that is not bitwise equal.

    ``kind``: one of `KINDS`. ``largest``: of all elements, the largest absolute difference; ``relative``: the same as
    a part of the largest magnitude in eager's tensor. ``elements``: how many differ, of ``size``.
    """

    kind: str
    name: str
    largest: float
    relative: float
    elements: int
    size: int

    def __str__(self) -> str:
        return (
            f"{self.name} by {self.largest:.2g} ({self.relative:.1g} of its largest value), in {self.elements:,} of "
            f"{self.size:,} elements"
        )


@dataclass(frozen=True)
class VerifyReport:
    """A captured step compared with eager, from one state.

    ``loss``: eager's and the captured step's. ``compared``: number of tensors of each kind. ``differences``: what is
    not bitwise equal. ``tolerance``: how far the loss and the gradient norm may be off, as a part of eager's, when
    passes round differently. ``repeats``: whether two eager runs give the same bits here; where they do not, no step
    can equal them. ``parted``: the first difference, if requested and found.
    """

    loss: tuple[float, float]
    compared: dict[str, int]
    differences: tuple[Difference, ...]
    tolerance: float
    repeats: bool = True
    parted: str | None = None

    @property
    def bitwise(self) -> bool:
        """Whether everything is equal bit for bit."""
        return not self.differences

    @property
    def largest(self) -> Difference | None:
        """The largest difference, measured by the magnitude of its tensor; None if all is bitwise equal."""
        return max(self.differences, key=lambda found: found.relative, default=None)

    @property
    def close(self) -> bool:
        """Whether loss and metrics agree within ``tolerance``.

        It ignores state: AdamW divides gradients by their size, so one near zero may move its parameter
        by the whole learning rate in either direction.
        """
        return all(found.relative <= self.tolerance for found in self.differences if found.kind in ("loss", "metric"))

    def __str__(self) -> str:
        compared = ", ".join(f"{n} {_plural(kind, n)}" for kind, n in self.compared.items() if n and kind != "loss")
        if self.bitwise:
            return f"verify: bitwise equal to eager: loss {self.loss[0]:.6g}, {compared}"
        verdict = "loss and metrics within" if self.close else "LOSS OR METRICS BEYOND"
        lines = [
            f"verify: not bitwise equal to eager; {verdict} a relative {self.tolerance:.1g}",
            f"  loss: {self.loss[0]:.8g} eager, {self.loss[1]:.8g} captured",
        ]
        for kind in KINDS[1:]:
            found = [difference for difference in self.differences if difference.kind == kind]
            if found:
                worst = max(found, key=lambda difference: difference.relative)
                lines.append(f"  {kind}: {len(found)} of {self.compared[kind]} differ; the largest: {worst}")
        if not self.repeats:
            lines.append("  eager does not reproduce itself here: see torch.use_deterministic_algorithms")
        if self.parted:
            lines.append(f"  {self.parted}")
        return "\n".join(lines)


def _plural(kind: str, n: int) -> str:
    what = f"tensor{'s' * (n != 1)} of the {kind}"
    return what if kind in ("batch", "optimizer") else kind + "s" * (n != 1)


def differences(eager: dict[Key, torch.Tensor], captured: dict[Key, torch.Tensor]) -> list[Difference]:
    """What differs between two outcomes: tensors on the host, by kind and name."""
    found = []
    for key in sorted(eager.keys() | captured.keys(), key=lambda key: KINDS.index(key[0])):
        a, b = eager.get(key), captured.get(key)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            size = (a if a is not None else b).numel()
            found.append(Difference(*key, float("inf"), float("inf"), size, size))
        elif not _same_bits(a, b):
            found.append(_difference(key, a, b))
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, ``(elements, bytes)`` uint8."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).view(tensor.numel(), -1)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.numel() or torch.equal(_bits(a), _bits(b))


def _difference(key: Key, a: torch.Tensor, b: torch.Tensor) -> Difference:
    elements = int((_bits(a) != _bits(b)).any(1).sum())
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    distance = (a - b).abs()
    same = (a == b) | (a.isnan() & b.isnan())  # infinities of one sign; zeros of two signs differ only in bits
    largest = float(distance.masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf")).max())
    magnitude = float(a.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    relative = largest / magnitude if magnitude else (float("inf") if largest else 0.0)
    return Difference(*key, largest, relative, elements, a.numel())
