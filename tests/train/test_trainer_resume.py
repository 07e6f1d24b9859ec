"""Runs that are killed or asked to stop, and then go on as if nothing had happened, to the last bit."""

import os
import random
import re
import resource
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from stepgraph.config import build, hf_weights
from stepgraph.config.train import TrainConfig
from stepgraph.train.checkpoint.checkpointer import Checkpointer
from stepgraph.train.records.folder import RunFolder
from stepgraph.train.saving import export_saved
from stepgraph.train.trainer import Run

OPTIONS = ["--model.n-layers", 1, "--steps", 24, "--val-every", 12]


#: Python's own hook of a folder on PYTHONPATH: does something at the second file of a save.
IN_SAVE = """
import os, signal, sys, time
opened = set()
def in_save(event, args):
    if event == "open" and "/.tmp-step-{step:08d}" in str(args[0]):
        opened.add(str(args[0]))
        if len(opened) == 2:
            {does}
sys.addaudithook(in_save)
"""


@pytest.fixture(scope="module")
def whole(trainer, tmp_path_factory) -> Path:
    """The run that is never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert trainer.here(*OPTIONS, "--out", folder) == 0
    return folder


def assert_went_on(trainer, whole: Path, folder: Path, *, killed: bool = False) -> None:
    trainer.assert_same_run(whole, folder, 24)
    assert trainer.metrics(folder, "val_loss") == trainer.metrics(whole, "val_loss")
    for tag in ("train/loss", "val/loss"):
        events, expected = trainer.events(folder, tag), trainer.events(whole, tag)
        if killed:  # TensorBoard's writer is a thread: a kill may take its latest events, metrics.jsonl loses none
            expected = [event for event in expected if event in events]
        assert events == expected
    summary, expected = trainer.summary(folder), trainer.summary(whole)
    for key in ("status", "error", "steps", "tokens", "train_loss_nats", "val_loss_nats"):
        assert summary[key] == expected[key], key


@pytest.mark.slow
def test_a_run_killed_in_a_save_and_again_at_any_time_goes_on_bitwise(trainer, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"
    killed = IN_SAVE.format(step=3, does="os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "sitecustomize.py").write_text(killed)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        process = trainer.start(*OPTIONS, "--checkpoint-every", 1, "--out", folder)
    printed, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"it ended before the save: {printed}"
    assert [path.name for path in checkpoints.glob(".tmp-*")] == [".tmp-step-00000003"]
    saved = trainer.checkpoints(folder)
    assert saved and not (folder / "summary.json").exists()

    process = trainer.start("--resume", folder)
    with process:
        resumed_after = int(saved[-1].removeprefix("step-"))
        for line in process.stdout:
            if line.startswith(f"step {resumed_after + 3}/24 "):
                break
        time.sleep(random.SystemRandom().uniform(0, 0.1))
        process.kill()

    if trainer.resume(folder) == 2:  # it was quicker than the kill
        assert trainer.checkpoints(folder)[-1] == "step-00000024"
    assert not list(checkpoints.glob(".tmp-*"))
    assert_went_on(trainer, whole, folder, killed=True)


def test_sigterm_ends_a_run_cleanly_after_a_save(trainer, whole, tmp_path, monkeypatch):
    """The save of step 8 waits for the signal to be sent: the steps left are over in a moment."""
    folder, sent = tmp_path / "run", tmp_path / "sent"
    waits = IN_SAVE.format(step=8, does=f"while not os.path.exists({str(sent)!r}): time.sleep(0.01)")
    (tmp_path / "sitecustomize.py").write_text(waits)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        process = trainer.start(*OPTIONS, "--out", folder)
    with process:
        for line in process.stdout:
            if line.startswith("step 5/24 "):
                process.terminate()
                sent.touch()
                break
        rest = process.stdout.read()
    summary = trainer.summary(folder)
    step = summary["steps"]
    assert process.returncode == 0 and (summary["status"], summary["error"]) == ("interrupted", None)
    assert f"SIGTERM: stopping after step {step}; continue with --resume {folder}\n" in rest
    assert 5 <= step < 24 and trainer.checkpoints(folder)[-1] == f"step-{step:08d}"
    assert "Traceback" not in rest and (folder / "page.html").exists()
    assert trainer.resume(folder) == 0
    assert_went_on(trainer, whole, folder)


@pytest.mark.parametrize(
    ("owner", "name", "call", "number", "stops_after"),
    [
        (build, "build_step", 1, signal.SIGTERM, 0),  # while the step is captured and compiled
        (Run, "_launch", 7, signal.SIGINT, 7),
        (Run, "_launch", 6, signal.SIGHUP, 6),
        (Run, "_validate", 1, signal.SIGINT, 12),
        (Checkpointer, "save", 2, signal.SIGINT, 8),
    ],
    ids=["capture", "step", "hang up", "validation", "save"],
)
def test_a_signal_at_any_moment_saves_and_ends_cleanly(
    owner, name, call, number, stops_after, trainer, whole, tmp_path, monkeypatch, capsys
):
    original, calls = getattr(owner, name), []

    def signalled(*arguments, **named):
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(number)
        return original(*arguments, **named)

    folder = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, tests start with it ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, signalled)
            assert trainer.here(*OPTIONS, "--out", folder) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    summary = trainer.summary(folder)
    assert (summary["status"], summary["steps"]) == ("interrupted", stops_after)
    assert trainer.checkpoints(folder)[-1] == f"step-{stops_after:08d}"
    assert f"{number.name}: stopping after step {stops_after}; continue with --resume" in capsys.readouterr().out
    assert trainer.resume(folder) == 0
    assert_went_on(trainer, whole, folder)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_goes_away_stops_the_run_but_under_nohup(nohup, trainer, tmp_path, monkeypatch):
    """The shell and the kernel may both send the signal."""
    original = Run._launch

    def twice(self):
        if self.step == 1:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
        return original(self)

    monkeypatch.setattr(Run, "_launch", twice)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        assert trainer.here(*OPTIONS, "--steps", "3", "--out", tmp_path / "run") == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    summary = trainer.summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == (("finished", 3) if nohup else ("interrupted", 2))


def test_a_second_ctrl_c_ends_the_run_at_once(trainer, tmp_path, monkeypatch):
    original = Run._launch

    def twice(self):
        if self.step == 6:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Run, "_launch", twice)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may start with it ignored
    try:
        assert trainer.here(*OPTIONS, "--out", tmp_path / "run") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    summary = trainer.summary(tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["error"]) == ("failed", 6, "KeyboardInterrupt")
    assert trainer.checkpoints(tmp_path / "run") == ["step-00000004"]


@pytest.mark.long  # shorter: of GraphTrainer, in tests/integrations/test_trainer.py
def test_a_run_whose_peak_moves_state_to_the_host_is_resumed_bitwise(trainer, tmp_path, monkeypatch):
    options = ["--model.n-layers", 1, "--steps", 4, "--val-every", 0, "--passes", "exact", "--tiles", 1]
    options += ["--memory", "peak=0.00189GiB"]
    assert trainer.here(*options, "--out", tmp_path / "whole") == 0
    original = Run._launch

    def stopped(self):
        if self.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_launch", stopped)
        assert trainer.here(*options, "--out", tmp_path / "run") == 0
    assert trainer.summary(tmp_path / "run")["steps"] == 2
    assert trainer.resume(tmp_path / "run") == 0
    trainer.assert_same_run(tmp_path / "whole", tmp_path / "run", 4)
    for folder in ("whole", "run"):
        assert "stay in host memory" in (tmp_path / folder / "passes.txt").read_text()


def test_more_steps_and_other_options_of_the_optimizer_hold_after_a_resume(trainer, tmp_path):
    options = ["--model.n-layers", 1, "--steps", 4, "--schedule", "constant", "--val-every", 0]
    assert trainer.here(*options, "--out", tmp_path / "run") == 0
    for copy, decay in (("same", "0.1"), ("other", "0.9")):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
        assert trainer.resume(tmp_path / copy, "--steps", 6, "--batch-size", 2, "--weight-decay", decay) == 0
    tokens = [tokens for _, tokens in trainer.metrics(tmp_path / "same", "tokens")]
    assert tokens == [256, 512, 768, 1024, 1152, 1280]
    same, other = (trainer.metrics(tmp_path / copy, "loss") for copy in ("same", "other"))
    assert same[:5] == other[:5] and same[5] != other[5]  # the sixth loss is the first to see the decay


def test_a_resumed_run_has_no_summary_until_it_writes_its_own(trainer, whole, tmp_path, monkeypatch):
    folder, original, seen = tmp_path / "run", Run._launch, []
    shutil.copytree(whole, folder)

    def look(self):
        seen.append((folder / "summary.json").exists())
        return original(self)

    monkeypatch.setattr(Run, "_launch", look)
    assert trainer.resume(folder, "--steps", 26) == 0
    assert seen == [False, False] and trainer.summary(folder)["steps"] == 26


def test_what_cannot_be_resumed_is_refused_in_one_line_and_nothing_is_lost(trainer, whole, tmp_path, capsys):
    def files(folder):
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def refused(folder, *more):
        before = files(folder)
        capsys.readouterr()
        assert trainer.resume(folder, *more) == 2
        assert files(folder) == before
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    assert "nothing is left to do" in refused(whole) and "--steps" in refused(whole)
    assert "another model" in refused(whole, "--steps", 30, "--model.dim", 32)
    assert "another model" in refused(whole, "--steps", 30, "--precision", "bf16")
    assert "seed=0" in refused(whole, "--steps", 30, "--seed", 1)
    assert "not a run folder" in refused(tmp_path)
    assert "not a run folder" in refused(tmp_path / "nowhere")

    damaged = tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    newest = max((damaged / "checkpoints").iterdir())
    data = newest / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert "is damaged" in refused(damaged, "--steps", 30)
    for path in (damaged / "checkpoints").iterdir():
        (path / "__0_0.distcp").write_bytes(content[:1000])
    with pytest.warns(UserWarning, match="is skipped"):
        assert "every checkpoint" in refused(damaged, "--steps", 30)
    shutil.rmtree(damaged / "checkpoints")
    assert "has no checkpoint" in refused(damaged, "--steps", 30)


def test_a_truncated_newest_checkpoint_is_passed_over_for_the_one_before(trainer, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    with open(folder / "checkpoints/step-00000024/__0_0.distcp", "r+b") as file:
        file.truncate(1000)
    with pytest.warns(UserWarning, match="step-00000024 is skipped"):
        assert trainer.resume(folder) == 0
    assert_went_on(trainer, whole, folder)


def test_records_and_export_of_a_run_killed_after_its_last_checkpoint_are_written(trainer, whole, tmp_path):
    folder, hf = tmp_path / "run", tmp_path / "hf"
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    assert trainer.resume(folder) == 0
    assert_went_on(trainer, whole, folder)
    assert (folder / "summary.json").exists()
    assert trainer.resume(folder, "--export-hf", hf) == 0 and (hf / "model.safetensors").exists()


def test_an_export_that_fails_says_what_is_saved(trainer, whole, tmp_path, monkeypatch, capsys):
    folder, hf, original = tmp_path / "run", tmp_path / "hf", hf_weights.save_file

    def full(tensors, file, **more):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # the kernel refuses what lies beyond
        try:
            original(tensors, file, **more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    shutil.copytree(whole, folder)
    monkeypatch.setattr(hf_weights, "save_file", full)
    assert trainer.resume(folder, "--export-hf", hf) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith(f"error: the export failed: cannot write {hf}/model.safetensors: ") and error.count("\n") == 1
    )
    assert "File too large" in error and f"; step 24 is saved: stepgraph export {folder} --out FOLDER" in error
    assert trainer.main(["export", str(folder), "--out", str(tmp_path / "again")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the export failed: cannot write") and error.count("\n") == 1
    assert not list(tmp_path.rglob("*.part"))
    assert not any(hf.iterdir()) and not any((tmp_path / "again").iterdir())  # the command can be given again
    config = TrainConfig(export_hf=tmp_path / "theirs")
    config.export_hf.mkdir()
    (config.export_hf / "tokenizer.json").write_text("theirs")
    with pytest.raises(OSError, match="theirs is not empty: use a new folder; step 24 is saved: stepgraph export "):
        export_saved(None, config, folder, 24)  # another run was faster
    assert [file.read_text() for file in config.export_hf.iterdir()] == ["theirs"]


def test_a_run_killed_before_its_first_checkpoint_begins_again(trainer, whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink()
    assert trainer.resume(folder) == 0
    assert f"run folder {folder}, restarted after step 0" in capsys.readouterr().out
    assert_went_on(trainer, whole, folder)


def test_a_run_goes_on_from_the_checkpoint_that_is_given(trainer, whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert trainer.resume(folder / "checkpoints/step-00000016", "--steps", 24) == 0
    assert "\noptions changed since: none\n" in capsys.readouterr().out
    assert_went_on(trainer, whole, folder)
    words = ("--steps", 21, "--lr", 0.125, "--log-every", 3)
    assert trainer.resume(folder / "checkpoints/step-00000020", *words) == 0
    assert "\noptions changed since: steps 24 -> 21, lr 0.002 -> 0.125, log_every 1 -> 3\n" in capsys.readouterr().out
    assert trainer.checkpoints(folder)[-1] == "step-00000021"  # that of step 24 is gone, as its records are


def test_a_run_that_another_process_has_is_refused(trainer, whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    other = RunFolder(folder, resume_step=24)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.parent.name != "tb"}
    assert trainer.resume(folder, "--steps", 25) == 2
    holder = f"pid {os.getpid()} on {socket.gethostname()}"
    assert f"error: run folder {folder} is in use by {holder}: wait for its end" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    other.close()
    assert trainer.resume(folder, "--steps", 25) == 0


def test_muon_beside_adamw_goes_on_bitwise(trainer, tmp_path, monkeypatch):
    options = ("--optimizer", "muon", "--passes", "exact", "--val-every", 0)
    expected, folder = tmp_path / "expected", tmp_path / "run"
    assert trainer.here(*options, "--out", expected) == 0
    original = Run._launch

    def interrupted(self):
        if self.step == 6:
            signal.raise_signal(signal.SIGINT)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_launch", interrupted)
        assert trainer.here(*options, "--out", folder) == 0
    assert trainer.summary(folder)["status"] == "interrupted"
    assert trainer.resume(folder) == 0
    trainer.assert_same_run(expected, folder, 12)
    tensors, _ = trainer.saved(folder, 12)
    muons = {name for name in tensors if name.endswith(".momentum_buffer")}
    assert muons and all(name.startswith("optimizer.layers.") for name in muons)
    assert "optimizer.embed.weight.exp_avg" in tensors


def test_checkpoints_behind_the_run_are_those_it_would_wait_for(trainer, whole, tmp_path, capsys):
    folder = tmp_path / "run"
    assert trainer.here(*OPTIONS, "--save", "behind", "--out", folder) == 0
    out = capsys.readouterr().out
    assert re.search(r"\ncheckpoint of step 4: the run waited \d\.\d\d s, written in \d+\.\d s\n", out)
    assert re.search(r"\nhost memory for copies of the state: 0\.\d\d GiB, ready after \d\.\d s\n", out)
    saves = dict(trainer.metrics(folder, "save_s"))
    assert list(saves) == [4, 8, 12, 16, 20] and 0 < max(saves.values()) < 5
    assert trainer.checkpoints(folder) == [f"step-{step:08d}" for step in range(4, 25, 4)]
    for step in (8, 24):
        tensors, texts = trainer.saved(folder, step)
        expected, others = trainer.saved(whole, step)
        assert texts == others and all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
