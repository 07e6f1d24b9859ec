"""A run that is killed with -9 repeatedly while it saves in the background, and resumed each time, compared with one
that is not: losses, gradient norms and the weights at the end must be equal bit for bit.

A tiny Llama 3 on a CPU saves after every step, `--save behind`. All of its processes are killed at once, at a random
moment up to half a second after a step; then the newest checkpoint is resumed. ``in_save``: kills that left a
checkpoint half written.

With `--anywhere` runs are killed at random moments of the start, a validation, a save and the export to Hugging Face,
and continued by the same command where they have no checkpoint, else by `--resume`; each must end with the records, the
checkpoint and the exported files of the run that nobody kills.

    python benchmarks/kills.py [--kills 50] [--ranks 1 2] [--anywhere] [--json FILE]
"""

import argparse
import contextlib
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
#: Of runs that are killed anywhere: their options, and where in a run.
ANYWHERE = {"steps": 8, "val-every": 3, "checkpoint-every": 2, "val-batches": 2}
MOMENTS = ("any", "start", "validation", "save", "export")


def options_of(ranks: int, steps: int, corpus: Path) -> list[str]:
    """The command line of both runs but for the folder."""
    sizes = [word for name, size in SIZES.items() for word in (f"--model.{name}", size)]
    words = ["--data", corpus, *sizes, "--seq-len", 32, "--batch-size", 2 * ranks, "--device", "cpu", "--steps", steps]
    words += ["--warmup-steps", 2, "--val-every", 0, "--log-every", 1, "--save", "behind", "--checkpoint-every", 1]
    mesh = ["--mesh", f"fsdp={ranks}", "--nproc", ranks] if ranks > 1 else []
    return [str(word) for word in ["llama3-debug", *words, *mesh]]


def corpus_in(folder: Path) -> Path:
    """A text file there of some of Python's sources."""
    stdlib, corpus = Path(sysconfig.get_path("stdlib")), folder / "text.txt"
    texts = [file.read_text() for name in MODULES if (file := stdlib / f"{name}.py").is_file()]
    corpus.write_text("<|endoftext|>".join(texts))
    return corpus


