"""The first step of several gloo ranks on one CPU, with Inductor: every rank compiles for itself, one compiles and the
others load, and all load what an earlier start saved.

Each start has an empty folder of saved steps (but the last, which has that of the second) and an empty cache of
Inductor's. Of ranks that compile the same C++ at once Inductor lets one do so and the others wait: what each of them
repeats is the passes and Inductor's own work.

``ready_s``: seconds from the start of the capture until the step can run, as `stepgraph train` prints them; ``wall_s``:
of the whole command with its two steps; ``cpu_s``: processor seconds of all its processes, which other work on the
machine changes little; ``load_before``: the load average when it began.

    python benchmarks/cold_start.py [--ranks 8] [--layers 2] [--repeats 3] [--json FILE]
    python benchmarks/cold_start.py --lower NAME=FOLDER ... [--repeats 3] [--json FILE]

``--lower``: the host's part of the first step of llama3-8b over two ranks, lowered for a simulated H200 by the sources
in each FOLDER, which take turns: processor seconds of trace, key and passes, and a hash of the rewritten graphs.
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


#: Lowers argv[1] as rank 0 of two.
LOWER = """
import dataclasses, hashlib, json, sys, time
import torch
from stepgraph import compat
from stepgraph.config.presets import PRESETS
from stepgraph.costs.hardware import GPUS
from stepgraph.inspect.forecast.forecast import fake_world, simulated_spec
from stepgraph.lower import rewrite, trace
from stepgraph.passes import Target
from stepgraph.run.saved.graphs import digest

job = dict(mesh="fsdp=2", precision="bf16", batch_size=1, seq_len=8192, inductor="full", fp8=sys.argv[1])
config = dataclasses.replace(PRESETS["llama3-8b"](), **job)
with fake_world(config) as mesh, compat.collector_off():
    spec, target = simulated_spec(config, mesh), Target.forecast(GPUS["h200"])
    at = [time.process_time()]
    traced = trace(spec, target)
    at.append(time.process_time())
    digest(traced.program)
    at.append(time.process_time())
    program = rewrite(traced.program, spec, target)
    at.append(time.process_time())
text = "".join(step.text() for step in program.graphs.values())
names = ("trace_cpu_s", "key_cpu_s", "passes_cpu_s")
hashed = hashlib.sha256(text.encode()).hexdigest()
print(json.dumps(dict(zip(names, (b - a for a, b in zip(at, at[1:])))) | {"graphs": hashed}))
"""


def lowered(trees: dict[str, str], repeats: int) -> list[dict[str, Any]]:
    """Rows of ``--lower``: for bf16 and fp8 the medians of each tree, what was measured, and ratios to the first tree.
    Raises ``RuntimeError`` where the trees give other graphs."""
    rows = []
    for fp8 in ("off", "tensorwise"):
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        for _ in range(repeats):
            for name, tree in trees.items():
                environment = os.environ | {"PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-c", LOWER, fp8]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree, check=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(fp8, name, done.stdout.splitlines()[-1], flush=True)
        if len({one["graphs"] for took in found.values() for one in took}) > 1:
            raise RuntimeError(f"the graphs differ: {found}")
        parts = [part for part in next(iter(found.values()))[0] if part != "graphs"]
        medians = {name: {p: statistics.median(one[p] for one in took) for p in parts} for name, took in found.items()}
        first = next(iter(medians.values()))
        ratios = {name: {p: own[p] / first[p] for p in parts} for name, own in medians.items()}
        rows.append({"job": "llama3-8b fsdp=2", "fp8": fp8, "medians": medians, "ratios": ratios, "runs": found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2, help="blocks of llama3-debug, which has six")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lower", nargs="+", metavar="NAME=FOLDER")
    options = parser.parse_args()
    if options.lower:
        trees = dict(one.split("=", 1) for one in options.lower)
        record = {"environment": environment(), "rows": lowered(trees, options.repeats)}
        if options.json is not None:
            kept = json.loads(options.json.read_text()) if options.json.exists() else {}
            options.json.write_text(json.dumps(kept | {"lowering": record}, indent=1) + "\n")
        return
    for row in measure(options.ranks, options.layers, options.repeats):
        if options.json is not None:
            options.json.write_text(json.dumps({"environment": environment(), "rows": [row]}, indent=1) + "\n")
    print(json.dumps(row["medians"]))


if __name__ == "__main__":
    main()
