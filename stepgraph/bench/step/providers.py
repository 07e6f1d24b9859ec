"""The ways to run one training step that are measured side by side.

All do the same: loss, backward, clip the gradients' total norm, update with torch's fused AdamW.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

import stepgraph
from stepgraph import passes
from stepgraph.bench.arguments import MAX_GRAD_NORM
from stepgraph.bench.progress import phase
from stepgraph.inductor import fusion_guard, tuned_reductions
from stepgraph.passes import StepOptions


@dataclass(frozen=True)
class Parts:
    """What a step is made of, the same for every provider. ``loss_fn(model, batch)`` gives an fp32 scalar;
    ``options``: of stepgraph's step."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    batch: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    options: StepOptions


class Step(Protocol):
    """A training step. ``capture_s`` and ``compile_s``: seconds spent so far, None where they cannot be separated."""

    capture_s: float | None
    compile_s: float | None

    def __call__(self) -> torch.Tensor:
        """One step; the loss, detached."""
        ...


class EagerStep:
    """The loop that everyone writes. Its forward and backward can be timed apart."""

    capture_s: float | None = None
    compile_s: float | None = None

    def __init__(self, parts: Parts):
        self.parts = parts
        self.params = list(parts.model.parameters())
        self.forward = self._loss

    def _loss(self) -> torch.Tensor:
        return self.parts.loss_fn(self.parts.model, self.parts.batch)

    def update(self) -> None:
        """Clip, update, forget the gradients."""
        nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)
        self.parts.optimizer.step()
        self.parts.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()


class CompiledStep(EagerStep):
    """``torch.compile`` of model and loss together, without graph breaks, for static shapes; clipping and the fused
    update, already a few launches, stay eager, as people use it."""

    def __init__(self, parts: Parts, mode: str | None = None, options: dict[str, Any] | None = None):
        super().__init__(parts)
        self.forward = torch.compile(self._loss, dynamic=False, fullgraph=True, mode=mode, options=options)


class TorchaoStep(CompiledStep):
    """`CompiledStep` of the model with torchao's float8 layers, by its ``recipe``; the output head stays as it is.

    Raises ``ModuleNotFoundError`` where torchao is not installed.
    """

    def __init__(self, parts: Parts, recipe: str):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def wanted(module: nn.Module, path: str) -> bool:
            return isinstance(module, nn.Linear) and not path.endswith("output")

        convert_to_float8_training(
            parts.model, config=Float8LinearConfig.from_recipe_name(recipe), module_filter_fn=wanted
        )
        super().__init__(parts)


class CapturedStep:
    """``stepgraph.capture`` of the whole step."""

    def __init__(self, parts: Parts, max_autotune: bool = False, **options: Any):
        chosen = passes.chosen(dataclasses.replace(parts.options, **options))
        if max_autotune:
            chosen = [p.with_options(max_autotune=True) if p.name == "inductor" else p for p in chosen]
        self.batch = parts.batch
        phase("capture")
        start = time.perf_counter()
        self.step = stepgraph.capture(
            parts.model, parts.loss_fn, parts.batch, parts.optimizer, max_grad_norm=MAX_GRAD_NORM, passes=chosen
        )
        # Tracing and passes. CUDA graphs are recorded later, so the compilers' time is separated here.
        self.capture_s = time.perf_counter() - start - self.compile_s

    @property
    def compile_s(self) -> float:
        """Seconds in compilers and in recording CUDA graphs."""
        return sum(report.compile_s for report in self.step.report)

    def __call__(self) -> torch.Tensor:
        return self.step(self.batch)


#: Name -> the step made of the parts. `stepgraph` is `stepgraph.capture` with the options given, the others of its
#: name change one of them (`stepgraph-max-autotune`: the counterpart of `compile-max-autotune`); `compile-guard` and
#: `compile-tuned` are torch.compile under the rules of `stepgraph.inductor`.
PROVIDERS: dict[str, Callable[[Parts], Step]] = {
    "eager": EagerStep,
    "compile": CompiledStep,
    "compile-max-autotune": lambda parts: CompiledStep(parts, mode="max-autotune"),
    "compile-no-mix-order": lambda parts: CompiledStep(parts, options={"triton.mix_order_reduction": False}),
    "compile-guard": lambda parts: CompiledStep(parts, options=fusion_guard().options),
    "compile-tuned": lambda parts: CompiledStep(parts, options=(fusion_guard() | tuned_reductions()).options),
    "compile-torchao-fp8-tensorwise": lambda parts: TorchaoStep(parts, "tensorwise"),
    "compile-torchao-fp8-rowwise": lambda parts: TorchaoStep(parts, "rowwise"),
    "compile-torchao-fp8-rowwise-bf16-weight-gradients": lambda parts: TorchaoStep(parts, "rowwise_with_gw_hp"),
    "stepgraph": CapturedStep,
    "stepgraph-norm-kernel": lambda parts: CapturedStep(parts, norm="kernel"),
    "stepgraph-norm-inductor": lambda parts: CapturedStep(parts, norm="inductor"),
    "stepgraph-norm-eager": lambda parts: CapturedStep(parts, norm="eager"),
    "stepgraph-cudnn": lambda parts: CapturedStep(parts, attention="cudnn"),
    "stepgraph-fa4": lambda parts: CapturedStep(parts, attention="fa4"),
    "stepgraph-flex": lambda parts: CapturedStep(parts, attention="flex"),
    "stepgraph-grouped-torch": lambda parts: CapturedStep(parts, grouped="torch"),
    "stepgraph-grouped-quack": lambda parts: CapturedStep(parts, grouped="quack"),
    "stepgraph-regional": lambda parts: CapturedStep(parts, inductor="regional"),
    "stepgraph-exact": lambda parts: CapturedStep(parts, passes="exact"),
    "stepgraph-fp8-tensorwise": lambda parts: CapturedStep(parts, fp8="tensorwise"),
    "stepgraph-fp8-rowwise": lambda parts: CapturedStep(parts, fp8="rowwise"),
    "stepgraph-fp8-rowwise-bf16-weight-gradients": lambda parts: CapturedStep(
        parts, fp8="rowwise-bf16-weight-gradients"
    ),
    "stepgraph-max-autotune": lambda parts: CapturedStep(parts, max_autotune=True),
}
