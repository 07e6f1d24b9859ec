"""One rank of one provider of ``stepgraph bench train``, started by torchrun with a job's path.

The job is a JSON file with ``provider``, ``config``, ``device``, ``balanced``, ``started`` (Unix time) and ``trace``
(path or null). Rank 0 writes ``answer.json`` there, once when the steps are timed and again when some are profiled;
a rank that fails leaves ``error-RANK.json``.
"""

import contextlib
import gzip
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from stepgraph.bench.harness import host_times, mark, spans
from stepgraph.bench.results import finite, in_one_line
from stepgraph.bench.train.providers import PROVIDERS, CapturedTraining, Training
from stepgraph.config.device import peak_mem_gib
from stepgraph.config.environment import package_versions
from stepgraph.config.train import TrainConfig
from stepgraph.errors import end_process, write_text
from stepgraph.run.watch.watch import Watch

#: Steps after the first that are not timed: CUDA graphs are recorded by then, and clocks have settled.
WARMUP_STEPS = 4

#: Steps of which the host's time is taken.
HOST_STEPS = 5

#: Steps under the profiler, after all others.
TRACED_STEPS = 3


def main() -> None:
    """Measures the job that the command line names."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    stack = contextlib.ExitStack()  # never closed: see `_leave`

    def fail(error: str, trace: str = "") -> None:
        _write(path.with_name(f"error-{rank}.json"), {"error": f"rank {rank}: {error}"[:1000], "trace": trace})

    try:
        config, device = TrainConfig.from_json(job["config"]), torch.device(job["device"])
        provider = PROVIDERS[job["provider"]]
        answer: dict[str, Any] = {"start_s": time.time() - job["started"]}
        watch = Watch(rank, int(os.environ["WORLD_SIZE"]), device.type, job["hang_s"], job["hang_s"], fail)
        stack.enter_context(watch)
        training = stack.enter_context(provider.open(config, device, job["balanced"]))
        if isinstance(training, CapturedTraining):
            watch.watches(training.captured)
        answer |= {"build_s": training.build_s, "versions": _versions(device)}
        answer |= timed(training, config, device, job["started"], watch)
        if rank == 0:
            _write(path.with_name("answer.json"), answer)
        if device.type == "cuda":
            watch.at("the profile", limited=False)
            answer |= profiled(training, job["trace"], rank)
            if rank == 0:
                _write(path.with_name("answer.json"), answer)
        dist.barrier()  # rank 0 has written
    except BaseException as error:
        fail(in_one_line(error), traceback.format_exc())
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Ends the process as it is. Closing its process groups may take for ever: after a failure the other ranks wait in
    a collective, and NCCL waits for the end of every CUDA graph that holds its kernels.

    Source: pytorch issue 115388.
    """
    end_process(status)


def timed(
    training: Training, config: TrainConfig, device: torch.device, started: float, watch: Watch
) -> dict[str, Any]:
    """The first step, some to warm up, and ``config.steps`` that are timed: queued one after another, as a training
    loop does, no result read in between. The same on every rank."""
    begin = time.perf_counter()
    watch.launches(1)
    losses = [training.step(read=True)]
    first_call_s, first_step_s = time.perf_counter() - begin, time.time() - started
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    watch.warmed(first_call_s)
    for _ in range(WARMUP_STEPS):
        training.step()
    _wait(device)
    dist.barrier()
    marks = [mark(device)]
    for _ in range(config.steps):
        training.step()
        marks.append(mark(device))
        watch.launches(len(marks))
    times = spans(marks)
    losses.append(training.step(read=True))
    host = host_times(training.step, HOST_STEPS, dist.barrier) if device.type == "cuda" else []
    compile_s = training.compile_s
    if training.capture_s is None:
        compile_s = first_call_s - median(times) / 1e3
    mine = {"times": times, "first": first_step_s, "mem": peak_mem_gib(device), "host": host}
    mine["reserved"] = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None
    ranks = _gathered(mine)
    return {
        "step_ms_all": [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)],
        "rank_step_ms": [median(rank["times"]) for rank in ranks],
        "first_step_s": max(rank["first"] for rank in ranks),
        "capture_s": training.capture_s,
        "passes": training.passes,
        "compile_s": compile_s,
        "host_ms": max(median(rank["host"]) for rank in ranks) if host else None,
        "peak_mem_gib": max(rank["mem"] for rank in ranks),
        "peak_reserved_gib": max(rank["reserved"] for rank in ranks) if mine["reserved"] is not None else None,
        "losses": [finite(loss) for loss in losses],
        "steps_taken": 2 + WARMUP_STEPS + config.steps,
    }


