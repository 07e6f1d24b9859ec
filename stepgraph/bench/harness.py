"""Shared parts of the training-step benchmarks: their options, building the step, and its figures in order."""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

import stepgraph
from stepgraph.bench.results import finite
from stepgraph.config.device import peak_mem_gib
from stepgraph.config.environment import package_versions
from stepgraph.config.idle import refuse_idle
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.errors import unknown_name
from stepgraph.options import StepOptions, values
from stepgraph.passes import chosen

#: Small and constant: at a preset's own peak rate, without its warm-up, a few steps on one batch are chaotic, and
#: rounding alone would drive the providers' losses apart.
LEARNING_RATE = 1e-4

MAX_GRAD_NORM = 1.0

#: Every data-parallel rank trains on one batch of its own again and again: a loss that falls shows that updates work.
BATCH_SEED = 1


def preset(name: str, **changed: Any) -> TrainConfig:
    """The preset's run with the default options of a step, no mesh, and ``changed``."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return dataclasses.replace(PRESETS[name](), **values(StepOptions(), StepOptions) | changed)


def described(kind: type, known: Collection[str]) -> str:
    """What ``--help`` says of the benchmark with the options ``kind``. ``known``: the providers that there are."""
    return f"{kind.__doc__} Presets: {', '.join(PRESETS)}. Providers: {', '.join(known)}."


def run_of(config: TrainConfig, words: list[str], **changed: Any) -> TrainConfig:
    """The run whose step is measured: ``config``, set by ``words``, with ``changed``. ValueError for a bad option."""
    refuse_idle(config, words)
    config = dataclasses.replace(config, lr=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM, **changed)
    config.validate()
    return config


def provider_names(text: str, known: Collection[str]) -> list[str]:
    """The providers of ``--providers``, in order, each once. Raises ValueError for one that is not ``known``."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise unknown_name("provider", name, known)
    return names


def random_batch(config: TrainConfig, place: int = 0) -> dict[str, torch.Tensor]:
    """``tokens`` and ``targets``, int64 (accumulate * B, T) on the CPU, of the data-parallel rank at ``place``: the
    same in every process. They are random, so a step always has something to learn."""
    generator = torch.Generator().manual_seed(BATCH_SEED + place)
    shape = (config.accumulate * config.batch_size, config.seq_len)
    return {k: torch.randint(config.model.vocab_size, shape, generator=generator) for k in ("tokens", "targets")}


def fused_adamw(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every provider."""
    return torch.optim.AdamW(model.parameters(), config.lr, config.betas, config.eps, config.weight_decay, fused=True)


#: Steps whose losses are compared, before anything is timed. They also warm up: CUDA graphs are recorded by the third.
FIRST_STEPS = 5


@dataclass(frozen=True)
class Parts:
    """What a step is made of, the same for every provider. ``loss_fn(model, batch)`` gives an fp32 scalar."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    batch: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    options: StepOptions


class UnavailableError(ValueError):
    """The provider cannot do this model, or is not installed: no failure."""


class Step(Protocol):
    """A training step. ``figures()``: fields of a `Row` that are known once it has run."""

    def __call__(self) -> torch.Tensor:
        """One step; the loss, detached."""
        ...

    def figures(self) -> dict[str, Any]: ...


class EagerStep:
    """The loop that everyone writes."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.params = list(parts.model.parameters())
        self.forward = self._loss

    def _loss(self) -> torch.Tensor:
        return self.parts.loss_fn(self.parts.model, self.parts.batch)

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)
        self.parts.optimizer.step()

    def __call__(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self.update()
        self.parts.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def figures(self) -> dict[str, Any]:
        """Nothing: a compiler's time cannot be separated from the first step's."""
        return {}


class CapturedStep:
    """``stepgraph.capture`` of the whole step."""

    def __init__(self, parts: Parts, **options: Any):
        passes = chosen(replace(parts.options, **options))
        self.batch = parts.batch
        start = time.perf_counter()
        self.step = stepgraph.capture(
            parts.model, parts.loss_fn, parts.batch, parts.optimizer, max_grad_norm=MAX_GRAD_NORM, passes=passes
        )
        # Tracing and passes. CUDA graphs are recorded later, so the compilers' time is separated here.
        self.capture_s = time.perf_counter() - start - self._compile_s()

    def _compile_s(self) -> float:
        """Seconds in compilers and in recording CUDA graphs."""
        return sum(report.compile_s for report in self.step.report)

    def __call__(self) -> torch.Tensor:
        return self.step(self.batch)

    def figures(self) -> dict[str, Any]:
        """Capture, compilers and CUDA graphs, and what each pass did."""
        recording = self.step.graph.recording
        return {
            "capture_s": self.capture_s,
            "compile_s": self._compile_s(),
            "cuda_graphs": recording.summary if recording is not None else None,
            "passes": [report.line() for report in self.step.report],
            "notes": [f"{report.name}: {note}" for report in self.step.report for note in report.notes][:20],
        }


class Run:
    """The measurements of one provider, in the order of the methods; its benchmark's child process says what of."""

    def __init__(self, providers: Mapping[str, Callable[[Parts], Step]], provider: str, device: torch.device):
        self.providers, self.provider, self.device = providers, provider, device
        self.memory_before = 0.0
        """On a CPU: GiB that are not the step's."""
        self.step: Step

    def parts(self) -> Parts:
        """The measured job. Weights and batch are the same in every process."""
        raise NotImplementedError

    def forget_peak(self) -> None:
        """What was taken so far is not the step's memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.memory_before = peak_mem_gib(self.device)

    def first_steps(self) -> dict[str, Any]:
        """Builds the step and runs ``FIRST_STEPS`` of it; or says why the provider cannot do this model."""
        parts = self.parts()
        start = time.perf_counter()
        try:
            self.step = self.providers[self.provider](parts)
        except UnavailableError as error:
            return {"unavailable": str(error)}
        losses = [self.step().item()]
        first_step_s = time.perf_counter() - start
        losses += [self.step().item() for _ in range(FIRST_STEPS - 1)]
        self.losses = losses
        cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        return {
            "params": sum(parameter.numel() for parameter in parts.model.parameters()),
            "losses": [finite(loss) for loss in losses],
            "first_step_s": first_step_s,
            "versions": package_versions() | (cuda if self.device.type == "cuda" else {}),
            **self.step.figures(),
        }

    def finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Peak memory so far, GiB."""
        if self.device.type != "cuda":
            return {"peak_mem_gib": peak_mem_gib(self.device) - self.memory_before}
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return {"peak_mem_gib": reserved / 2**30, "peak_allocated_gib": allocated / 2**30}


def mark(device: torch.device) -> Any:
    """A point in time; on CUDA in the current stream, so that nothing waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def spans(marks: Sequence[Any]) -> list[float]:
    """Milliseconds between neighbours among ``marks``, once the device has passed the last."""
    if isinstance(marks[0], torch.cuda.Event):
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]
    return [1000 * (b - a) for a, b in pairwise(marks)]


def host_times(step: Callable[[], Any], steps: int, together: Callable[[], Any] = lambda: None) -> list[float]:
    """Milliseconds until each of ``steps`` calls returns, from idle GPUs; ``together``: waits for the other ranks."""
    spent = []
    for _ in range(steps):
        torch.cuda.synchronize()
        together()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        spent.append(1000 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return spent


def times(device: torch.device, call: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of each of ``repeats`` calls. On CUDA by events in the stream, so that nothing waits in between."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    marks = [mark(device)]
    for _ in range(repeats):
        call()
        marks.append(mark(device))
    return spans(marks)
