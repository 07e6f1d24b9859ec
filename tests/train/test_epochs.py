"""``--epochs N``: the steps of a run from the rows of its data."""

import dataclasses
import math
import shutil

import pytest

from stepgraph.cli import parse_train
from stepgraph.config.train import TrainConfig
from stepgraph.train.data import PackedLoader
from stepgraph.train.start import lr_at, with_steps_of_epochs
from tests.train.conftest import TINY

SMALL = [*(word for word in TINY if word not in ("--steps", "12")), "--model.n-layers", "1", "--passes", "exact"]


@pytest.fixture
def text(tmp_path):
    """About 90 rows of 64 tokens for training."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(320)))
    return file


class Rows(PackedLoader):
    """Data of 101 rows."""

    def __init__(self):
        pass

    def rows_of_an_epoch(self):
        return 101


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"epochs": 1}, 26),
        ({"epochs": 2}, 51),
        ({"epochs": 0.5}, 13),
        ({"epochs": 3, "accumulate": 2}, 38),
        ({"epochs": 4, "mesh": "ddp=2"}, 51),
        ({"epochs": 4, "mesh": "fsdp=2,tp=2"}, 51),
        ({"epochs": None, "steps": 7, "warmup_steps": 2}, 7),
    ],
)
def test_steps_are_rounded_up(options, steps):
    config, line = with_steps_of_epochs(TrainConfig(batch_size=4, **{"warmup_steps": 3} | options), Rows())
    assert config.steps == steps and (f", {steps} steps" in line) == (config.epochs is not None)


def test_a_warm_up_for_long_runs_is_shortened_and_one_that_was_asked_for_is_not():
    config = TrainConfig(batch_size=50, epochs=2, seq_len=8)
    assert with_steps_of_epochs(config, Rows())[0].warmup_steps == 0 and TrainConfig().warmup_steps == 10
    with pytest.raises(ValueError, match="warmup_steps=8 must be below steps=5"):
        with_steps_of_epochs(dataclasses.replace(config, warmup_steps=8), Rows())
    with pytest.raises(ValueError, match="profile=10:13 goes beyond steps=5"):
        with_steps_of_epochs(dataclasses.replace(config, profile="10:13"), Rows())


def test_a_run_of_epochs_and_its_continuation(trainer, text, tmp_path, capsys):
    whole = tmp_path / "whole"
    words = ["--data", str(text), "--val-every", "0", "--checkpoint-every", "16", "--out", str(whole)]
    assert trainer.main(["train", *SMALL, *words, "--epochs", "1.5"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("epochs"))
    rows = int(line.split(" rows each")[0].split()[-1])
    config = TrainConfig.from_json((whole / "config.json").read_text())
    assert config.steps == trainer.summary(whole)["steps"] == math.ceil(1.5 * rows / 4) > 16
    assert trainer.metrics(whole, "lr")[-1] == (config.steps, pytest.approx(lr_at(config.steps - 1, config)))
    _, (_, state) = trainer.saved(whole, config.steps)
    assert state["loader"]["epoch"] == 1 and state["loader"]["row"] == 4 * config.steps - rows

    half = tmp_path / "half"
    shutil.copytree(whole, half)
    assert trainer.resume(half / "checkpoints" / "step-00000016") == 0
    trainer.assert_same_run(whole, half, config.steps)

    assert trainer.resume(half, "--epochs", 2) == 0
    assert trainer.summary(half)["steps"] == math.ceil(2 * rows / 4)
    assert trainer.resume(half, "--epochs", 2) == 2
    assert "ask for more with --epochs" in capsys.readouterr().err
    longer = parse_train(["--resume", str(half), "--steps", "99"])
    assert (longer.steps, longer.epochs) == (99, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--epochs 2 --steps 5", "steps and epochs are both given: drop one"),
        ("--epochs 0", "epochs=0.0 must be above 0"),
        ("--epochs nan", "epochs=nan must be finite"),
        ("--epochs two", "'two' is not one of a number, None"),
        ("--epochs 2 --data text.txt:0.5,stdlib:0.5", "each source of a mixture has epochs of its own: use --steps"),
        ("--epochs 2 --config both.toml", "steps and epochs are both given: drop one"),
    ],
)
def test_what_is_refused(trainer, text, monkeypatch, capsys, options, message):
    monkeypatch.chdir(text.parent)
    (text.parent / "both.toml").write_text("steps = 5\nepochs = 1\n")
    words = [] if "--config" in options else SMALL
    assert trainer.main(["train", *words, *options.split()]) == 2
    assert message in capsys.readouterr().err and not (text.parent / "runs").exists()


def test_the_command_line_goes_before_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("epochs = 3\n")
    given = parse_train(["--config", str(file)])
    assert given.epochs == 3 and given.warmup_steps == TrainConfig().warmup_steps
    assert parse_train(["--config", str(file), "--steps", "5"]).epochs is None
    file.write_text("steps = 5\n")
    assert parse_train(["--config", str(file), "--epochs", "5"]).epochs == 5