def profiled(training: Training, trace: str | None, rank: int) -> dict[str, Any]:
    """``TRACED_STEPS`` under torch.profiler, which records only the GPU: the host is slowed least. ``trace``: where
    rank 0 keeps the Chrome trace, gzipped.

    A step before them is not recorded: ranks take different times to start, for which others would seem to communicate.
    """
    _wait(torch.device("cuda"))
    dist.barrier()
    host = dist.new_group(backend="gloo")  # whose barrier is no work on the GPU
    once = schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=once) as profiler:
        training.step()
        torch.cuda.synchronize()
        profiler.step()
        dist.barrier(host)
        for _ in range(TRACED_STEPS):
            training.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        data = path.read_bytes()
    if trace is not None and rank == 0:
        Path(trace).write_bytes(gzip.compress(data))
    events = json.loads(data)["traceEvents"]
    exposures = [found.to_json(TRACED_STEPS) for found in _gathered(exposure(events))]
    return {
        "exposure": max(exposures, key=lambda found: found["share"]),
        "exposure_all": exposures,
        "kernels_ms": kernel_times(events, TRACED_STEPS),
    }


def _gathered(value: Any) -> list[Any]:
    """Every rank's ``value``, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _versions(device: torch.device) -> dict[str, Any]:
    versions: dict[str, Any] = package_versions()
    if "torchtitan" in sys.modules:
        versions["torchtitan"] = importlib.metadata.version("torchtitan")
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _write(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, allow_nan=False))  # never read half-written


Span = tuple[float, float]  # start, end

#: Categories of a Chrome trace that are work on the GPU, whatever stream it is on.
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

#: What moves data between GPUs: NCCL's kernels, copies from GPU to GPU, symmetric memory's kernels and signals, and
#: those of our exchange of expert rows (`kernels.comm.expert_rows_triton`).
_COMMUNICATION = re.compile(
    r"nccl|PtoP|multimem|(one|two)_shot_all_reduce|(barrier|(put|wait)_signal)_kernel|^_(send|share|tell|wait)_kernel$"
)


@dataclass(frozen=True)
class Exposure:
    """One GPU's time over a traced window, ms, all streams together."""

    window_ms: float
    """From the first kernel's start to the last one's end."""
    communication_ms: float
    """While at least one kernel communicates."""
    exposed_ms: float
    """While kernels communicate and none computes: waiting for other ranks is in it."""
    idle_ms: float
    """While nothing runs: the host is late, or the streams wait for each other."""

    @property
    def share(self) -> float:
        """Exposed communication as a share of the window, in [0, 1]."""
        return self.exposed_ms / self.window_ms

    def to_json(self, steps: int) -> dict[str, float]:
        """The figures of one step, the window being ``steps`` long."""
        return {name: value / steps for name, value in asdict(self).items()} | {"share": self.share}


def exposure(events: Iterable[Mapping[str, Any]]) -> Exposure:
    """How much of the communication in ``events`` no computation covers.

    ``events``: the ``traceEvents`` of a Chrome trace of one process with one GPU, as torch.profiler exports it: of each
    complete event (``ph`` X) ``cat``, ``name``, and ``ts`` and ``dur`` in microseconds. Streams do not matter: a
    collective is hidden where any other kernel runs. Raises ``ValueError`` for a trace without work on a GPU.
    """
    communicating, computing = [], []
    for event in device_events(events):
        kind = communicating if _COMMUNICATION.search(event["name"]) else computing
        kind.append((event["ts"], event["ts"] + event["dur"]))
    if not communicating and not computing:
        raise ValueError("the trace holds no work on a GPU: profile with ProfilerActivity.CUDA")
    both = union([*communicating, *computing])
    window = both[-1][1] - both[0][0]
    covered = length(union(computing))
    return Exposure(
        window_ms=window / 1e3,
        communication_ms=length(union(communicating)) / 1e3,
        exposed_ms=(length(both) - covered) / 1e3,
        idle_ms=(window - length(both)) / 1e3,
    )


def kernel_times(events: Iterable[Mapping[str, Any]], steps: int, most: int = 30) -> dict[str, float]:
    """ms a step of the ``most`` expensive kernels by name, overlap not taken out; the window is ``steps`` long."""
    total: Counter[str] = Counter()
    for event in device_events(events):
        total[event["name"][:120]] += event["dur"]
    return {name: us / 1e3 / steps for name, us in total.most_common(most)}


def device_events(events: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Those of ``events`` that are work on a GPU."""
    return (event for event in events if event.get("ph") == "X" and event.get("cat") in _DEVICE_WORK)


def union(spans: Iterable[Span]) -> list[Span]:
    """The parts of the line that ``spans`` cover, in order, without overlaps."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Sequence[Span]) -> float:
    """The length of ``spans``, which do not overlap."""
    return sum(end - start for start, end in spans)


if __name__ == "__main__":
    main()
