"""The page of a run: written when its first steps are done, and again with what was measured at its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepgraph.config.device import device_name
from stepgraph.config.train import TrainConfig
from stepgraph.costs import links
from stepgraph.costs.hardware import ASSUMED, GPUS, known_gpu
from stepgraph.graph.calls import Call, Kind
from stepgraph.graph.program import StepProgram
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.account.page import PAGE, write_page
from stepgraph.inspect.account.pipeline import spans_of
from stepgraph.parallel.pipeline.timeline import PipelineTime, Span
from stepgraph.train.records.folder import Summary

#: The chart of a pipeline's schedule in a run folder.
SCHEDULE = "schedule.png"


class RunPage:
    """The page in a run's ``folder``. A run goes on without it: what goes wrong here is said in one line."""

    def __init__(self, folder: Path, config: TrainConfig, device: torch.device, say: Callable[[str], None]):
        self.path, self.config, self.device, self.say = folder / PAGE, config, device, say
        self.account: dict[str, Any] | None = None

    def write(self, program: StepProgram) -> None:
        """Make the account of ``program`` and write the page."""
        self._save(lambda: self._account(program))

    def finish(
        self,
        program: StepProgram | None,
        summary: Summary,
        profile: dict[str, Any] | None,
        last: PipelineTime | None = None,
    ) -> None:
        """Write the page again, with what was measured. ``program``: None where nothing was captured, or no more is.
        ``last``: what the ranks of a pipeline computed in the last step, which is drawn beside its forecast."""
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
            "bubble": summary.bubble,
            # On a CPU it is the whole process's.
            "peak_bytes": summary.peak_mem_gib * 2**30 if on_gpu else None,
        }
        pipeline = self.account["pipeline"]
        if pipeline is not None and last is not None:
            pipeline["measured"] = {"spans": spans_of(last), "ns": round(last.seconds * 1e9)}
        self._save(lambda: self.account)
        if pipeline is not None and last is not None:
            self._draw(pipeline, last)

    def _draw(self, pipeline: dict[str, Any], last: PipelineTime) -> None:
        spans = [
            Span(rank, Call(Kind(kind), stage, microbatch), start / 1e9, end / 1e9)
            for rank, kind, stage, microbatch, start, end in pipeline["spans"]
        ]
        times = {
            f"forecast for {self.account['head']['gpu']}": PipelineTime(spans, last.ranks),
            f"measured on {self.account['head']['device']}, the last step": last,
        }
        try:
            from stepgraph.inspect.forecast.plot import measured_chart  # matplotlib is slow to load

            measured_chart(self.config, times, self.path.with_name(SCHEDULE))
        except Exception as failure:  # nor is a chart
            self.say(f"warning: {SCHEDULE} could not be drawn: {type(failure).__name__}: {failure}")

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
