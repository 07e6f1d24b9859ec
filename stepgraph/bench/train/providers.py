"""The providers that train a preset over a mesh: stepgraph, and torchtitan if installed.

Each is a context manager that opens the process groups and yields a `Training`. Both do the same work: one model, one
mesh, random tokens from the host in every step, bf16 compute with fp32 shards at rest, AdamW, clipping. ``balanced``:
every expert of a layer gets as many tokens, whatever its router says.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import nn

from stepgraph import parallel, passes
from stepgraph.bench.harness import fused_adamw, random_batch
from stepgraph.bench.train import titan
from stepgraph.config import build
from stepgraph.config.device import keep_freed_memory
from stepgraph.config.train import TrainConfig
from stepgraph.models.moe import Router


class Training(Protocol):
    """A training that is ready to step. ``build_s``, ``capture_s``, ``compile_s``: seconds spent so far on model and
    optimizer, on tracing and passes, and in compilers; None where they cannot be separated. ``passes``: what passes
    did so far, line by line; None where there are none."""

    build_s: float
    capture_s: float | None
    compile_s: float | None
    passes: list[str] | None

    def step(self, read: bool = False) -> float | None:
        """Launch a step; with ``read``, wait for the loss of the whole mesh and return it."""
        ...


class CapturedTraining:
    """``stepgraph.capture`` of the whole step, as ``stepgraph train`` builds and feeds it."""

    def __init__(
        self, config: TrainConfig, device: torch.device, mesh: parallel.Mesh, begun: float, balanced: bool = False
    ):
        self.device, self.batch = device, random_batch(config, mesh.dp_place)
        if device.type == "cuda":
            self.batch = {name: tokens.pin_memory() for name, tokens in self.batch.items()}
        model = build.build_model(config, device, mesh)
        if balanced:
            balance(model)
        loss_fn = build.build_loss(config, device, mesh)
        adamw = config.optimizer == "adamw"  # of all parameters alike, as torchtitan's
        optimizer = fused_adamw(config, model) if adamw else build.build_optimizer(config, model)
        self.build_s = time.perf_counter() - begun
        start = time.perf_counter()
        batch = build.example_batch(config, device)
        self.captured = build.build_step(config, build.step_spec(config, model, loss_fn, batch, optimizer))
        self.capture_s = time.perf_counter() - start - self.compile_s

    @property
    def compile_s(self) -> float:
        return sum(report.compile_s for report in self.captured.report)

    @property
    def passes(self) -> list[str]:
        return passes.format_report(self.captured.report).splitlines()

    def step(self, read: bool = False) -> float | None:
        loss = self.captured({name: tokens.to(self.device, non_blocking=True) for name, tokens in self.batch.items()})
        return loss.item() if read else None


def balance(model: nn.Module) -> None:
    """Give every expert the same number of a rank's tokens, in turn, weighted by their scores, like torchtitan's
    ``moe_force_load_balance``."""

    def in_turn(scores: torch.Tensor, slots: int, experts: int) -> torch.Tensor:  # (N, E) -> (N, K)
        places = torch.arange(scores.shape[0] * slots, device=scores.device)
        return (places % experts).view(-1, slots)

    for router in model.modules():
        if isinstance(router, Router):
            router.choose = partial(in_turn, slots=router.config.top_k, experts=router.config.n_experts)


@contextlib.contextmanager
def stepgraph(config: TrainConfig, device: torch.device, balanced: bool = False) -> Iterator[Training]:
    """Ours, on any device."""
    if device.type == "cpu":
        keep_freed_memory()
    begun = time.perf_counter()
    with parallel.started(config.mesh_spec, device.type) as mesh:
        yield CapturedTraining(config, device, mesh, begun, balanced)


@contextlib.contextmanager
def torchtitan(config: TrainConfig, device: torch.device, balanced: bool = False) -> Iterator[Training]:
    """Its public ``Trainer``, each block compiled by ``torch.compile``."""
    with titan.started(config, lambda place: random_batch(config, place), balanced) as training:
        yield training


@dataclass(frozen=True)
class Provider:
    """``open(config, device, balanced)``: called in every rank. ``unavailable(config, device)``: why it cannot do this
    work here, in one line, None if it can. ``environment``: variables that its own launcher sets."""

    open: Callable[[TrainConfig, torch.device, bool], contextlib.AbstractContextManager[Training]]
    unavailable: Callable[[TrainConfig, torch.device], str | None] = lambda config, device: None
    environment: Mapping[str, str] = field(default_factory=dict)


PROVIDERS = {"stepgraph": Provider(stepgraph), "torchtitan": Provider(torchtitan, titan.unavailable, titan.ENVIRONMENT)}
