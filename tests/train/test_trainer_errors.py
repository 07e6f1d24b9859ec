"""Runs that cannot begin and runs that fail: one clear line, and nothing lost."""

import json
import math
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch

from stepgraph.config import build
from stepgraph.config.train import TrainConfig
from stepgraph.models import next_token_loss
from stepgraph.parallel.ranks import Ranks
from stepgraph.train.checkpoint.checkpointer import Checkpointer
from stepgraph.train.faults import Finite, NotFiniteError
from stepgraph.train.trainer import Figures, Run

ONE_LAYER = ["--model.n-layers", 1]


def one_line(capsys) -> str:
    """What stderr holds: a single line that begins with `error: `."""
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


# ---- before the run begins ----


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (lambda tmp: ["--data", tmp / "missing.txt"], "missing.txt: No such file"),
        (lambda tmp: ["--data", write(tmp / "a.txt", b"text \xff\xfe text" * 999)], "not UTF-8 at byte 5"),
        (lambda tmp: ["--data", write(tmp / "a.txt", "")], "is empty"),
        (lambda tmp: ["--data", write(tmp / "a.jsonl", '{"text": "x"}\n{"text": \n')], "a.jsonl:2: not valid JSON"),
        (lambda tmp: ["--data", write(tmp / "a.parquet", b"PAR1 and no more")], "not a readable parquet file"),
        (lambda tmp: ["--data", write(tmp / "a.txt", "too little text")], "too few for one batch of batch_size=4"),
        (lambda tmp: ["--tokenizer", write(tmp / "tokenizer.json", '{"model": ')], "is not a tokenizer"),
        (lambda tmp: ["--tokenizer", write(tmp / "tokenizer.json", '{"model": 1}')], "is not a tokenizer"),
        (lambda tmp: ["--model.vocab-size", 256], "the tokenizer has 257 tokens, the model 256"),
        (lambda tmp: ["--model.vocab-size", 2_000_000_000], "the model does not fit: its parameters alone take 953."),
        (lambda tmp: ["--init-from-hf", tmp], "config.json"),
        (lambda tmp: ["--export-hf", tmp], "is not empty: use a new folder"),
        (lambda tmp: ["--export-hf", tmp / "file"], "is a file: use a new folder"),
        (
            lambda tmp: ["--export-hf", tmp / ".." / "run"],
            "in/../run are one folder, and both have",
        ),
        (lambda tmp: ["--export-hf", tmp / "file" / "out"], "in/file, which is a file: use a new folder"),
        (
            lambda tmp: ["--sample-every", 7],
            "sample_every=7 must be a multiple of val_every=5, as samples are written at",
        ),
        (lambda tmp: ["--sample-every", 7, "--val-every", 0], "is at validations and val_every=0: try --val-every 7"),
        (lambda tmp: ["--sample-prompt", "Once"], "sample_prompt needs samples: add --sample-every"),
        (
            lambda tmp: ["--sample-every", 5, "--sample-prompt", "x" * 2048],
            "the prompt has 2049 tokens, the model takes",
        ),
        (lambda tmp: ["--memory", "ful"], "unknown memory policy 'ful'"),
        (lambda tmp: ["--passes", "exactly"], "--passes"),
        (lambda tmp: ["--saved-steps", tmp / "file"], "in/file is a file: use a folder of saved steps"),
        (lambda tmp: ["--lr", "nan"], "lr=nan must be finite, and above 0"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value) if isinstance(value, str) else "",
)
def test_bad_input_is_one_line_and_leaves_no_run_folder(options, says, trainer, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").touch()
    assert trainer.here(*ONE_LAYER, *options(tmp_path / "in"), "--out", tmp_path / "run") == 2
    assert says in one_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(trainer, tmp_path, capsys):
    assert trainer.here("--device", "cuda", "--out", tmp_path / "run") == 2
    assert "torch sees no GPU here" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_had_is_refused_and_kept(trainer, tmp_path, capsys):
    file = write(tmp_path / "file", "mine")
    assert trainer.here("--out", tmp_path) == 2
    assert "is not empty" in one_line(capsys)
    assert trainer.here("--out", file) == 2
    assert "is a file" in one_line(capsys)
    assert trainer.here("--out", file / "run") == 2
    assert "cannot write the run folder" in one_line(capsys)
    (tmp_path / "locked").mkdir(mode=0o500)
    if os.geteuid() != 0:  # root may write anywhere
        assert trainer.here("--out", tmp_path / "locked" / "run") == 2
        assert "Permission denied" in one_line(capsys)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "locked"] and file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_export_that_could_not_be_written_is_refused_before_training(trainer, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert trainer.here("--export-hf", tmp_path / "locked" / "a" / "b", "--out", tmp_path / "run") == 2
    assert "locked is read-only: use another folder" in one_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sample"], "sample takes a run folder first: write stepgraph sample RUN"),
        (["sample", "{tmp}"], "is not a run folder (it has no config.json)"),
        (["sample", "{tmp}", "--top-p", "0"], "top_p=0.0 must be in (0, 1]"),
        (["sample", "{tmp}", "--temperature", "-1"], "temperature=-1.0 must be 0 or more"),
        (["sample", "{tmp}", "--max-new-tokens", "0"], "max_new_tokens=0 must be above 0"),
        (["export"], "export takes a run folder first: write stepgraph export RUN --out FOLDER"),
        (["export", "{tmp}"], "export needs a folder to write: add --out FOLDER"),
        (["export", "{tmp}", "--out", "{tmp}/new"], "is not a run folder (it has no config.json): use the folder of a"),
        (["export", "{tmp}", "--to", "x"], "unknown option --to"),
    ],
    ids=lambda value: None if isinstance(value, list) else re.sub(r"\W+", "-", value),
)
def test_a_wrong_sample_or_export_is_one_line(words, says, trainer, tmp_path, capsys):
    assert trainer.main([word.format(tmp=tmp_path) for word in words]) == 2
    assert says in one_line(capsys)


