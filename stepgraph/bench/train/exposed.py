"""Splits a GPU's time, from a profiler's trace, into compute, communication (hidden or exposed) and idle time."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Span = tuple[float, float]  # start, end

#: Categories of a Chrome trace that are work on the GPU, whatever stream it is on.
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

#: What moves data between GPUs: NCCL's kernels, copies from GPU to GPU, symmetric memory's kernels and signals, and
#: those of our exchange of experts' rows (`kernels.comm.expert_rows_triton`).
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
