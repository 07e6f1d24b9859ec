"""``--log wandb``, against a stand-in for the package: what it is given, and what it is asked to go on with."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

WORDS = ["--model.n-layers", 1, "--steps", 4, "--val-every", 2, "--checkpoint-every", 2, "--log", "wandb"]


@pytest.fixture
def wandb(monkeypatch):
    """The stand-in: ``runs`` has what each `init` was given, and what was logged."""
    runs = []

    def init(**options):
        run = SimpleNamespace(options=options, logged=[], finished=False)
        run.log = lambda values, step: run.logged.append((step, values))
        run.finish = lambda: setattr(run, "finished", True)
        runs.append(run)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, runs=runs))
    return sys.modules["wandb"]


def test_metrics_go_there_too_and_a_resumed_run_goes_on_in_the_same_one(wandb, trainer, tmp_path):
    folder = tmp_path / "run"
    assert trainer.here(*WORDS, "--out", folder) == 0
    assert trainer.resume(folder, "--steps", 5) == 0
    first, second = wandb.runs
    assert first.options["id"] == second.options["id"] == json.loads((folder / "wandb.json").read_text())["id"]
    assert first.options["name"] == "run" and first.options["resume"] == "allow"
    assert first.options["config"]["steps"] == 4 and second.options["config"]["steps"] == 5
    logged = [(step, values["train/loss"]) for step, values in first.logged + second.logged if "train/loss" in values]
    assert logged == trainer.metrics(folder, "loss") and len(logged) == 5
    assert [step for step, values in first.logged if "val/loss" in values] == [2, 4]
    assert first.finished and second.finished


def test_a_package_that_fails_in_the_middle_ends_the_run_after_a_save(wandb, trainer, tmp_path, capsys):
    original = wandb.init

    def init(**options):
        run = original(**options)
        run.log = lambda values, step: None if step < 3 else {}["no\nsuch service"]
        return run

    wandb.init = init
    assert trainer.here(*WORDS, "--out", tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert error.startswith(r"error: wandb failed (KeyError: 'no\nsuch service'): continue without --log wandb")
    assert "; step 3 is saved: --resume" in error and error.count("\n") == 1
    assert trainer.resume(tmp_path / "run", "--log", "tensorboard") == 0


def test_a_missing_package_or_one_that_does_not_start_is_one_line(wandb, trainer, tmp_path, monkeypatch, capsys):
    def refuses(**_):
        raise RuntimeError("api_key not configured\n(no-tty)")

    wandb.init = refuses
    assert trainer.here(*WORDS, "--out", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "wandb does not start (RuntimeError: api_key not configured (no-tty)): log in, or set WANDB_MODE=" in error

    original = importlib.import_module

    def missing(name, *rest):
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        return original(name, *rest)

    monkeypatch.setattr("stepgraph.train.records.folder.importlib.import_module", missing)
    assert trainer.here(*WORDS, "--out", tmp_path / "none") == 2
    assert "error: --log wandb needs the package wandb: pip install 'stepgraph[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
