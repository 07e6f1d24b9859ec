"""A run that is killed with -9 again and again while it saves in the background, and resumed each time, beside one that
is not: losses, gradient norms and the weights at the end must be equal bit for bit.

A tiny Llama 3 on a CPU saves after every step, `--save behind`. All of its processes are killed at once, at a random
moment up to half a second after a step; then the newest checkpoint is resumed. ``in_save``: kills that left a
checkpoint half written.

    python benchmarks/kills.py [--kills 50] [--ranks 1 2] [--json FILE]
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from stepgraph.config.environment import environment

ROOT = Path(__file__).parents[1]
SIZES = {"dim": 32, "n-layers": 1, "n-heads": 2, "n-kv-heads": 2, "ffn-dim": 64}
MODULES = ("argparse", "ast", "inspect", "pathlib", "pickle", "tarfile", "typing")
STEPS_A_KILL, WINDOW_S = 16, 0.5


def options_of(ranks: int, steps: int, corpus: Path) -> list[str]:
    """The command line of both runs but for the folder."""
    sizes = [word for name, size in SIZES.items() for word in (f"--model.{name}", size)]
    words = ["--data", corpus, *sizes, "--seq-len", 32, "--batch-size", 2 * ranks, "--device", "cpu", "--steps", steps]
    words += ["--warmup-steps", 2, "--val-every", 0, "--log-every", 1, "--save", "behind", "--checkpoint-every", 1]
    mesh = ["--mesh", f"fsdp={ranks}", "--nproc", ranks] if ranks > 1 else []
    return [str(word) for word in ["llama3-debug", *words, *mesh]]


def start(*words: str) -> subprocess.Popen:
    """``stepgraph train``, with all of its processes in a group of their own."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "stepgraph", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )


def finish(*words: str) -> None:
    """Run to the end. Raises ``RuntimeError`` with what it printed if it fails."""
    process = start(*words)
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}:\n{said[-4000:]}")


def killed(folder: Path, words: list[str], draw: random.Random) -> bool:
    """Run until a step is done and a little longer, and kill; whether that hit a save."""
    process = start(*words)
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step ") and any((folder / "checkpoints").glob("step-*")):
            break
    else:
        raise RuntimeError("it ended before it was killed:\n" + "".join(said)[-4000:])
    time.sleep(draw.uniform(0, WINDOW_S))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return any((folder / "checkpoints").glob(".tmp-*"))


def outcome(folder: Path, ranks: int) -> tuple[list[tuple], str]:
    """((step, loss, gradient norm) of every step, a digest of the exported weights)."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]
    with tempfile.TemporaryDirectory() as there:
        command = [sys.executable, "-m", "stepgraph", "export", str(folder), "--out", f"{there}/weights"]
        environment_ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(command, check=True, env=environment_, stdout=subprocess.DEVNULL)
        files = sorted(Path(there, "weights").glob("*.safetensors"))
        return losses, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def measure(ranks: int, kills: int, folder: Path, seed: int) -> dict[str, Any]:
    """One row. Raises ``RuntimeError`` if a resume fails or anything differs."""
    stdlib, corpus = Path(sysconfig.get_path("stdlib")), folder / "text.txt"
    texts = [file.read_text() for name in MODULES if (file := stdlib / f"{name}.py").is_file()]
    corpus.write_text("<|endoftext|>".join(texts))
    options, draw, hits, resumed = options_of(ranks, STEPS_A_KILL * kills, corpus), random.Random(seed), 0, []
    whole, run = folder / "whole", folder / "run"
    finish(*options, "--out", str(whole))
    words = [*options, "--out", str(run)]
    for _ in range(kills):
        hits += killed(run, words, draw)
        words = ["--resume", str(run)]
        resumed.append(max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")))
    finish(*words)
    (losses, weights), (expected, expected_weights) = outcome(run, ranks), outcome(whole, ranks)
    if losses != expected or weights != expected_weights:
        first = next((i for i, pair in enumerate(zip(losses, expected, strict=False)) if pair[0] != pair[1]), None)
        raise RuntimeError(f"{ranks} ranks, resumed from {resumed}: they part at record {first}; weights {weights}")
    return {
        "ranks": ranks,
        "kills": kills,
        "in_save": hits,
        "steps": STEPS_A_KILL * kills,
        "resumed_from": resumed,
        "bitwise": True,
        "seed": seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(ranks, options.kills, Path(folder), options.seed))
        print(json.dumps(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
