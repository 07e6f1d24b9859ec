"""What a run does at its end and in its error paths: the state is saved before what may fail, and the first error is
the one that is reported."""

import contextlib
import errno
import gc
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stepgraph import parallel
from stepgraph.train import trainer as trainer_module
from stepgraph.train.checkpoint import background, checkpointer
from stepgraph.train.checkpoint.checkpointer import Checkpointer
from stepgraph.train.data import PackedLoader
from stepgraph.train.records.folder import RunFolder
from stepgraph.train.trainer import Figures, Run
from stepgraph.train.validation import Validation

ONE_LAYER = ["--model.n-layers", 1, "--steps", 8, "--val-every", 0, "--checkpoint-every", 0]


@pytest.fixture(scope="module")
def whole(trainer, tmp_path_factory) -> Path:
    """The run that nothing disturbs: 8 steps, validated at 3 and 6, saved at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert trainer.here(*ONE_LAYER, "--val-every", 3, "--checkpoint-every", 2, "--out", folder) == 0
    return folder


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


# ---- the state is saved before what may fail ----


def fails_with(error):
    def losses(*_, **__):
        raise error

    return losses


def not_finite(self, check):
    check(float("nan"), self.batches[0])


@pytest.mark.parametrize("val_every", [0, 5], ids=["at the end", "in mid-run"])
@pytest.mark.parametrize(
    ("validation", "says"),
    [
        (fails_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")), "asked for 2.00 GiB"),
        (not_finite, "the validation loss after step"),
        (fails_with(RuntimeError("planted")), "planted"),
    ],
    ids=["memory", "nan", "error"],
)
def test_a_validation_that_fails_loses_no_step(
    validation, says, val_every, trainer, whole, tmp_path, monkeypatch, capsys
):
    folder, step = tmp_path / "run", val_every or 8
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "losses", validation)
        if says == "planted":
            with pytest.raises(RuntimeError, match="planted") as raised:
                trainer_module.run(config_of(trainer, *ONE_LAYER, "--val-every", val_every, "--out", folder))
            assert f"step {step} is saved: --resume {folder}" in raised.value.__notes__
        else:
            assert trainer.here(*ONE_LAYER, "--val-every", val_every, "--out", folder) == 1
            error = one_line(capsys)
            assert says in error
            if "GiB" in says:
                assert f"the validation after step {step} ran out of memory" in error and "--batch-size" in error
                assert "--memory" not in error and f"step {step} is saved: --resume {folder}" in error
    assert trainer.summary(folder)["status"] == "failed"
    assert trainer.checkpoints(folder) == [f"step-{step:08d}"]
    assert trainer.resume(folder, "--val-every", 0) == 0
    trainer.assert_same_run(whole, folder, 8)


def config_of(trainer, *words):
    from stepgraph.cli import parse_train

    return parse_train(trainer.arguments(*words)[1:])


def test_a_run_killed_between_a_checkpoint_and_its_validation_validates_first(trainer, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    options = [*ONE_LAYER, "--val-every", 2, "--checkpoint-every", 2, "--sample-every", 2]
    assert trainer.here(*options, "--out", tmp_path / "expected") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "losses", fails_with(KeyboardInterrupt()))
        assert trainer.here(*options, "--out", folder) == 130
    (folder / "summary.json").unlink()
    assert trainer.checkpoints(folder) == ["step-00000002"]
    assert trainer.resume(folder) == 0
    for name in ("loss", "val_loss", "sample"):
        assert trainer.metrics(folder, name) == trainer.metrics(tmp_path / "expected", name), name
    assert len(trainer.metrics(folder, "val_loss")) == 4


# ---- steps that are left out ----


@pytest.mark.parametrize("ends", ["given up", "stopped"])
def test_while_steps_are_left_out_no_checkpoint_takes_the_place_of_a_good_one(
    ends, trainer, tmp_path, monkeypatch, capsys
):
    folder, read, launch = tmp_path / "run", Figures.read, Run._launch
    steps = []

    def bad_from_6(self):
        steps.append(1)
        return (float("nan"), float("nan")) if len(steps) > 5 else read(self)

    def stopped(self):
        if ends == "stopped" and self.step == 7:
            signal.raise_signal(signal.SIGINT)
        return launch(self)

    monkeypatch.setattr(Figures, "read", bad_from_6)
    monkeypatch.setattr(Run, "_launch", stopped)
    words = [*ONE_LAYER, "--steps", 30, "--checkpoint-every", 2, "--keep-checkpoints", 2]
    status = trainer.here(*words, "--on-nonfinite", "skip", "--max-skipped", 8, "--out", folder)
    saved = trainer.checkpoints(folder)
    if ends == "stopped":
        assert status == 0 and saved == ["step-00000002", "step-00000004", "step-00000008"]
    else:
        out, err = capsys.readouterr()
        assert status == 1 and saved == ["step-00000002", "step-00000004"]
        assert f"--resume {folder}/checkpoints/step-00000004" in err and "no checkpoint of step 8" in out


# ---- saves that fail ----


def once(error, then):
    """``then``, but the first call raises ``error``."""
    calls = []

    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise error
        return then(*arguments, **options)

    return call


@pytest.mark.parametrize("save", ["wait", "behind"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("planted"), MemoryError("planted")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_after_a_save_that_fails_the_run_saves_once_more(error, save, trainer, whole, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer, "dcp_save", once(error, checkpointer.dcp_save))
        patch.setattr(background.BackgroundSaves, "check", lambda self: [])  # it is noticed at the next save
        assert trainer.here(*ONE_LAYER, "--checkpoint-every", 3, "--save", save, "--out", folder) == 1
    said, step = one_line(capsys), 3 if save == "wait" else 6
    assert f"cannot write checkpoint {folder}/checkpoints/step-00000003" in said and str(error) in said
    assert f"step {step} is saved: --resume {folder}" in said
    assert trainer.checkpoints(folder) == [f"step-{step:08d}"]
    assert trainer.resume(folder, "--checkpoint-every", 0) == 0
    trainer.assert_same_run(whole, folder, 8)


def test_checkpoints_that_became_a_file_are_one_line(trainer, tmp_path, monkeypatch, capsys):
    folder, launch = tmp_path / "run", Run._launch

    def breaks(self):
        if self.step == 4:
            shutil.rmtree(folder / "checkpoints")
            (folder / "checkpoints").write_text("a file")
        return launch(self)

    monkeypatch.setattr(Run, "_launch", breaks)
    assert trainer.here(*ONE_LAYER, "--checkpoint-every", 2, "--out", folder) == 1
    assert "cannot write checkpoint" in one_line(capsys) and trainer.summary(folder)["steps"] == 6


# ---- closing ----


@pytest.mark.parametrize("part", ["summary", "watch", "saving", "page", "folder"])
def test_what_fails_at_the_end_hides_no_error_and_stops_no_other_part(part, trainer, tmp_path, monkeypatch, capsys):
    broken = RuntimeError("planted in closing")
    owner, name = {
        "summary": (trainer_module, "environment"),
        "watch": (trainer_module.Watch, "ends"),
        "saving": (trainer_module.Saving, "finish"),
        "page": (trainer_module.RunPage, "finish"),
        "folder": (RunFolder, "close"),
    }[part]
    monkeypatch.setattr(PackedLoader, "__next__", fails_with(OSError("the first error")))
    fails, environments = fails_with(broken), iter([trainer_module.environment()])  # of environment.json, none after it
    monkeypatch.setattr(owner, name, fails if part != "summary" else lambda: next(environments, None) or fails())
    assert trainer.here(*ONE_LAYER, "--out", tmp_path / "run") == 1
    assert "the first error" in one_line(capsys)
    assert trainer.summary(tmp_path / "run")["error"] == "the first error"
    assert part == "page" or (tmp_path / "run/metrics.jsonl").exists()


def test_a_capture_that_fails_when_it_is_done_again_is_the_error_that_is_reported(trainer, tmp_path, monkeypatch):
    launch = Run._launch

    def dropped(self):
        if self.step == 2:
            self.captured._current = None  # as while a step is captured again
            raise RuntimeError("the first error")
        return launch(self)

    monkeypatch.setattr(Run, "_launch", dropped)
    with pytest.raises(RuntimeError, match="the first error"):
        trainer_module.run(config_of(trainer, *ONE_LAYER, "--out", tmp_path / "run"))
    summary = trainer.summary(tmp_path / "run")
    assert (summary["status"], summary["error"], summary["compile_s"]) == (
        "failed",
        "RuntimeError: the first error",
        None,
    )


# ---- the export ----


@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_an_export_that_a_kill_cut_off_is_written_on_resume(moment, trainer, tmp_path, monkeypatch, capsys):
    from stepgraph.train import saving

    folder, hf, save_hf = tmp_path / "run", tmp_path / "hf", saving.save_hf

    def killed(model, where, **options):
        if moment == "after":
            save_hf(model, where, **options)
        if moment == "half":
            (where / "model.safetensors.part").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_hf", killed)
        assert trainer.here(*ONE_LAYER, "--steps", 4, "--export-hf", hf, "--out", folder) == 130
    (folder / "summary.json").unlink()
    assert (hf / saving.CLAIM).exists()
    assert trainer.here(*ONE_LAYER, "--steps", 4, "--export-hf", hf, "--out", tmp_path / "other") == 2
    assert trainer.resume(folder) == 0 and trainer.summary(folder)["status"] == "finished"
    assert not list(hf.glob(".*")) and not list(hf.glob("*.part")) and json.loads((hf / "config.json").read_text())
    assert trainer.resume(folder, "--steps", 5) == 2  # it is not overwritten
    assert f"export_hf={hf} is not empty" in capsys.readouterr().err
    assert trainer.resume(folder) == 2
    assert f"nothing is left to do: {folder} has done 4 of 4 steps and its export is in {hf}" in one_line(capsys)


# ---- going back to an earlier checkpoint ----


def everything(folder: Path) -> dict[str, bytes]:
    names = ("metrics.jsonl", "summary.json")
    saved = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in [*saved, *(folder / name for name in names)]}


@pytest.mark.parametrize("moment", ["before it begins", "before it saves"])
def test_going_back_deletes_nothing_before_its_first_checkpoint(moment, trainer, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = everything(folder)
    owner, name = (RunFolder, "write") if moment == "before it begins" else (Run, "_finish")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_with(KeyboardInterrupt()))
        assert trainer.resume(folder / "checkpoints/step-00000002", "--checkpoint-every", 3) == 130
    gc.collect()  # the interrupted run lets go of its lock
    assert everything(folder) == before
    assert trainer.resume(folder, "--steps", 9) == 0  # from the newest, as if nothing happened
    assert trainer.metrics(folder, "loss")[:8] == trainer.metrics(whole, "loss")


def go_back(trainer, folder: Path) -> int:
    return trainer.resume(folder / "checkpoints/step-00000002", "--lr", 0.01, "--val-every", 0)


@pytest.fixture(scope="module")
def went_back(trainer, whole, tmp_path_factory) -> Path:
    """A run that nothing disturbs: it goes back from step 8 to 2, with another learning rate."""
    folder = tmp_path_factory.mktemp("went-back") / "run"
    shutil.copytree(whole, folder)
    assert go_back(trainer, folder) == 0
    assert trainer.metrics(folder, "loss")[3] != trainer.metrics(whole, "loss")[3]
    return folder


@pytest.mark.parametrize("killed", ["before the records", "never"])
def test_the_first_checkpoint_after_going_back_takes_the_place_of_later_ones(
    killed, trainer, whole, went_back, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    if killed == "before the records":
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "settle", fails_with(KeyboardInterrupt()))
            assert go_back(trainer, folder) == 130
        assert {name[:13] for name in trainer.checkpoints(folder)} == {"step-00000002", "step-00000004"}
        assert len(trainer.metrics(folder, "loss")) == 8
        assert trainer.resume(folder) == 0
    else:
        folder = went_back
    trainer.assert_same_run(went_back, folder, 8)
    assert not list(folder.glob(".metrics*")) and trainer.summary(folder)["status"] == "finished"


@pytest.mark.parametrize("moment", ["before its folder is open", "before it saves", "after it has saved"])
def test_the_next_attempt_of_an_elastic_agent_goes_back_to_the_same_checkpoint(
    moment, trainer, whole, went_back, tmp_path, monkeypatch, capsys
):
    """The agent's store outlives an attempt; the next one has the same command line."""
    folder, store = tmp_path / "run", dist.HashStore()
    shutil.copytree(whole, folder)
    owner, name = {
        "before its folder is open": (RunFolder, "__init__"),
        "before it saves": (Run, "_finish"),
        "after it has saved": (Run, "_validate"),
    }[moment]
    monkeypatch.setattr(parallel, "job_store", lambda: store)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_with(KeyboardInterrupt()))
        assert go_back(trainer, folder) == 130
    gc.collect()  # the failed attempt lets go of its lock
    capsys.readouterr()
    assert go_back(trainer, folder) == 0
    after = {"before its folder is open": "resumed after step 2", "before it saves": "restarted after step 2"}
    assert after.get(moment, "restarted after step 8") in capsys.readouterr().out
    trainer.assert_same_run(went_back, folder, 8)
    assert trainer.checkpoints(folder) == trainer.checkpoints(went_back)


