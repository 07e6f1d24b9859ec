"""Runs one provider in its own process, with commands over stdin: ``python -m stepgraph.bench.step.child``.

Its memory, allocator, compile caches and Dynamo are thus its own. The first line of stdin is the job; each further line
is a request. Every answer is one line of JSON on what was stdout; all else that is printed goes to stderr.
"""

import gc
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from stepgraph.bench.harness import (
    FIRST_STEPS,
    CapturedStep,
    EagerStep,
    Parts,
    Run,
    Step,
    fused_adamw,
    host_times,
    random_batch,
)
from stepgraph.bench.lane import serve, take_job
from stepgraph.bench.results import finite
from stepgraph.config.build import build_model
from stepgraph.config.device import keep_freed_memory, peak_mem_gib
from stepgraph.config.train import TrainConfig
from stepgraph.inductor import fusion_guard, tuned_reductions
from stepgraph.models import next_token_loss

#: Runs of these steps that measure how far rounding alone moves their losses.
TRIALS = 2


def main() -> None:
    """Answers requests until stdin ends."""
    job, answer = take_job()
    run = StepRun(TrainConfig.from_json(job["config"]), job["provider"], torch.device(job["device"]))
    serve(run, answer)


def make_parts(config: TrainConfig, device: torch.device) -> Parts:
    """The measured job: model, loss, batch and optimizer. Weights and batch are the same in every process."""
    batch = {name: tokens.to(device) for name, tokens in random_batch(config).items()}
    model = build_model(config, device)

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision != "fp32"):
            return next_token_loss(model, batch)

    return Parts(model, loss_fn, batch, fused_adamw(config, model), config)


class StepRun(Run):
    """The measurements of a preset's step."""

    def __init__(self, config: TrainConfig, provider: str, device: torch.device):
        super().__init__(PROVIDERS, provider, device)
        self.config = config
        if device.type == "cpu":
            keep_freed_memory()  # as `stepgraph train` does; for every provider
            self.memory_before = peak_mem_gib(device)  # what the imports took is not the step's

    def parts(self) -> Parts:
        return make_parts(self.config, self.device)

    def finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Peak memory so far, then what would disturb the steps if it were measured among them."""
        answer: dict[str, Any] = super().finish(request) | {"loss": finite(self.losses[0])}
        if self.device.type == "cuda":
            answer["host_ms"] = median(host_times(self.step, request["steps"]))
        else:
            answer["step_mem_gib"] = self._step_memory()
        if self.provider == "eager":
            answer["spread"] = self._spread()
        return answer

    def _step_memory(self) -> float:
        """GiB of tensors that one step has alive at its peak, beyond those alive between steps."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.step()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]") / 2**30

    def _spread(self) -> list[float]:
        """How far each loss of the first steps moves, as a share of it, where nothing but rounding is another: the most
        of ``TRIALS``, in which each initial weight is off by a random part of a unit in the last place of the dtype
        that computes with it. It ends this provider's own step, whose memory it takes."""
        del self.step
        unit = torch.finfo(self.config.products_dtype).eps
        found = [0.0] * FIRST_STEPS
        for trial in range(TRIALS):
            gc.collect()  # steps refer to themselves: without this, two models would have to fit
            parts = make_parts(self.config, self.device)
            generator = torch.Generator(self.device).manual_seed(trial)
            with torch.no_grad():
                for param in parts.model.parameters():
                    param += param * torch.empty_like(param).uniform_(-unit, unit, generator=generator)
            step = PROVIDERS["eager"](parts)
            for place, expected in enumerate(self.losses):
                found[place] = max(found[place], abs(step().item() - expected) / abs(expected))
            del step, parts
        return found if all(map(math.isfinite, found)) else []


class CompiledStep(EagerStep):
    """``torch.compile`` of model and loss together, without graph breaks, for static shapes; clipping and the fused
    update, already a few launches, stay eager, as people use it."""

    def __init__(self, parts: Parts, mode: str | None = None, options: dict[str, Any] | None = None):
        super().__init__(parts)
        self.forward = torch.compile(self._loss, dynamic=False, fullgraph=True, mode=mode, options=options)


class TorchaoStep(CompiledStep):
    """`CompiledStep` of the model with torchao's float8 layers, by its ``recipe``; the output head is left unchanged.

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
#: name change one of them; `compile-guard` and `compile-tuned` are torch.compile under the rules of
#: `stepgraph.inductor`.
PROVIDERS: dict[str, Callable[[Parts], Step]] = {
    "eager": EagerStep,
    "compile": CompiledStep,
    "compile-max-autotune": lambda parts: CompiledStep(parts, mode="max-autotune"),
    "compile-no-mix-order": lambda parts: CompiledStep(parts, options={"triton.mix_order_reduction": False}),
    "compile-guard": lambda parts: CompiledStep(parts, options=fusion_guard().options),
    "compile-tuned": lambda parts: CompiledStep(parts, options=(fusion_guard() | tuned_reductions()).options),
    "compile-torchao-fp8-tensorwise": lambda parts: TorchaoStep(parts, "tensorwise"),
    "compile-torchao-fp8-rowwise": lambda parts: TorchaoStep(parts, "rowwise"),
    "stepgraph": CapturedStep,
    "stepgraph-norm-kernel": lambda parts: CapturedStep(parts, norm="kernel"),
    "stepgraph-norm-inductor": lambda parts: CapturedStep(parts, norm="inductor"),
    "stepgraph-norm-eager": lambda parts: CapturedStep(parts, norm="eager"),
    "stepgraph-cudnn": lambda parts: CapturedStep(parts, attention="cudnn"),
    "stepgraph-fa4": lambda parts: CapturedStep(parts, attention="fa4"),
    "stepgraph-exact": lambda parts: CapturedStep(parts, passes="exact"),
    "stepgraph-fp8-tensorwise": lambda parts: CapturedStep(parts, fp8="tensorwise"),
    "stepgraph-fp8-rowwise": lambda parts: CapturedStep(parts, fp8="rowwise"),
    "stepgraph-fp8-rowwise-bf16-weight-gradients": lambda parts: CapturedStep(
        parts, fp8="rowwise-bf16-weight-gradients"
    ),
}


if __name__ == "__main__":
    main()