def test_a_run_folder_in_use_is_refused_before_the_data_is_opened(trainer, tmp_path, capsys):
    assert trainer.here("--data", tmp_path / "missing.txt", "--out", tmp_path.parent) == 2
    assert "is not empty" in one_line(capsys)


# ---- while it runs ----


def test_without_a_cpp_compiler_inductor_says_what_to_do(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # nothing compiled before serves
    output, _ = (process := trainer.start(*ONE_LAYER, "--inductor", "full", "--out", tmp_path / "run")).communicate()
    assert process.returncode == 2 and "Traceback" not in output
    assert output.splitlines()[-1] == (
        "error: Inductor finds no C++ compiler (it tried no-such-compiler): install one, g++ for example, or "
        "turn Inductor off, by --inductor off or passes='exact'"
    )


def failed(trainer, folder):
    summary = trainer.summary(folder)
    assert summary["status"] == "failed"
    return summary


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_batch(trainer, tmp_path, capsys):
    """The learning rate explodes after a good checkpoint: a run of 4 good steps, resumed with a mad --lr."""
    folder = tmp_path / "run"
    assert trainer.here(*ONE_LAYER, "--steps", 4, "--schedule", "constant", "--out", folder) == 0
    capsys.readouterr()
    options = ["--steps", 12, "--lr", "1e38", "--val-every", 0, "--checkpoint-every", 1]
    assert trainer.resume(folder, *options) == 1
    error = one_line(capsys)
    step, kept, saved = re.fullmatch(
        r"error: the (?:loss|gradient norm) of step (\d+) is (?:nan|inf); its batch is kept in (\S+); "
        r"--resume (\S+) with a lower --lr\n",
        error,
    ).groups()
    step = int(step)
    summary = failed(trainer, folder)
    assert summary["error"] == error.removeprefix("error: ").rstrip("\n")
    # The step itself was not saved, and the newest checkpoint has the weights that it began with.
    assert step > 4 and trainer.checkpoints(folder)[-1] == f"step-{step - 1:08d}"
    assert "step-00000004" in trainer.checkpoints(folder) and Path(saved) == folder / f"checkpoints/step-{step - 2:08d}"
    assert trainer.metrics(folder, "loss")[-1][0] == step - 1

    batch = torch.load(kept, weights_only=True)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == dict.fromkeys(
        ("tokens", "targets"), ((4, 64), torch.int64)
    )
    # With these parameters that batch does give what was reported.
    config = TrainConfig.from_json((folder / "config.json").read_text())
    model = build.build_model(config, torch.device("cpu"))
    Checkpointer(folder / "checkpoints").load(folder, {"model": model}, rng=False)
    loss = next_token_loss(model, batch)
    loss.backward()
    assert not all(torch.isfinite(t).all() for t in (loss, *(p.grad for p in model.parameters())))


def test_the_first_steps_loss_is_not_laid_to_the_learning_rate(tmp_path):
    batch = {"tokens": torch.zeros(1)}
    for there, says in ((None, "the model"), (tmp_path, f"the weights in {tmp_path}")):
        with pytest.raises(NotFiniteError, match=f"no update came before it: look at {says}, or the batch$"):
            Finite(TrainConfig(init_from_hf=there), tmp_path, Ranks()).accepts(1, math.nan, 1.0, batch)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "one step ahead of the host"])
