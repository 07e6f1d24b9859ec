"""Runs one provider and one model in its own process: ``python -m stepgraph.bench.model.child``.

Its requests and answers: `stepgraph.bench.lane`.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph.bench.harness import LEARNING_RATE, CapturedStep, EagerStep, Parts, Run, Step, UnavailableError
from stepgraph.bench.lane import serve, take_job
from stepgraph.bench.model import models
from stepgraph.bench.model.profile import kernel_table, kernels_of, limits_ms, profiled, where
from stepgraph.config.environment import package_version
from stepgraph.passes import StepOptions


def main() -> None:
    """Answers requests until stdin ends."""
    job, answer = take_job()
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    run = ModelRun(job["model"], job["provider"], torch.device(job["device"]))
    serve(run, answer)


class ModelRun(Run):
    """The measurements of an unmodified model's step."""

    def __init__(self, model: str, provider: str, device: torch.device):
        super().__init__(PROVIDERS, provider, device)
        self.model = model

    def parts(self) -> Parts:
        """The model as its library makes it; what building it took is not the step's memory."""
        parts = parts_of(models.build(self.model, self.device), models.batch_of(self.model, self.device))
        self.forget_peak()
        return parts

    def first_steps(self) -> dict[str, Any]:
        """As in `Run`, with the packages that providers come from."""
        found = super().first_steps()
        packages = {name: package_version(name) for name in ("transformers", "liger-kernel")}
        return found if "unavailable" in found else found | {"versions": found["versions"] | packages}

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Where a step spends its time, on a GPU; ``path``: also writes a table of its kernels there, if not None."""
        profiler = profiled(self.step, self.device)
        if request["path"] is not None:
            table = kernel_table(profiler, self.device, f"{self.model}, {self.provider}")
            Path(request["path"]).write_text(table, encoding="utf-8")
        if self.device.type != "cuda":
            return {}
        return {"where": where(kernels_of(profiler), request["step_ms"], limits_ms(self.step, self.device))}


Batch = dict[str, torch.Tensor]


class ModelStep(EagerStep):
    """The loop that everyone writes. ``mode``: of ``torch.compile(model)``, None: none; ``liger``: with its patches."""

    def __init__(self, parts: Parts, mode: str | None = None, liger: bool = False):
        if liger:
            patch_with_liger(parts.model)
        super().__init__(parts)
        self.graphs = mode in ("reduce-overhead", "max-autotune")
        self.model = torch.compile(parts.model, mode=mode) if mode else parts.model

    def _loss(self) -> torch.Tensor:
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return loss_of(self.model, self.parts.batch)


def parts_of(model: nn.Module, batch: Batch) -> Parts:
    """What every provider's step is made of."""
    return Parts(model, loss_of, batch, fused_adamw(trained(model)), StepOptions())


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [param for param in model.parameters() if param.requires_grad]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model computes itself, fp32."""
    return model(**batch).loss


def fused_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every provider."""
    return torch.optim.AdamW(params, LEARNING_RATE, fused=True)


def patch_with_liger(model: nn.Module) -> None:
    """Puts Liger's kernels into ``model``, as the Trainer does for ``use_liger_kernel``.

    Raises UnavailableError, in one line, where the package is missing or has no patches for the model.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise UnavailableError("liger-kernel is not installed: pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    config = getattr(model, "config", None)  # a model of no library has none
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(config.model_type) if config is not None else None
    if apply is None:
        raise UnavailableError(f"Liger has no patches for {config.model_type if config else type(model).__name__}")
    apply(model=model.get_base_model() if hasattr(model, "get_base_model") else model)  # adapters are around it


#: Name -> the step made of the parts. `compile-...` are torch.compile's modes.
PROVIDERS: dict[str, Callable[[Parts], Step]] = {
    "eager": ModelStep,
    "compile": lambda parts: ModelStep(parts, "default"),
    "compile-reduce-overhead": lambda parts: ModelStep(parts, "reduce-overhead"),
    "compile-max-autotune": lambda parts: ModelStep(parts, "max-autotune"),
    "compile-max-autotune-no-cudagraphs": lambda parts: ModelStep(parts, "max-autotune-no-cudagraphs"),
    "liger": lambda parts: ModelStep(parts, liger=True),
    "liger-compile": lambda parts: ModelStep(parts, "default", liger=True),
    "stepgraph": CapturedStep,
    "stepgraph-exact": lambda parts: CapturedStep(parts, passes="exact"),
    "stepgraph-epilogues": lambda parts: CapturedStep(parts, epilogues="auto"),
    "stepgraph-fp8": lambda parts: CapturedStep(parts, fp8="rowwise", fp8_experts=True),
}


if __name__ == "__main__":
    main()
