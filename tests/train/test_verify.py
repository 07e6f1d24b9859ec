"""``stepgraph train --verify``: told before the first step, and the run is the same as without."""

import pytest
import torch

ONE_LAYER = ("--model.n-layers", 1, "--val-every", 0, "--checkpoint-every", 0, "--passes", "exact")


@pytest.mark.parametrize("options", [(), ("--precision", "bf16", "--accumulate", 2)], ids=["fp32", "bf16"])
def test_a_verified_run_is_the_run_without(options, trainer, tmp_path, capsys):
    folders = [tmp_path / name for name in ("plain", "verified")]
    for folder, more in zip(folders, ((), ("--verify",)), strict=True):
        assert trainer.here(*ONE_LAYER, "--steps", 4, *options, *more, "--out", folder) == 0
        printed = capsys.readouterr().out
        assert ("verify: bitwise equal to eager: loss " in printed) is bool(more)
    verdict = printed.index("verify: ")
    assert printed.index("ready in") < verdict < printed.index("step 1/4")
    names = ("loss", "grad_norm", "lr")
    assert trainer.metrics(folders[0], *names) == trainer.metrics(folders[1], *names)
    states = [trainer.saved(folder, 4)[0] for folder in folders]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def wrong_update(monkeypatch):
    """Eager updates twice, which the captured step does not."""
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (step(self), step(self)))


def test_an_exact_step_that_is_not_ends_the_run_with_one_line(trainer, tmp_path, capsys, monkeypatch):
    wrong_update(monkeypatch)
    assert trainer.here(*ONE_LAYER, "--verify", "--out", tmp_path / "run") == 1
    out, error = capsys.readouterr()
    assert error.startswith("error: the exact step is not bitwise equal to eager: ")
    assert error.count("\n") == 1 and "step 1/" not in out
    assert "verify: not bitwise equal to eager; loss and metrics within" in out
    assert trainer.summary(tmp_path / "run")["status"] == "failed"


def test_passes_that_round_are_told_and_warned_of_beyond_the_tolerance(trainer, tmp_path, capsys, monkeypatch):
    options = (
        "--model.n-layers",
        1,
        "--steps",
        3,
        "--warmup-steps",
        0,
        "--norm",
        "kernel",
        "--disable-pass",
        "inductor",
    )
    assert trainer.here(*options, "--verify", "--out", tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert "verify: not bitwise equal to eager; loss and metrics within a relative 0.0001" in out
    assert "parameter: " in out and "warning" not in out

    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda params, norm: clip(params, norm) * 1.01)
    assert trainer.here(*options, "--verify", "--out", tmp_path / "beyond") == 0
    out = capsys.readouterr().out
    assert "LOSS OR METRICS BEYOND" in out
    assert "warning: loss or gradient norm differ from eager by more than a relative 0.0001" in out
