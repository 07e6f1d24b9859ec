"""The ways to run one training step that are measured side by side.

All do the same: loss, backward, clip the gradients' total norm, update with torch's fused AdamW.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepgraph.bench.harness import CapturedStep, EagerStep, Parts, Step
from stepgraph.inductor import fusion_guard, tuned_reductions


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
