"""Runs one provider and one model in its own process: ``python -m stepgraph.bench.model.child``.

Its requests and answers: `stepgraph.bench.lane`.
"""

import os
from pathlib import Path
from typing import Any

import torch

from stepgraph.bench.harness import Parts, Run
from stepgraph.bench.lane import serve, take_job
from stepgraph.bench.model import models
from stepgraph.bench.model.profile import kernel_table, kernels_of, limits_ms, profiled, where
from stepgraph.bench.model.providers import PROVIDERS, parts_of
from stepgraph.config.environment import package_version


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


if __name__ == "__main__":
    main()
