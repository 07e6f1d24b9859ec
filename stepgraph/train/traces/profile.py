"""``--profile 10:13``: a trace of some steps, its kernels named by node and module, and measured times for the page."""

import contextlib
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
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
from stepgraph.train.traces.names import Trace, label, labels, measured, renamed, sequence

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
    """``--memory-snapshot``: records allocations from now on. A snapshot holds Python's stack of each, some 100 MB for
    a large model."""

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
