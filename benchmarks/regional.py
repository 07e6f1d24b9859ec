"""Seconds that ``--inductor regional`` compiles the norms, rotary embeddings and gated products of a preset.

    python benchmarks/regional.py PRESET [--json FILE]

Forward, loss and backward of the model in bf16, captured as by `stepgraph.capture`, norms by Inductor. Cold: an
empty cache; warm: a second process, which loads what the first one compiled. Attention is one operator of a library,
and not compiled.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import stepgraph
from stepgraph import passes
from stepgraph.config import build
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment
from stepgraph.config.presets import PRESETS
from stepgraph.models import next_token_loss

LENGTH = 2048


def compile_once(preset: str) -> dict[str, float | str]:
    """What the `inductor` pass of this process took and says."""
    device = pick_device("auto")
    config = PRESETS[preset]()
    config = dataclasses.replace(config, precision="bf16", batch_size=1, seq_len=min(LENGTH, config.seq_len))
    model = build.empty_model(config, device)
    batch = build.example_batch(config, device)
    chosen = passes.configured("default", inductor="regional", norm="inductor", cuda_graph=False)
    step = stepgraph.capture(model, next_token_loss, batch, passes=chosen)
    report = next(report for report in step.report if report.name == "inductor")
    return {"compile_s": round(report.compile_s, 2), "report": report.line()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(compile_once(options.preset)))
        return
    result = {"preset": options.preset, "environment": environment()}
    with tempfile.TemporaryDirectory() as cache:
        for run in ("cold", "warm"):
            command = [sys.executable, __file__, options.preset, "--child"]
            folders = {name: cache for name in ("TORCHINDUCTOR_CACHE_DIR", "STEPGRAPH_CACHE")}
            done = subprocess.run(command, env=os.environ | folders, stdout=subprocess.PIPE, text=True, check=True)
            result[run] = json.loads(done.stdout.splitlines()[-1])
            print(run, result[run]["compile_s"], "s", result[run]["report"], flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
