"""What training in fp8 costs in loss: the same run in bf16 and with each recipe, from several seeds, on real text.

On a CPU the products are emulated: values rounded to fp8 bit for bit, products summed in fp32, so what tensor cores sum
in shorter accumulators is not in it. Every linear layer but the head is in fp8, also those that are too small to gain.
``loss``: means of ten steps. ``val_loss``: of the whole validation split, after the last step. ``spread``: the sample
standard deviation over seeds.

    python benchmarks/fp8_curve.py [PRESET] [--steps N] [--seeds N] [--recipes tensorwise rowwise] [--experts]
        [--device cpu] [--json FILE] [--at-once N] [--train "..."]
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from stepgraph.config.environment import environment
from stepgraph.passes.matmul.fp8 import Recipe
from stepgraph.train.records.folder import read_metrics

EXPERTS = "--fp8-experts"
#: Steps that one figure of a curve is the mean of.
MEAN_OF = 10

#: `stepgraph train` without the rule that leaves small layers in bf16.
CHILD = """
import sys
from stepgraph.cli import main
from stepgraph.passes import order
from stepgraph.passes.contract import PASSES
for name in ("fp8_matmul", "fp8_experts"):
    PASSES[name] = PASSES[name].with_options(unprofitable=True)
sys.exit(main(["train", *sys.argv[1:]]))
"""


def run(fp8: str, seed: int, words: list[str]) -> dict[str, Any]:
    """One run: its losses, those of validation, and how many layers were in fp8."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        if fp8 == "off":
            words = [word for word in words if word != EXPERTS]
        words = [*words, "--seed", str(seed), "--fp8", fp8, "--out", str(out)]
        done = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"stepgraph train {shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        records = read_metrics(out / "metrics.jsonl")
        passes = (out / "passes.txt").read_text().splitlines()
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    parts = [losses[i : i + MEAN_OF] for i in range(0, len(losses), MEAN_OF)]
    found = [
        line.split("]: ")[1].split("; nodes")[0] for line in passes if "layers in fp8" in line or "rows in fp8" in line
    ]
    return {
        "fp8": fp8,
        "seed": seed,
        "pass": "; ".join(found),
        "loss": [round(statistics.mean(part), 4) for part in parts],
        "val_loss": [record["val_loss"] for record in records if "val_loss" in record][-1],
    }


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each recipe the final validation loss, its spread over seeds, and how far it is above bf16's of each seed."""
    by_recipe: dict[str, dict[int, float]] = defaultdict(dict)
    for one in runs:
        by_recipe[one["fp8"]][one["seed"]] = one["val_loss"]
    found = {}
    for fp8, losses in by_recipe.items():
        above = [loss - by_recipe["off"][seed] for seed, loss in losses.items()]
        found[fp8] = {
            "val_loss": statistics.mean(losses.values()),
            "spread": statistics.stdev(losses.values()) if len(losses) > 1 else None,
            "above_bf16": above,
            "above_bf16_mean": statistics.mean(above),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="llama3-debug")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", nargs="+", choices=get_args(Recipe), default=get_args(Recipe))
    parser.add_argument("--experts", action="store_true", help="products of experts in fp8 too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--at-once", type=int, default=1, help="runs in parallel")
    parser.add_argument("--train", default="", help="more options of stepgraph train, in one word")
    options = parser.parse_args()
    words = [options.preset, "--device", options.device, "--precision", "bf16", "--steps", str(options.steps)]
    words += ["--val-every", str(options.steps), *[EXPERTS] * options.experts, *shlex.split(options.train)]
    record = {"environment": environment(), "train": shlex.join(words), "emulated": options.device == "cpu"}
    runs: list[dict[str, Any]] = []
    todo = [(fp8, seed) for seed in range(options.seeds) for fp8 in ("off", *options.recipes)]
    with ThreadPoolExecutor(options.at_once) as pool:
        for one in pool.map(lambda job: run(*job, words), todo):
            runs.append(one)
            print(f"seed {one['seed']}, fp8 {one['fp8']}: validation loss {one['val_loss']:.4f}", flush=True)
            if options.json:  # a run that is cut off leaves what it has
                everything = record | {"compared": compared(runs), "runs": runs}
                options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
