"""The ways to train an unmodified model of ``transformers`` that are measured side by side.

All do the same: loss by the model, backward, clip the gradients' total norm, update with torch's fused AdamW.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from stepgraph.bench.arguments import LEARNING_RATE
from stepgraph.bench.harness import CapturedStep, EagerStep, Parts, Step, UnavailableError
from stepgraph.passes import StepOptions

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


class CompiledUpdateStep(ModelStep):
    """``torch.compile`` of the model, and of clipping and update. A compiled AdamW is the foreach one."""

    def __init__(self, parts: Parts):
        # A tensor: as a number the rate would be a constant of the compiled code.
        optimizer = torch.optim.AdamW(trained(parts.model), torch.tensor(LEARNING_RATE), foreach=True)
        super().__init__(Parts(parts.model, parts.loss_fn, parts.batch, optimizer, parts.options), "default")
        self.compiled_update = torch.compile(super().update)

    def update(self) -> None:
        """Clip and update, compiled."""
        self.compiled_update()


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
    """The optimizer of every provider but one."""
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


#: Name -> the step made of the parts. `compile-...` are torch.compile's modes; `compile-update` compiles clipping and
#: update too.
PROVIDERS: dict[str, Callable[[Parts], Step]] = {
    "eager": ModelStep,
    "compile": lambda parts: ModelStep(parts, "default"),
    "compile-reduce-overhead": lambda parts: ModelStep(parts, "reduce-overhead"),
    "compile-max-autotune": lambda parts: ModelStep(parts, "max-autotune"),
    "compile-max-autotune-no-cudagraphs": lambda parts: ModelStep(parts, "max-autotune-no-cudagraphs"),
    "compile-update": CompiledUpdateStep,
    "liger": lambda parts: ModelStep(parts, liger=True),
    "liger-compile": lambda parts: ModelStep(parts, "default", liger=True),
    "stepgraph": CapturedStep,
    "stepgraph-exact": lambda parts: CapturedStep(parts, passes="exact"),
    "stepgraph-epilogues": lambda parts: CapturedStep(parts, epilogues="auto"),
    "stepgraph-max-autotune": lambda parts: CapturedStep(parts, max_autotune=True),
}
