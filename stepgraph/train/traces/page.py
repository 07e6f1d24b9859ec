"""The page of a run: written when its first steps are done, and again at its end with what was measured."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgraph.config.device import device_name
from stepgraph.config.train import TrainConfig
from stepgraph.costs import links
from stepgraph.costs.hardware import ASSUMED, GPUS, known_gpu
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import Call
from stepgraph.inspect.account.account import account_of, spans_of
from stepgraph.inspect.account.page import PAGE, write_page
from stepgraph.parallel.pipeline.timeline import PipelineTime, Span, aligned
from stepgraph.parallel.ranks import Ranks
from stepgraph.run.spans import Spans
from stepgraph.step import CapturedStep
from stepgraph.train.records.folder import Summary, read_metrics

#: Points of a curve on the page, at most.
_POINTS = 300


class RunPage:
    """The page in a run's ``folder``. A failure here is reported in one line and does not end the run."""

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
        timed: PipelineTime | None = None,
    ) -> None:
        """Write the page again, with measurements. ``program``: None where nothing is captured. ``timed``: what
        the ranks of a pipeline computed in a step, drawn next to the forecast."""
        if self.account is None and program is not None:  # the run ended early
            self.write(program)
        if self.account is None or (summary.step_ms_median is None and profile is None):
            return
        on_gpu = self.device.type == "cuda"
        self.account["profile"] = profile
        measured = {
            "step_ms": summary.step_ms_median,
            "mfu": summary.mfu,
            "tokens_per_s": summary.tokens_per_s,
            "loss": summary.train_loss_nats,
            "val_loss": summary.val_loss_nats,
            "bubble": summary.bubble,
            # On a CPU it is that of the whole process.
            "peak_bytes": summary.peak_mem_gib * 2**30 if on_gpu else None,
        }
        finite = {name: v if v is None or math.isfinite(v) else None for name, v in measured.items()}
        self.account["head"]["measured"] = finite
        pipeline = self.account["pipeline"]
        if pipeline is not None and timed is not None:
            pipeline["measured"] = {"spans": spans_of(timed), "ns": round(timed.seconds * 1e9)}
        self._save(lambda: self.account | {"curves": curves(read_metrics(self.path.with_name("metrics.jsonl")))})

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


def curves(records: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """[last step, mean] of consecutive steps, for the metrics that the page draws."""

    def curve(name: str) -> list[list[float]]:
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        size = -(-len(points) // _POINTS) or 1
        groups = (points[i : i + size] for i in range(0, len(points), size))
        return [[group[-1][0], sum(value for _, value in group) / len(group)] for group in groups]

    return {name: curve(name) for name in ("loss", "val_loss", "tokens_per_s")}


#: The latest timed steps, among which the median is chosen.
_KEPT = 20


class Bubble:
    """The bubble of a run, as a forecast defines it: `PipelineTime.bubble` of all ranks' computations.

    ``measured``: the computations of the timed step with the median bubble among the latest, on the first data-parallel
    and tensor-parallel ranks; None until `measure`."""

    def __init__(self) -> None:
        self.measured: PipelineTime | None = None
        self._steps: deque[list[tuple[Call, float, float]]] = deque(maxlen=_KEPT)

    @property
    def share(self) -> float | None:
        return self.measured and self.measured.bubble

    def add(self, spans: Spans) -> None:
        """A timed step of this rank computed ``spans``."""
        self._steps.append(spans.seconds())

    def measure(self, ranks: Ranks, step: CapturedStep) -> str:
        """Choose the median step of all ranks; what to print, "" if no step was timed."""
        if not self._steps:
            return ""
        pipeline = step.pipeline
        gathered = ranks.gather(lambda: [[Span(pipeline.rank, *timed) for timed in spans] for spans in self._steps])
        replicas = len(gathered) // pipeline.ranks  # ranks that share a stage
        times = [
            PipelineTime([span for own in spans for span in own], pipeline.ranks)
            for spans in zip(*gathered[::replicas], strict=True)
        ]
        # Ranks do not begin a step at one time.
        times = sorted((aligned(time, pipeline.ranks_of) for time in times), key=lambda time: time.bubble)
        self.measured = time = times[len(times) // 2]
        longest = 1 - min(map(time.busy, range(time.ranks))) / time.seconds
        return f"bubble {time.bubble:.1%} of the schedule on average, {longest:.1%} on the rank that waits longest"
