"""One provider in a process of its own, which gets its commands over stdin: ``python -m stepgraph.bench.step.child``.

Its memory, allocator, compile caches and Dynamo are thus its own. The first line of stdin is the job; each further line
is a request. Every answer is one line of JSON on what was stdout; all else that is printed goes to stderr.
"""

import gc
import json
import math
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from stepgraph.bench.arguments import fused_adamw, random_batch
from stepgraph.bench.device import kernels_of, times
from stepgraph.bench.lane import serve, take_job
from stepgraph.bench.progress import phase
from stepgraph.bench.results import finite
from stepgraph.bench.step.providers import PROVIDERS, EagerStep, Parts, Step
from stepgraph.config.build import build_model
from stepgraph.config.device import peak_mem_gib
from stepgraph.config.environment import package_versions
from stepgraph.config.host_memory import keep_freed_memory
from stepgraph.config.train import TrainConfig
from stepgraph.models import next_token_loss

#: Steps whose losses are compared, before anything is timed. They also warm up: CUDA graphs are recorded by the third.
FIRST_STEPS = 5
#: Runs of these steps that measure how far rounding alone moves their losses.
TRIALS = 2


def main() -> None:
    """Answers requests until stdin ends."""
    job, answer = take_job()
    run = Run(TrainConfig.from_json(job["config"]), job["provider"], torch.device(job["device"]))
    serve(run, answer)


def make_parts(config: TrainConfig, device: torch.device) -> Parts:
    """The measured job: model, loss, batch and optimizer. Weights and batch are the same in every process and on every
    device."""
    batch = {name: tokens.to(device) for name, tokens in random_batch(config).items()}
    model = build_model(config, device)

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision != "fp32"):
            return next_token_loss(model, batch)

    return Parts(model, loss_fn, batch, fused_adamw(config, model), config)


class Run:
    """The measurements of one provider, in the order of the methods."""

    def __init__(self, config: TrainConfig, provider: str, device: torch.device):
        self.config, self.provider, self.device = config, provider, device
        if device.type == "cpu":
            keep_freed_memory()  # as `stepgraph train` does; for every provider alike
        # VmHWM counts from the process's start: what the imports took is not the step's.
        self.memory_before = 0.0 if device.type == "cuda" else peak_mem_gib(device)

    def first_steps(self) -> dict[str, Any]:
        """Builds the step and runs ``FIRST_STEPS`` of it."""
        phase("build")
        self.parts = make_parts(self.config, self.device)
        self._wait()
        start = time.perf_counter()
        self.step: Step = PROVIDERS[self.provider](self.parts)
        phase("warm up")
        losses = [self.step().item()]
        first_step_s = time.perf_counter() - start
        losses += [self.step().item() for _ in range(FIRST_STEPS - 1)]
        self.losses = losses
        cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        return {
            "loss": finite(losses[0]),
            "losses": [finite(loss) for loss in losses],
            "first_step_s": first_step_s,
            "capture_s": self.step.capture_s,
            "compile_s": self.step.compile_s,
            "versions": package_versions() | (cuda if self.device.type == "cuda" else {}),
        }

    def finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Peak memory so far, then what would disturb the steps if it were measured among them."""
        steps = request["steps"]
        answer: dict[str, Any] = {"peak_mem_gib": self._peak_memory()}
        if self.device.type == "cuda":
            answer["host_ms"] = median(self._host_times(steps))
        else:
            answer["step_mem_gib"] = self._step_memory()
        if isinstance(self.step, EagerStep):
            answer |= self._forward_and_backward(self.step, steps)
            if self.device.type == "cuda" and self.provider == "eager":
                answer["rms_norm_kernels"] = self._rms_norm_kernels()
        if self.provider == "eager":
            answer["spread"] = self._spread()
        return answer

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _host_times(self, steps: int) -> list[float]:
        """Milliseconds until the call returns, each from an idle device."""
        spent = []
        for _ in range(steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.step()
            spent.append(1000 * (time.perf_counter() - start))
        return spent

    def _forward_and_backward(self, step: EagerStep, steps: int) -> dict[str, float]:
        kept: list[torch.Tensor] = []
        parts = [lambda: kept.append(step.forward()), lambda: kept.pop().backward(), step.update]
        forward, backward, _ = times(self.device, parts, steps)
        return {"fwd_ms": median(forward), "bwd_ms": median(backward)}

    def _peak_memory(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved() / 2**30
        return peak_mem_gib(self.device) - self.memory_before

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
        del self.step, self.parts
        unit = torch.finfo(torch.float32 if self.config.precision == "fp32" else torch.bfloat16).eps
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

    def _rms_norm_kernels(self) -> list[str]:
        """The CUDA kernels behind the model's first RMSNorm, forward and backward: torch may come with several."""
        norm = next(module for module in self.parts.model.modules() if isinstance(module, nn.RMSNorm))
        dtype = torch.float32 if self.config.precision == "fp32" else torch.bfloat16
        x = torch.randn(4096, *norm.normalized_shape, dtype=dtype, device=self.device, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is not torch.float32):
            dy = torch.ones_like(norm(x))  # a first call may compile the kernel
            return kernels_of(lambda: torch.autograd.grad(norm(x), x, dy))


if __name__ == "__main__":
    main()