def test_the_bad_step_is_never_saved_even_when_it_is_the_last(ahead, trainer, tmp_path, monkeypatch, capsys):
    original = Run._launch

    def poisoned(self):
        self.runs_ahead = ahead
        launched = original(self)
        if launched.step == 8:
            launched.figures = Figures(torch.tensor(float("inf")), launched.metrics["grad_norm"])
        return launched

    monkeypatch.setattr(Run, "_launch", poisoned)
    assert trainer.here(*ONE_LAYER, "--steps", 8, "--out", tmp_path / "run") == 1
    assert "the loss of step 8 is inf" in one_line(capsys)
    assert trainer.checkpoints(tmp_path / "run") == ["step-00000004"]
    assert trainer.metrics(tmp_path / "run", "loss")[-1][0] == 7 and failed(trainer, tmp_path / "run")


def test_steps_that_are_not_finite_are_left_out_until_too_many_come_in_a_row(trainer, tmp_path, monkeypatch, capsys):
    """Every third batch or so has an infinite loss; then all have."""
    plain, modulus = build.build_loss, 3

    def build_loss(*args):
        loss_fn = plain(*args)

        def poisoned(model, batch):
            bad = (batch["tokens"].sum() % modulus == 0) & model.training
            return loss_fn(model, batch) * torch.where(bad, float("inf"), 1.0)

        return poisoned

    monkeypatch.setattr(build, "build_loss", build_loss)
    skip = ("--on-nonfinite", "skip", "--max-skipped", 5)
    assert trainer.here(*ONE_LAYER, *skip, "--steps", 9, "--out", tmp_path / "run") == 0
    left_out = [step for step, _ in trainer.metrics(tmp_path / "run", "skipped_steps")]
    losses = trainer.metrics(tmp_path / "run", "loss")
    assert left_out and losses and sorted([*left_out, *(step for step, _ in losses)]) == list(range(1, 10))
    summary = trainer.summary(tmp_path / "run")
    assert summary["skipped_steps"] == len(left_out) and summary["steps"] == 9
    assert f"step {left_out[0]} skipped: its loss is inf" in capsys.readouterr().out

    modulus = 1
    assert trainer.here(*ONE_LAYER, *skip, "--steps", 9, "--out", tmp_path / "all") == 1
    assert "the loss of step 5 (5 consecutive steps skipped) is inf; its batch is kept" in one_line(capsys)


