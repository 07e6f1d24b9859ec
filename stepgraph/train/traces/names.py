"""Names the kernels of a trace by the node and module that launched them.

A CUDA graph does not say for which node it launches a kernel. One step before it is recorded runs node by node
instead, each node inside a range of its own: the k-th kernel of a name in a replay is for the node that launched the
k-th kernel of that name then.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]

#: Begins the name of the range around a node: ``stepgraph:GRAPH/NODE|MODULE``.
PREFIX = "stepgraph:"
#: Stands for the kernels of a node that runs on the host.
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
