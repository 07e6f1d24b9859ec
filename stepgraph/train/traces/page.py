"""The page of a run: written when its first steps are done, and again with what was measured at its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepgraph.config.device import device_name
from stepgraph.config.train import TrainConfig
from stepgraph.costs import links
from stepgraph.costs.hardware import ASSUMED, GPUS, known_gpu
from stepgraph.graph.program import StepProgram
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.account.page import PAGE, write_page
from stepgraph.train.records.folder import Summary


class RunPage:
    """The page in a run's ``folder``. A run goes on without it: what goes wrong here is said in one line."""

    def __init__(self, folder: Path, config: TrainConfig, device: torch.device, say: Callable[[str], None]):
        self.path, self.config, self.device, self.say = folder / PAGE, config, device, say
        self.account: dict[str, Any] | None = None

    def write(self, program: StepProgram) -> None:
        """Make the account of ``program`` and write the page."""
        self._save(lambda: self._account(program))

    def finish(self, program: StepProgram | None, summary: Summary, profile: dict[str, Any] | None) -> None:
        """Write the page again, with what was measured. ``program``: None where nothing was captured, or no more is."""
        if self.account is None and program is not None:  # the run ended early
            self.write(program)
        if self.account is None or (summary.step_ms_median is None and profile is None):
            return
        on_gpu = self.device.type == "cuda"
        self.account["profile"] = profile
        self.account["head"]["measured"] = {
            "step_ms": summary.step_ms_median,
            "mfu": summary.mfu,
            "tokens_per_s": summary.tokens_per_s,
            # On a CPU it is the whole process's.
            "peak_bytes": summary.peak_mem_gib * 2**30 if on_gpu else None,
        }
        self._save(lambda: self.account)

    def _account(self, program: StepProgram) -> dict[str, Any]:
        groups = {}
        if self.config.mesh is not None:
            groups = links.groups_of(node for step in program.graphs.values() for node in step.graph.nodes)
        known = known_gpu(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        gpu = known if known in GPUS.values() else ASSUMED
        return account_of(program, self.config, gpu, groups, device=device_name(self.device))

    def _save(self, make: Callable[[], dict[str, Any]]) -> None:
        try:
            self.account = make()
            write_page(self.path, self.account)
        except Exception as failure:  # a page is not worth a run
            self.say(f"warning: {self.path} could not be written: {type(failure).__name__}: {failure}")
