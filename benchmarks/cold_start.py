"""The first step of several gloo ranks on one CPU, with Inductor: every rank compiles for itself, one compiles and the
others load, and all load what an earlier start saved.

Each start has an empty folder of saved steps (but the last, which has that of the second) and an empty cache of
Inductor's. Of ranks that compile the same C++ at once Inductor lets one do so and the others wait: what each of them
repeats is the passes and Inductor's own work.

``ready_s``: seconds from the start of the capture until the step can run, as `stepgraph train` prints them; ``wall_s``:
of the whole command with its two steps; ``cpu_s``: processor seconds of all its processes, which other work on the
machine changes little; ``load_before``: the load average when it began.

    python benchmarks/cold_start.py [--ranks 8] [--layers 2] [--repeats 3] [--json FILE]
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepgraph.config.environment import environment

ROOT = Path(__file__).parents[1]
WAYS = ("each", "one", "saved")


def options_of(ranks: int, layers: int) -> list[str]:
    """The command line of every start but for its folders."""
    words = ["--data", "stdlib", "--model.n-layers", layers, "--batch-size", 2, "--device", "cpu", "--inductor", "full"]
    words += ["--steps", 2, "--warmup-steps", 0, "--val-every", 0, "--val-batches", 1, "--checkpoint-every", 0]
    return [str(word) for word in [*words, "--mesh", f"fsdp={ranks}", "--nproc", ranks]]


def start(words: list[str], step: str, out: Path, inductor: Path) -> dict[str, float]:
    """Seconds of one start. Raises ``RuntimeError`` with what it printed if it fails."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(inductor), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    began, load, cpu = time.perf_counter(), os.getloadavg()[0], cpu_of_children()
    done = subprocess.run(
        [sys.executable, "-m", "stepgraph", "train", *words, "--saved-steps", step, "--out", str(out)],
        capture_output=True,
        text=True,
        env=os.environ | caches,
    )
    ready = re.search(r"^ready in ([\d.]+) s", done.stdout, re.M)
    if done.returncode or ready is None:
        raise RuntimeError(f"status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    wall, cpu = time.perf_counter() - began, cpu_of_children() - cpu
    return {"ready_s": float(ready[1]), "wall_s": wall, "cpu_s": cpu, "load_before": load}


def cpu_of_children() -> float:
    """Processor seconds of the processes that this one and theirs have started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(ranks: int, layers: int, repeats: int) -> Iterator[dict[str, Any]]:
    """The row so far after each repeat, in which the ways take turns: medians, and all that was measured."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    words = options_of(ranks, layers)
    for repeat in range(1, repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            steps = str(Path(folder, "steps"))
            for way in WAYS:
                step = "off" if way == "each" else steps
                took = start(words, step, Path(folder, way), Path(folder, f"inductor-{way}"))
                found[way].append(took)
                print(way, json.dumps(took), flush=True)
        medians = {
            way: {name: statistics.median(one[name] for one in took) for name in took[0]} for way, took in found.items()
        }
        yield {"ranks": ranks, "layers": layers, "repeats": repeat, "medians": medians, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2, help="blocks of llama3-debug, which has six")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for row in measure(options.ranks, options.layers, options.repeats):
        if options.json is not None:
            options.json.write_text(json.dumps({"environment": environment(), "rows": [row]}, indent=1) + "\n")
    print(json.dumps(row["medians"]))


if __name__ == "__main__":
    main()