def test_a_batch_that_cannot_be_kept_does_not_hide_why_the_run_ends(tmp_path):
    (tmp_path / "bad-batch-step-4.pt").mkdir()
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(NotFiniteError, match=r"^the loss is nan; its batch could not be kept \(.*\); start again"):
            Finite(TrainConfig(), folder, Ranks()).require("the loss", math.nan, 4, {"tokens": torch.zeros(1)})


def test_the_advice_is_a_checkpoint_whose_weights_gave_a_finite_loss(tmp_path):
    for step in range(1, 9):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-old").mkdir()
    stops, skips = (Finite(TrainConfig(on_nonfinite=on, max_skipped=3), tmp_path, Ranks()) for on in ("stop", "skip"))
    batch = {"tokens": torch.zeros(1)}
    with pytest.raises(NotFiniteError, match=r"--resume .*/step-00000006 with a lower --lr"):
        stops.accepts(8, math.nan, 1.0, batch)
    assert not skips.accepts(6, 1.0, math.inf, batch) and not skips.accepts(7, math.nan, 1.0, batch)
    with pytest.raises(NotFiniteError, match=r"--resume .*/step-00000004 with a lower --lr"):
        skips.accepts(8, 1.0, math.nan, batch)


def test_a_validation_loss_that_is_not_finite_stops_the_run_after_the_save(trainer, tmp_path, capsys):
    options = ["--steps", 1, "--warmup-steps", 0, "--lr", "1e18"]
    assert trainer.here(*ONE_LAYER, *options, "--out", tmp_path / "run") == 1
    assert re.match(
        r"error: the validation loss after step 1 is nan; its batch is kept in .*start again", one_line(capsys)
    )
    assert failed(trainer, tmp_path / "run")["train_loss_nats"] > 0
    assert trainer.checkpoints(tmp_path / "run") == ["step-00000001"]  # validation may be at fault


def test_a_disk_that_takes_no_more_is_one_line_and_earlier_checkpoints_stay(trainer, tmp_path, monkeypatch, capsys):
    original, calls = Checkpointer.save, []

    def full(self, step, state, evict):
        calls.append(step)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        try:
            return original(self, step, state, evict)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    monkeypatch.setattr(Checkpointer, "save", full)
    assert trainer.here(*ONE_LAYER, "--out", tmp_path / "run") == 1
    assert "step-00000008: " in (error := one_line(capsys)) and "earlier checkpoints are intact" in error
    assert trainer.checkpoints(tmp_path / "run") == ["step-00000004", "step-00000008"]  # the last save found room
    assert failed(trainer, tmp_path / "run")
    monkeypatch.undo()
    assert trainer.resume(tmp_path / "run") == 0


def test_a_defect_keeps_its_traceback_and_is_in_the_summary(trainer, tmp_path, monkeypatch):
    def fail(self):
        raise TypeError("a defect\nof two lines")

    monkeypatch.setattr(Run, "_launch", fail)
    with pytest.raises(TypeError):
        trainer.here(*ONE_LAYER, "--out", tmp_path / "run")
    assert failed(trainer, tmp_path / "run")["error"] == "TypeError: a defect"
    assert json.loads((tmp_path / "run" / "passes.json").read_text())


def test_a_memory_budget_that_cannot_be_met_is_one_line(trainer, tmp_path, capsys):
    assert trainer.here(*ONE_LAYER, "--memory", "budget=0.01", "--out", tmp_path / "run") == 2
    assert "memory budget of" in one_line(capsys)
    assert failed(trainer, tmp_path / "run")["steps"] == 0


def test_ctrl_c_before_the_run_begins_is_one_line(trainer, tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build_model", interrupt)
    assert trainer.here("--out", tmp_path / "run") == 130
    assert "interrupted before the run began" in one_line(capsys) and not (tmp_path / "run").exists()


def test_ctrl_c_while_the_step_is_captured_ends_the_run_at_once(trainer, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the capture went on")

    monkeypatch.setattr(build, "build_step", interrupted)
    assert trainer.here("--out", tmp_path / "run") == 130
    assert capsys.readouterr().err == "interrupted\n"
