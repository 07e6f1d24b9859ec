"""One provider and one model in a process of its own: ``python -m stepgraph.bench.model.child``.

Its requests and answers: `stepgraph.bench.lane`.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch

from stepgraph.bench.lane import serve, take_job
from stepgraph.bench.model import models
from stepgraph.bench.model.profile import kernel_table
from stepgraph.bench.model.providers import PROVIDERS, Step, UnavailableError
from stepgraph.bench.progress import phase
from stepgraph.bench.results import finite
from stepgraph.config.device import peak_mem_gib
from stepgraph.config.environment import package_version, package_versions

#: Steps whose losses are compared, before anything is timed. They also warm up: CUDA graphs are recorded by the third.
FIRST_STEPS = 5


def main() -> None:
    """Answers requests until stdin ends."""
    job, answer = take_job()
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    run = Run(job["model"], job["provider"], torch.device(job["device"]))
    serve(run, answer)


class Run:
    """The measurements of one provider, in the order of the methods."""

    def __init__(self, model: str, provider: str, device: torch.device):
        self.model, self.provider, self.device = model, provider, device
        self.memory_before = 0.0
        self.step: Step

    def first_steps(self) -> dict[str, Any]:
        """Builds the step and runs ``FIRST_STEPS`` of it; or says why the provider cannot do this model."""
        phase("build")
        model, batch = models.build(self.model, self.device), models.batch_of(self.model, self.device)
        params = sum(parameter.numel() for parameter in model.parameters())
        self._forget_peak()
        start = time.perf_counter()
        try:
            self.step = PROVIDERS[self.provider](model, batch)
        except UnavailableError as error:
            return {"unavailable": str(error)}
        phase("warm up")
        losses = [self.step().item()]
        first_step_s = time.perf_counter() - start
        losses += [self.step().item() for _ in range(FIRST_STEPS - 1)]
        packages = {name: package_version(name) for name in ("transformers", "liger-kernel")}
        return {
            "params": params,
            "losses": [finite(loss) for loss in losses],
            "first_step_s": first_step_s,
            "versions": package_versions() | packages | {"cuda": torch.version.cuda},
            **self.step.figures(),
        }

    def _forget_peak(self) -> None:
        """What building the model took is not the step's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            self.memory_before = peak_mem_gib(self.device)

    def finish(self, _: dict[str, Any]) -> dict[str, Any]:
        """Peak memory so far, GiB."""
        if self.device.type != "cuda":
            return {"peak_mem_gib": peak_mem_gib(self.device) - self.memory_before}
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return {"peak_mem_gib": reserved / 2**30, "peak_allocated_gib": allocated / 2**30}

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Writes where a step spends its time."""
        table = kernel_table(self.step, self.device, f"{self.model}, {self.provider}")
        Path(request["path"]).write_text(table, encoding="utf-8")
        return {}


if __name__ == "__main__":
    main()
