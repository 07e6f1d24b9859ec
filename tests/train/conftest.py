"""Tiny runs of the trainer, started as a user starts them, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import stepgraph
from stepgraph import cli

#: Some hundred kB of text that every machine has, as documents of one file.
MODULES = ("argparse", "ast", "dataclasses", "difflib", "inspect", "pathlib", "pickle", "tarfile", "typing")
TINY = [
    *("--model.dim", "64", "--model.n-layers", "2", "--model.n-heads", "4", "--model.n-kv-heads", "2"),
    *("--model.ffn-dim", "128", "--seq-len", "64", "--batch-size", "4", "--val-batches", "2", "--device", "cpu"),
    *(
        "--steps",
        "12",
        "--warmup-steps",
        "2",
        "--val-every",
        "5",
        "--checkpoint-every",
        "4",
        "--keep-checkpoints",
        "20",
    ),
    *("--log-every", "1"),
]


class Trainer:
    """``stepgraph train`` on a tiny Llama 3 and a small text file."""

    def __init__(self, corpus: Path):
        self.corpus = corpus

    def arguments(self, *more: Any) -> list[str]:
        """The command line; options in ``more`` come last and so override."""
        return ["train", *TINY, "--data", str(self.corpus), *map(str, more)]

    def start(self, *more: Any) -> subprocess.Popen:
        """The run as a process of its own, stdout and stderr in one pipe. ``more`` replaces all options on --resume."""
        words = ["train", *map(str, more)] if more[0] == "--resume" else self.arguments(*more)
        paths = [str(Path(stepgraph.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.Popen(
            [sys.executable, "-m", "stepgraph", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def here(self, *more: Any) -> int:
        """Run in this process; the exit status."""
        return self.main(self.arguments(*more))

    def resume(self, folder: Path, *more: Any) -> int:
        """Continue the run in ``folder`` in this process; the exit status."""
        return self.main(["train", "--resume", str(folder), *map(str, more)])

    def main(self, words: list[str]) -> int:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the runs with a process of their own: sums depend on it
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        try:
            with pytest.raises(SystemExit) as stop:
                cli.main(words)
        finally:
            torch.set_num_threads(threads)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
        return stop.value.code

    @staticmethod
    def summary(folder: Path) -> dict[str, Any]:
        return json.loads((folder / "summary.json").read_text())

    @staticmethod
    def metrics(folder: Path, *names: str) -> list[tuple]:
        """(step, value, ...) of every record that has all of ``names``."""
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(r["step"], *(r[n] for n in names)) for r in records if all(n in r for n in names)]

    @staticmethod
    def events(folder: Path, tag: str) -> list[tuple[int, float]]:
        """(step, value) of TensorBoard's scalar ``tag``, by step: files of one second are read in their names' order,
        in which a process's 10th comes before its 9th."""
        shown = EventAccumulator(str(folder / "tb")).Reload().Scalars(tag)
        return sorted((event.step, event.value) for event in shown)

    @staticmethod
    def checkpoints(folder: Path) -> list[str]:
        return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))

    @staticmethod
    def saved(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """Every tensor of a checkpoint, read by torch itself, and its JSON: layout, trainer, data position, RNG."""
        path = folder / "checkpoints" / f"step-{step:08d}"
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
        return tensors, [json.loads((path / name).read_text()) for name in ("state.json", "rank-00000.json")]

    def assert_same_run(self, one: Path, other: Path, step: int) -> None:
        """Losses, gradient norms, learning rates and the checkpoint at ``step`` are equal bit for bit."""
        names = ("loss", "grad_norm", "lr", "tokens")
        expected = self.metrics(one, *names)
        assert [step for step, *_ in expected] == list(range(1, step + 1))  # each step once
        assert self.metrics(other, *names) == expected
        (tensors, texts), (other_tensors, other_texts) = self.saved(one, step), self.saved(other, step)
        assert tensors.keys() == other_tensors.keys() and len(tensors) > 40
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other_tensors[name]), name
        assert texts == other_texts


@pytest.fixture(scope="session")
def trainer(tmp_path_factory) -> Trainer:
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [path for name in MODULES for path in (stdlib / f"{name}.py", stdlib / name / "__init__.py")]
    corpus = tmp_path_factory.mktemp("corpus") / "text.txt"
    corpus.write_text("<|endoftext|>".join(path.read_text(encoding="utf-8") for path in files if path.is_file()))
    return Trainer(corpus)
