"""A captured step bound to the live tensors that it reads and writes."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from stepgraph.capture import Traced, gradients
from stepgraph.capture.guard import Grow
from stepgraph.capture.optimizer import Update
from stepgraph.capture.python.host_random import HostRandom
from stepgraph.capture.python.metrics import means
from stepgraph.capture.state import Watch
from stepgraph.graph.values import GroupValue
from stepgraph.kernels.comm.exchange import Session
from stepgraph.run.memory import Memory
from stepgraph.run.program import ProgramRunner


class ExceededError(RuntimeError):
    """A step whose update its graph left out, to be repeated. ``ratios``: of the conditions that were above 1."""

    def __init__(self, ratios: dict[str, float], grow: dict[str, Grow]):
        super().__init__(f"the step exceeds what it has room for: {ratios}")
        self.ratios, self._grow = ratios, grow

    def grow(self) -> None:
        """Do what makes the step fit, once it is captured again."""
        for name, ratio in self.ratios.items():
            self._grow[name](ratio)


class RandomState:
    """The states of torch's generators: the CPU's, those of ``devices``, and ``generators`` of the model's own."""

    def __init__(self, devices: Iterable[torch.device], generators: Iterable[torch.Generator] = ()):
        self._cpu = torch.get_rng_state()
        self._own = [(generator, generator.get_state()) for generator in generators]
        self._devices = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Give each generator its state of that moment."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.cuda.set_rng_state(state, device)
        for generator, state in self._own:
            generator.set_state(state)

    def states(self) -> dict[str, torch.Tensor]:
        """The states at that moment."""
        own = {f"of the model, {i}": state for i, (_, state) in enumerate(self._own)}
        return {"cpu": self._cpu} | {str(device): state for device, state in self._devices.items()} | own


class BoundStep:
    """One form of a captured step. ``watch`` and ``plain`` see whether it must be captured again. ``agreed``: whether
    the ranks know that they issue the same collectives in it."""

    def __init__(self, traced: Traced, update: Update | None, session: Session, memory: Memory):
        self.traced, self.update = traced, update
        self.runner = ProgramRunner(traced.program, session, memory)
        self.watch = Watch(traced.slots, update.optimizers if update else ())
        self.plain = traced.reads
        self.lrs = {
            spec.what.group: spec.tensor
            for step in traced.program.graphs.values()
            for spec in step.inputs
            if isinstance(spec.what, GroupValue)
        }
        self.lr_values: dict[int, float] = {}
        self.agreed = False
        self.after: Callable[[], None] | None = None
        self.devices = {tensor.device for tensor in traced.state if tensor.device.type == "cuda"}

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether what Python read of the batch's values at the capture is so of these ``leaves`` too."""
        return self.traced.batch_reads.hold(leaves, self.traced.program.microbatches)

    def __call__(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, metrics by name) of one step on the leaves of a batch; gradients land in ``param.grad``.

        Raises `ExceededError` for a step that must be repeated, on all ranks, with all state as it was. To know,
        the host waits for the step; it does not wait for a step that has nothing to grow.
        """
        self._set_rates()
        for host in self.traced.hosts:
            host.begin()
        random = RandomState(self.devices, self.traced.generators) if self.traced.grow else None
        host = HostRandom() if self.traced.grow and self.traced.draws.calls else None
        drawn = self.traced.draws.run(leaves, self.traced.batch_reads, self.traced.program.microbatches)
        results = self.runner([*leaves, *drawn])
        if random is not None:
            ratios = {name: results.ratios[name].item() for name in self.traced.grow}
            if exceeded := {name: ratio for name, ratio in ratios.items() if ratio > 1}:
                random.restore()
                if host is not None:
                    host.restore()
                raise ExceededError(exceeded, self.traced.grow)
        if self.traced.hosts:
            skipped, created = results.metrics.get("skipped"), iter(results.made)
            for host in self.traced.hosts:
                host.end(created, skipped is not None and bool(skipped))
        gradients.land(self.traced.landing, results.gradients)
        if self.update:
            self.update.mark_stepped()
        self.after = self._after(results.read)
        return results.loss, results.metrics | means(results.reported)

    def _after(self, read: Mapping[str, Sequence[torch.Tensor]]) -> Callable[[], None] | None:
        """Reruns the loss function's Python with the values it ``read`` in this call."""
        replay, calls = self.traced.replay, self.traced.program.microbatches
        if replay is None:
            return None
        streams = [(torch.cuda.Stream(device), torch.cuda.Event()) for device in self.devices]
        for _, event in streams:
            event.record()

        def run() -> None:
            # Streams of their own: to read a number waits for this step, and not for the next one.
            with contextlib.ExitStack() as inside:
                for stream, event in streams:
                    stream.wait_event(event)
                    inside.enter_context(torch.cuda.stream(stream))
                for call in range(calls):
                    replay.after({key: values[call] for key, values in read.items()})
            for stream, _ in streams:
                stream.synchronize()  # before its memory is used again

        return run

    def _set_rates(self) -> None:
        groups = self.update.groups if self.update else ()
        for group, tensor in self.lrs.items():
            lr = groups[group]["lr"]
            if isinstance(lr, torch.Tensor):
                tensor.copy_(lr)
                self.lr_values.pop(group, None)
            elif self.lr_values.get(group) != lr:
                tensor.fill_(float(lr))
                self.lr_values[group] = lr
