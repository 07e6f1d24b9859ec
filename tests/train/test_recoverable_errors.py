"""Errors that leave the weights sound: the run saves, ends with one line, and goes on bitwise when it is resumed."""

import os
import subprocess
import sys

import pytest

from stepgraph.train.data import PackedLoader
from stepgraph.train.records.folder import RunFolder

ONE_LAYER = ["--model.n-layers", 1, "--val-every", 0, "--checkpoint-every", 0, "--steps", 8]


def breaks_at(step, do):
    """A `RunFolder.log` that calls ``do`` with the folder before it records ``step``."""
    original = RunFolder.log

    def log(self, at, **values):
        if at == step:
            do(self)
        original(self, at, **values)

    return log


def full(folder):
    """The next record finds the disk full: the kernel says so."""
    folder._metrics.close()
    folder._metrics = open("/dev/full", "w", buffering=1)  # noqa: SIM115


def nobody_reads(folder):
    read, write = os.pipe()
    os.close(read)
    sys.stdout = os.fdopen(write, "w")


def hangs_up(folder):
    read, write = os.openpty()
    sys.stdout = os.fdopen(write, "w")
    os.close(read)


def refuses(folder):
    raise PermissionError(13, "Permission denied", str(folder.path / "metrics.jsonl"))


@pytest.fixture(scope="module")
def expected(trainer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected") / "run"
    assert trainer.here(*ONE_LAYER, "--out", folder) == 0
    return folder


@pytest.mark.parametrize(
    ("do", "says", "records"),
    [
        (full, "the records cannot be written ([Errno 28] No space left on device)", False),
        (nobody_reads, "the reader of this output is gone", True),
        (hangs_up, "the reader of this output is gone", True),
        (refuses, "[Errno 13] Permission denied", False),
    ],
)
def test_the_run_saves_first(do, says, records, trainer, expected, tmp_path, monkeypatch, capsys):
    folder, stdout = tmp_path / "run", sys.stdout
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", breaks_at(5, do))
        assert trainer.here(*ONE_LAYER, "--out", folder) == 1
        broken, sys.stdout = sys.stdout, stdout
        if broken is not stdout:
            broken.close()
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"; step 5 is saved: --resume {folder}" in error
    assert trainer.checkpoints(folder) == ["step-00000005"]
    assert trainer.resume(folder, "--steps", 8) == 0, capsys.readouterr().err
    if records:
        trainer.assert_same_run(expected, folder, 8)
    else:
        assert trainer.metrics(folder, "loss")[-1] == trainer.metrics(expected, "loss")[-1]


def test_data_that_breaks_in_the_middle_ends_the_run_after_a_save(trainer, expected, tmp_path, monkeypatch, capsys):
    original, calls = PackedLoader.ready, []

    def ready(self):
        calls.append(1)
        if len(calls) == 6:
            raise ValueError("corpus.jsonl:7: not valid JSON: use a JSON object per line")
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(PackedLoader, "ready", ready)
        assert trainer.here(*ONE_LAYER, "--out", tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: corpus.jsonl:7: not valid JSON") and "step 5 is saved: --resume" in error
    assert trainer.summary(tmp_path / "run")["status"] == "failed"
    assert trainer.resume(tmp_path / "run") == 0
    trainer.assert_same_run(expected, tmp_path / "run", 8)


@pytest.mark.parametrize("words", [["--help"], ["train", "--lrr", "1"]])
def test_a_command_whose_reader_is_gone_ends_silently(words):
    read, write = os.pipe()
    os.close(read)
    both = subprocess.run([sys.executable, "-m", "stepgraph", *words], stdout=write, stderr=write, check=False)
    assert both.returncode == 141
    done = subprocess.run(
        [sys.executable, "-m", "stepgraph", "--help"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