def start(*words: str, stdout: Any = subprocess.PIPE) -> subprocess.Popen:
    """``stepgraph train``, with all of its processes in a group of their own."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "stepgraph", "train", *words],
        stdout=stdout,
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
    corpus = corpus_in(folder)
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


def kill_all(process: subprocess.Popen) -> None:
    """Kill a launcher and its ranks, which have sessions of their own, with -9, and wait until they are gone."""

    def below(pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in words_of(task)]
            return [pid, *(one for child in found for one in below(child))]
        return []

    def words_of(task: Path) -> list[str]:
        return (task / "children").read_text().split()

    family = below(process.pid)
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    while any(is_alive(pid) for pid in family):
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class KilledAnywhere:
    """Runs of one command in new folders, each killed now and again until it is done."""

    def __init__(self, ranks: int, folder: Path, seed: int):
        self.ranks, self.folder, self.draw, self.runs = ranks, folder, random.Random(seed), 0
        self.kills: list[dict[str, Any]] = []
        options = options_of(ranks, ANYWHERE["steps"], corpus_in(folder))
        self.options = options + [str(word) for name, value in ANYWHERE.items() for word in (f"--{name}", value)]
        whole, began = folder / "whole", time.perf_counter()
        process = self._start(self._words(whole), whole)
        first = None
        while process.poll() is None:
            if first is None and "step 1/" in self._said(whole):
                first = time.perf_counter() - began
            time.sleep(0.01)
        self._require(process.returncode == 0, whole)
        self.start_s, self.whole_s, self.expected = first, time.perf_counter() - began, self._outcome(whole)

    def go(self, kills: int) -> None:
        """Raises ``RuntimeError`` where a run does not continue or ends otherwise than the one that nobody killed."""
        while len(self.kills) < kills:
            self.runs += 1
            run = self.folder / f"run-{self.runs}"
            words = self._words(run)
            while len(self.kills) < kills and self._killed(run, words):
                words = self._words(run)
            if not self._is_finished(run):
                process = self._start(self._words(run), run)
                self._require(process.wait() == 0, run)
            found, expected = self._outcome(run), self.expected
            differ = [f"{key}: {found[key]}, not {expected[key]}" for key in found if found[key] != expected[key]]
            self._require(not differ, run, "; ".join(differ))

    def _words(self, run: Path) -> list[str]:
        """The same command again, or to resume where there is a checkpoint."""
        if any((run / "checkpoints").glob("step-*")):
            return ["--resume", str(run)]
        return [*self.options, "--out", str(run), "--export-hf", f"{run}-hf", "--save", self._save_mode(run)]

    @staticmethod
    def _save_mode(run: Path) -> str:
        return "behind" if sum(run.name.encode()) % 2 else "wait"

    def _start(self, words: list[str], run: Path) -> subprocess.Popen:
        with Path(f"{run}.log").open("a") as log:
            return start(*words, stdout=log)

    @staticmethod
    def _said(run: Path) -> str:
        return Path(f"{run}.log").read_text()

    def _killed(self, run: Path, words: list[str]) -> bool:
        """Start, and kill at a random moment; False where the run was done by then."""
        where, said = self.draw.choice(MOMENTS), len(self._said(run)) if Path(f"{run}.log").exists() else 0
        later, validated = self.draw.uniform(0, 0.3), self.draw.choice((3, 6))
        after = self.draw.uniform(0, self.whole_s if where == "any" else self.start_s)
        process, began = self._start(words, run), time.perf_counter()

        def reached() -> bool:
            match where:
                case "validation":
                    return f"step {validated}/" in self._said(run)[said:]
                case "save":
                    return any((run / "checkpoints").glob(".tmp-*"))
                case "export":
                    return (Path(f"{run}-hf") / ".unfinished-export").exists()
            return time.perf_counter() - began >= after

        while process.poll() is None:
            if reached():
                if where in ("validation", "save", "export"):
                    time.sleep(later if where == "validation" else later / 10)
                break
            time.sleep(0.005)
        if process.poll() is not None:
            self._require(process.returncode == 0, run)
            return False
        kill_all(process)
        self.kills.append({"where": where, "steps": self._step(run)})
        return not self._is_finished(run)

    @staticmethod
    def _step(run: Path) -> int:
        return max((int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")), default=0)

    @staticmethod
    def _is_finished(run: Path) -> bool:
        """Whether it was killed when all was done, so that nothing is left to continue."""
        summary, exporting = run / "summary.json", Path(f"{run}-hf/.unfinished-export")
        return summary.exists() and json.loads(summary.read_text())["status"] == "finished" and not exporting.exists()

    def _require(self, holds: bool, run: Path, what: str = "it ended with an error") -> None:
        if not holds:
            where = f"{self.ranks} ranks, {run.name}, killed {self.kills[-5:]}"
            raise RuntimeError(f"{where}: {what}\n{self._said(run)[-4000:]}")

    def _outcome(self, run: Path) -> dict[str, Any]:
        """What a run leaves: its records without times, the steps of its checkpoints, and digests of its export."""
        lines = (run / "metrics.jsonl").read_text().splitlines()
        kept = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")
        records = [{name: record[name] for name in kept if name in record} for record in map(json.loads, lines)]
        files = sorted(Path(f"{run}-hf").iterdir())
        return {
            "records": [record for record in records if len(record) > 1],
            "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
            "export": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        }


def anywhere(ranks: int, kills: int, folder: Path, seed: int) -> dict[str, Any]:
    """One row. Raises ``RuntimeError`` as `KilledAnywhere.go` does."""
    killed = KilledAnywhere(ranks, folder, seed)
    killed.go(kills)
    where = {moment: sum(kill["where"] == moment for kill in killed.kills) for moment in MOMENTS}
    return {
        "ranks": ranks,
        "kills": len(killed.kills),
        "runs": killed.runs,
        "where": where,
        "bitwise": True,
        "seed": seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--anywhere", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows.append((anywhere if options.anywhere else measure)(ranks, options.kills, Path(folder), options.seed))
        print(json.dumps(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
