"""``--profile 10:13``: a trace of some steps, its kernels named by node and module, and measured times for the page.

A CUDA graph does not say for which node it launches a kernel. One step before it is recorded runs node by node instead,
each node in a range of its own: a replay's k-th kernel of a name belongs to the node that launched the k-th then.
"""

import bisect
import contextlib
import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, record_function

import stepgraph
from stepgraph import compat
from stepgraph.config.train import PLAIN_STEP
from stepgraph.graph.provenance import provenance
from stepgraph.inductor.regional import nodes_of

#: The file in a run folder, for ui.perfetto.dev and chrome://tracing.
FILE = "trace.json.gz"
#: The file of `MemorySnapshot` in a run folder, for https://pytorch.org/memory_viz.
SNAPSHOT = "memory_snapshot.pickle"


class StepProfile:
    """Profiles ``steps`` of a run, counted as the run counts them (see `config.train.parse_steps`). Every rank has one;
    ranks that write no trace run the same steps node by node. ``noted``: keeps an error of writing it."""

    def __init__(
        self,
        steps: tuple[int, int],
        device: torch.device,
        folder: Path,
        writes: bool,
        noted: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        (self.first, self.end), self.device, self.path, self.writes = steps, device, folder / FILE, writes
        self._noted = noted
        self.order: dict[str, list[str]] | None = None
        self.result: dict[str, Any] | None = None
        self._profiler: torch.profiler.profile | None = None
        self._launched = 0

    def disturbs(self, step: int) -> bool:
        """Whether profiling changes the time of ``step``."""
        return self.first - 1 <= step <= self.end

    @contextlib.contextmanager
    def around(self, step: int, captured: stepgraph.CapturedStep) -> Iterator[None]:
        """Around the launch of ``step``."""
        self._launched += 1
        replays = any(graph.recording is not None for graph in captured.graphs.values())
        learns = replays and self._launched == PLAIN_STEP
        if self.writes and (learns or step == self.first):
            self._start()
        inside = self.first <= step < self.end
        with _ranges(captured) if learns or (inside and not replays) else contextlib.nullcontext():
            yield
        if self._profiler is None:
            return
        with self._noted():
            if learns:
                self.order = sequence(Trace(self._stop()))
            elif step == self.end - 1:
                self._write(self._stop(), captured)

    def _start(self) -> None:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _stop(self) -> list[dict[str, Any]]:
        """The events since `_start`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            self._profiler = None
            return json.loads(file.read_text())["traceEvents"]

    def _write(self, events: list[dict[str, Any]], captured: stepgraph.CapturedStep) -> None:
        trace, steps = Trace(events), self.end - self.first
        names = labels(trace, steps, self.order)
        nodes = measured(trace, names, steps)
        for name, graph in captured.graphs.items():
            for node in graph.executable.graph.nodes if isinstance(graph.executable, fx.GraphModule) else ():
                inside = nodes_of(node)
                found = nodes.get(f"{name}/{inside[0]}")
                if found is not None:
                    found["of"] = len(inside)
        whole = sum(kernel["dur"] for kernel in trace.kernels)
        named = sum(kernel["dur"] for kernel, where in zip(trace.kernels, names, strict=True) if where)
        self.result = {
            "steps": [self.first, self.end],
            "on": "GPU" if trace.kernels else "CPU",
            "nodes": nodes,
            "kernel_ns": round(whole * 1e3 / steps),
            "named_ns": round(named * 1e3 / steps),
        }
        text = json.dumps({"traceEvents": renamed(events, trace, names)}, separators=(",", ":"))
        self.path.write_bytes(gzip.compress(text.encode(), 5))


@contextlib.contextmanager
def _ranges(captured: stepgraph.CapturedStep) -> Iterator[None]:
    """Inside, the step runs node by node, each in a range that a trace shows."""
    with contextlib.ExitStack() as open_range:

        def on_node(graph: str, node: fx.Node) -> None:
            open_range.close()
            found = provenance(node)
            inside = label(graph, nodes_of(node)[0], found.path if found else "")
            open_range.enter_context(record_function(inside))

        with captured.watched(on_node):
            yield


class MemorySnapshot:
    """``--memory-snapshot``: records allocations from now on. A snapshot holds Python's stack of each."""

    def __init__(self, folder: Path):
        self.path = folder / SNAPSHOT
        self.recording = True
        compat.record_memory(True)

    def write(self) -> None:
        """Write the snapshot and record no more; does nothing the second time."""
        if self.recording:
            self.recording = False
            compat.dump_memory(self.path)
            compat.record_memory(False)


Event = Mapping[str, Any]

#: Begins the name of the range around a node: ``stepgraph:GRAPH/NODE|MODULE``.
PREFIX = "stepgraph:"
#: Used in place of kernel names for a node that runs on the host.
_HOST = ""
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def label(graph: str, node: str, module: str) -> str:
    """The name of the range around ``node``."""
    return f"{PREFIX}{graph}/{node}|{module}"


class Trace:
    """The events of a Chrome trace as torch.profiler exports it: microseconds."""

    def __init__(self, events: Iterable[Event]):
        whole = [e for e in events if e.get("ph") == "X"]
        self.ranges = sorted(
            (e for e in whole if str(e["name"]).startswith(PREFIX) and e.get("cat") == "user_annotation"),
            key=lambda e: e["ts"],
        )
        self.kernels = sorted((e for e in whole if e.get("cat") in _DEVICE_WORK), key=lambda e: e["ts"])
        launches = (e for e in whole if e.get("cat") in ("cuda_runtime", "cuda_driver"))
        self._launch = {e["args"]["correlation"]: e for e in launches if "correlation" in e.get("args", {})}
        self._starts = [e["ts"] for e in self.ranges]

    def range_of(self, kernel: Event) -> str | None:
        """The range in which the host launched ``kernel``."""
        launch = self._launch.get(kernel.get("args", {}).get("correlation"))
        at = bisect.bisect_right(self._starts, launch["ts"]) - 1 if launch else -1
        inside = at >= 0 and launch["ts"] <= self.ranges[at]["ts"] + self.ranges[at]["dur"]
        return self.ranges[at]["name"] if inside else None

    def is_replayed(self, kernel: Event) -> bool:
        """Whether a CUDA graph launched it."""
        launch = self._launch.get(kernel.get("args", {}).get("correlation"))
        return launch is not None and "GraphLaunch" in launch["name"]


def sequence(trace: Trace) -> dict[str, list[str]]:
    """For each kernel's name the ranges that launch it, in the order in which they do, in one step node by node."""
    found: dict[str, list[str]] = defaultdict(list)
    for kernel in trace.kernels:
        where = trace.range_of(kernel)
        if where is not None:
            found[kernel["name"]].append(where)
    return found


def labels(trace: Trace, steps: int, order: Mapping[str, Sequence[str]] | None) -> list[str | None]:
    """The range of each kernel of ``trace``, in order; None for one that no node is known for.

    ``order``: what `sequence` gave for a step node by node, where CUDA graphs were replayed ``steps`` times. A kernel
    that a replay launches more or less often than that step did has no name: nothing is guessed.
    """
    counts = Counter(k["name"] for k in trace.kernels if trace.is_replayed(k))
    seen: Counter[str] = Counter()
    found: list[str | None] = []
    for kernel in trace.kernels:
        name, where = kernel["name"], trace.range_of(kernel)
        if where is None and order and trace.is_replayed(kernel):
            known = order.get(name, ())
            if known and counts[name] == steps * len(known):
                where = known[seen[name] % len(known)]
            seen[name] += 1
        found.append(where)
    return found


def measured(trace: Trace, names: Sequence[str | None], steps: int) -> dict[str, dict[str, Any]]:
    """``GRAPH/NODE`` -> ``{"ns", "kernels": [[name, ns], ...]}`` of one step, the most expensive kernel first.

    On a GPU the times of kernels. Without any, as on a CPU, the time that the host spent in the node's range.
    """
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    if trace.kernels:
        for kernel, where in zip(trace.kernels, names, strict=True):
            if where is not None:
                kernels[where][kernel["name"]] += kernel["dur"]
    else:
        for event in trace.ranges:
            kernels[event["name"]][_HOST] += event["dur"]
    result = {}
    for where, spent in kernels.items():
        parts = [[name[:120], round(us * 1e3 / steps)] for name, us in spent.most_common() if name != _HOST]
        result[where.removeprefix(PREFIX).partition("|")[0]] = {
            "ns": round(sum(spent.values()) * 1e3 / steps),
            "kernels": parts,
        }
    return result


def renamed(events: Iterable[Event], trace: Trace, names: Sequence[str | None]) -> list[dict[str, Any]]:
    """``events`` with each kernel called ``NODE MODULE: KERNEL``, for a viewer."""
    new = {id(kernel): where for kernel, where in zip(trace.kernels, names, strict=True) if where is not None}
    result = []
    for event in events:
        where = new.get(id(event))
        if where is None:
            result.append(dict(event))
            continue
        node, _, module = where.removeprefix(PREFIX).partition("|")
        args = {**event.get("args", {}), "node": node, "module": module, "kernel": event["name"]}
        shown = " ".join(filter(None, [node.partition("/")[2], module]))
        result.append({**event, "name": f"{shown}: {event['name']}", "args": args})
    return result