@pytest.mark.parametrize("moment", ["before", "half"])
def test_a_run_killed_while_its_last_save_deletes_older_checkpoints_ends_with_the_same_ones(
    moment, trainer, tmp_path, monkeypatch
):
    folder, words = tmp_path / "run", [*ONE_LAYER, "--checkpoint-every", 2, "--keep-checkpoints", 2]
    prune, rmtree = Checkpointer._prune, shutil.rmtree

    def killed(self, target, evict):
        if target.name == "step-00000008":
            if moment == "half":
                patch.setattr(checkpointer.shutil, "rmtree", fails_with(KeyboardInterrupt()))
                prune(self, target, evict)
            raise KeyboardInterrupt
        return prune(self, target, evict)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_prune", killed)
        with contextlib.suppress(KeyboardInterrupt):
            assert trainer.here(*words, "--out", folder) == 130
    assert shutil.rmtree is rmtree and len(list((folder / "checkpoints").iterdir())) == 3
    gc.collect()  # the interrupted run lets go of its lock
    assert trainer.resume(folder) == 0
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


def test_going_back_to_where_nothing_is_left_to_do_ends_there(trainer, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    assert trainer.resume(folder / "checkpoints/step-00000004", "--steps", 4) == 0
    assert trainer.checkpoints(folder) == ["step-00000002", "step-00000004"]
    assert len(trainer.metrics(folder, "loss")) == 4 and trainer.summary(folder)["steps"] == 4


# ---- folders of runs that died early ----


@pytest.mark.parametrize("again", ["resume", "the same command"])
@pytest.mark.parametrize("moment", ["folder", "config", "capture", "step", "full disk"])
def test_a_run_that_died_before_its_first_checkpoint_begins_again(moment, again, trainer, whole, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "run"
    words = [*ONE_LAYER, "--val-every", 3, "--checkpoint-every", 2, "--out", folder]
    owner, name, error = {
        "folder": (RunFolder, "write_config", KeyboardInterrupt()),
        "config": (RunFolder, "write", KeyboardInterrupt()),
        "capture": (Run, "_capture", KeyboardInterrupt()),
        "step": (Run, "_finish", RuntimeError("planted")),
        "full disk": (checkpointer, "dcp_save", OSError(errno.ENOSPC, "No space left on device")),
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_with(error))
        try:
            assert trainer.here(*words) in (1, 130)
        except RuntimeError as failure:
            assert failure is error
    error.__traceback__ = None
    gc.collect()  # the failed run lets go of its lock
    assert trainer.checkpoints(folder) == []
    assert (trainer.resume(folder) if again == "resume" else trainer.here(*words)) == 0
    trainer.assert_same_run(whole, folder, 8)
    assert trainer.metrics(folder, "val_loss") == trainer.metrics(whole, "val_loss")
    assert trainer.here(*words) == 2  # now it has checkpoints, which are not overwritten
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


def test_runs_of_one_second_have_folders_of_their_own():
    from stepgraph.config.train import TrainConfig

    assert len({TrainConfig().run_folder() for _ in range(3)}) == 3


@pytest.mark.parametrize("command", ["export", "sample"])
def test_a_checkpoint_that_the_run_deletes_while_it_is_read_is_replaced_by_its_newest(
    command, trainer, whole, tmp_path, monkeypatch, capsys
):
    folder, taken = tmp_path / "run", []
    shutil.copytree(whole, folder)
    load = Checkpointer.load

    def pruned(self, path, state, **options):
        if not taken:
            shutil.rmtree(path)
        taken.append(path.name)
        return load(self, path, state, **options)

    monkeypatch.setattr(Checkpointer, "load", pruned)
    words = {"export": ["--out", str(tmp_path / "hf")], "sample": ["--max-new-tokens", "2", "--device", "cpu"]}
    assert trainer.main([command, str(folder), *words[command]]) == 0
    assert taken == ["step-00000008", "step-00000006"]
    if command == "export":
        assert "model of step 6" in capsys.readouterr().out
    gone = folder / "checkpoints/step-00000004"
    taken.clear()
    (tmp_path / "hf2").mkdir()
    assert trainer.main(["export", str(gone), "--out", str(tmp_path / "hf2")]) == 2  # named, it is not replaced
    assert f"{gone} is not there; {folder / 'checkpoints'} has step-00000006" in one_line(capsys)
