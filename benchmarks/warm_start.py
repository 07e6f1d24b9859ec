"""The first step of an unmodified model of ``transformers``, cold and from a saved step: each start is a process of its
own; the first has an empty folder of saved steps and empty compile caches, the others have what the first left. All
have our bytecode, which an installed package has too.

Seconds: ``imports``, ``build`` (model and batch on the device), ``capture`` (until `stepgraph.capture` returns), its
parts ``trace``, ``compile`` by Inductor and the ``rest`` (passes and saving, or key and loading),
``first_call`` (until its loss is there), ``to_first_step`` (the last two) and ``process`` (all of them). ``loaded``: as
``step.saved`` says, and ``notes``, what else it says; ``compiled``: what Inductor did. The first losses must be the
same bits; those after an update be near, as attention's backward on a GPU may add in another order each time.

    python benchmarks/warm_start.py [MODEL] [--starts 3] [--device cuda] [--layers N] [--json FILE]

MODEL is one of `stepgraph bench model`; ``--layers`` makes it smaller.
"""

import argparse
import compileall
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOSS_TOLERANCE = 1e-4


def parts_of(step: Any, whole: float) -> dict[str, float]:
    """Seconds of a capture by part: tracing, Inductor, and passes with all else."""
    compiling = sum(report.compile_s or 0.0 for report in step.report)
    return {"trace": step.graph.capture_s, "compile": compiling, "rest": whole - step.graph.capture_s - compiling}


def start(name: str, device: str, layers: int | None, folder: str) -> dict[str, Any]:
    """One start, in this process."""
    began = time.perf_counter()
    import torch

    import stepgraph
    from stepgraph.bench.harness import MAX_GRAD_NORM
    from stepgraph.bench.model import models
    from stepgraph.bench.model.child import fused_adamw, loss_of
    from stepgraph.config.environment import environment

    imported = time.perf_counter()
    if layers is not None:
        sizes = models.MODELS[name].sizes | {"num_hidden_layers": layers}
        models.MODELS[name] = replace(models.MODELS[name], sizes=sizes)
    model, batch = models.build(name, torch.device(device)), models.batch_of(name, torch.device(device))
    if device == "cuda":
        torch.cuda.synchronize()
    built = time.perf_counter()
    optimizer = fused_adamw(list(model.parameters()))
    step = stepgraph.capture(model, loss_of, batch, optimizer, max_grad_norm=MAX_GRAD_NORM, saved=folder)
    captured = time.perf_counter()
    parts = parts_of(step, captured - built)
    compiled = [report.summary for report in step.report if report.name == "inductor"]
    losses = [step(batch).item()]
    ran = time.perf_counter()
    losses += [step(batch).item() for _ in range(3)]
    return {
        "loaded": step.saved.loaded,
        "notes": step.saved.notes,
        "compiled": compiled,
        "imports": imported - began,
        "build": built - imported,
        "capture": captured - built,
        **parts,
        "first_call": ran - captured,
        "to_first_step": ran - built,
        "process": ran - began,
        "losses": losses,
        "environment": environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-0.6b")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(start(options.model, options.device, options.layers, options.child)))
        return
    compileall.compile_dir(ROOT / "stepgraph", quiet=1)
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name)) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, __file__, *sys.argv[1:], "--child", str(Path(folder, "steps"))]
        for _ in range(options.starts):
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, env=os.environ | caches | {"PYTHONPATH": paths}
            )
            if done.returncode:
                raise SystemExit(f"status {done.returncode}: {' '.join(command)}")
            starts.append(json.loads(done.stdout.splitlines()[-1]))
            found = starts[-1]
            seconds = ", ".join(f"{key} {value:.1f}" for key, value in found.items() if isinstance(value, float))
            print(f"loaded {found['loaded']}: {seconds} s", *found["notes"], *found["compiled"], sep="\n  ", flush=True)
    first, *others = [one["losses"] for one in starts]
    for losses in others:
        if losses[0] != first[0] or not all(map(partial(math.isclose, rel_tol=LOSS_TOLERANCE), losses, first)):
            raise SystemExit(f"losses differ: {first}, {losses}")
    if options.json:
        where, *_ = [one.pop("environment") for one in starts]
        record = {"environment": where, "model": options.model, "layers": options.layers, "starts": starts}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
