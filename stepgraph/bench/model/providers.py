"""The ways to train an unmodified model of ``transformers`` that are measured side by side.

All do the same: loss by the model, backward, clip the gradients' total norm, update with torch's fused AdamW.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

import stepgraph
from stepgraph.bench.arguments import LEARNING_RATE, MAX_GRAD_NORM
from stepgraph.bench.progress import phase
from stepgraph.passes import Passes, StepOptions, chosen

Batch = dict[str, torch.Tensor]


class Step(Protocol):
    """A training step on its batch. ``figures()``: what else of the row is known once it has run."""

    def __call__(self) -> torch.Tensor:
        """One step; the loss, detached."""
        ...

    def figures(self) -> dict[str, Any]:
        """Fields of a `ModelRow`."""
        ...


class UnavailableError(ValueError):
    """The provider cannot do this model, or is not installed: no failure."""


class EagerStep:
    """The loop that everyone writes. ``mode``: of ``torch.compile(model)``, None: none; ``liger``: with its patches."""

    def __init__(self, model: nn.Module, batch: Batch, mode: str | None = None, liger: bool = False):
        if liger:
            patch_with_liger(model)
        self.batch, self.params = batch, list(model.parameters())
        self.optimizer = self._make_optimizer()
        self.graphs = mode in ("reduce-overhead", "max-autotune")
        self.model = torch.compile(model, mode=mode) if mode else model

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return fused_adamw(self.params)

    def update(self) -> None:
        """Clip and update."""
        nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)
        self.optimizer.step()

    def __call__(self) -> torch.Tensor:
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.model(**self.batch).loss
        loss.backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def figures(self) -> dict[str, Any]:
        """Nothing: a compiler's time cannot be separated from the first step's."""
        return {}


class CompiledUpdateStep(EagerStep):
    """``torch.compile`` of the model, and of clipping and update. A compiled AdamW is the foreach one."""

    def __init__(self, model: nn.Module, batch: Batch):
        super().__init__(model, batch, "default")
        self.compiled_update = torch.compile(super().update)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        # A tensor: as a number the rate would be a constant of the compiled code.
        return torch.optim.AdamW(self.params, torch.tensor(LEARNING_RATE), foreach=True)

    def update(self) -> None:
        """Clip and update, compiled."""
        self.compiled_update()


class CapturedStep:
    """``stepgraph.capture`` of the whole step."""

    def __init__(self, model: nn.Module, batch: Batch, options: Passes = "default", max_autotune: bool = False):
        if max_autotune:
            found = chosen(StepOptions())
            options = [p.with_options(max_autotune=True) if p.name == "inductor" else p for p in found]
        self.batch = batch
        phase("capture")
        start = time.perf_counter()
        self.step = stepgraph.capture(
            model, loss_of, batch, fused_adamw(list(model.parameters())), max_grad_norm=MAX_GRAD_NORM, passes=options
        )
        self.capture_s = time.perf_counter() - start - self._compile_s()

    def _compile_s(self) -> float:
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


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model computes itself, fp32."""
    return model(**batch).loss


def fused_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every provider but one."""
    return torch.optim.AdamW(params, LEARNING_RATE, fused=True)


def patch_with_liger(model: nn.Module) -> None:
    """Puts Liger's kernels into ``model``, as the Trainer does for ``use_liger_kernel``.

    Raises UnavailableError, in one line, where the package is missing or has no patches for the model.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise UnavailableError("liger-kernel is not installed: pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if apply is None:
        raise UnavailableError(f"Liger has no patches for {model.config.model_type}")
    apply(model=model)


#: Name -> the step made of model and batch. `compile-...` are torch.compile's modes; `compile-update` compiles clipping
#: and update too.
PROVIDERS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "eager": EagerStep,
    "compile": lambda model, batch: EagerStep(model, batch, "default"),
    "compile-reduce-overhead": lambda model, batch: EagerStep(model, batch, "reduce-overhead"),
    "compile-max-autotune": lambda model, batch: EagerStep(model, batch, "max-autotune"),
    "compile-max-autotune-no-cudagraphs": lambda model, batch: EagerStep(model, batch, "max-autotune-no-cudagraphs"),
    "compile-update": CompiledUpdateStep,
    "liger": lambda model, batch: EagerStep(model, batch, liger=True),
    "liger-compile": lambda model, batch: EagerStep(model, batch, "default", liger=True),
    "stepgraph": CapturedStep,
    "stepgraph-exact": lambda model, batch: CapturedStep(model, batch, "exact"),
    "stepgraph-max-autotune": lambda model, batch: CapturedStep(model, batch, max_autotune=True),
}
