"""A run of a model with experts: it learns, its load is in the records, and it goes on bitwise where it stopped."""

import re

import pytest
import torch

from stepgraph import cli

EXPERTS = [
    *("deepseek-v3-debug", "--model.dim", 48, "--model.n-layers", 2, "--model.n-heads", 2, "--model.ffn-dim", 96),
    *("--model.moe.n-experts", 8, "--model.moe.ffn-dim", 32, "--model.q-lora-rank", 16, "--model.kv-lora-rank", 16),
    *("--seq-len", 32, "--batch-size", 2, "--accumulate", 2, "--val-batches", 1, "--device", "cpu", "--val-every", 0),
    *("--schedule", "constant", "--warmup-steps", 1, "--checkpoint-every", 0, "--passes", "exact", "--lr", 0.01),
]


def run(trainer, folder, steps):
    words = map(str, [*EXPERTS, "--data", trainer.corpus, "--steps", steps, "--out", folder])
    assert trainer.main(["train", *words]) == 0


def test_a_run_learns_balances_and_goes_on_bitwise(trainer, tmp_path, capsys):
    run(trainer, tmp_path / "whole", 8)
    printed = capsys.readouterr().out
    assert re.search(
        r"step 8/8 \| loss \d+\.\d{4} \| lr \d\.\de-\d\d \| grad_norm \d+\.\d\d \| load \d\.\d\d \| ", printed
    )
    assert re.search(r"^model .*: 1[\d,]* parameters", printed, re.MULTILINE)
    losses = trainer.metrics(tmp_path / "whole", "loss")
    assert losses[-1][1] < losses[0][1] - 1
    loads = trainer.metrics(tmp_path / "whole", "expert_load")
    assert len(loads) == 8 and all(len(load) == 1 and 1 <= load[0] < 2.667 for _, load in loads)
    assert trainer.events(tmp_path / "whole", "train/expert_load/0") == [(s, pytest.approx(x[0])) for s, x in loads]
    tensors, _ = trainer.saved(tmp_path / "whole", 8)
    bias = tensors["model.layers.1.mlp.router.expert_bias"]
    moved = bias / 0.02  # the preset's balance_rate
    assert moved.any() and torch.allclose(moved, moved.round(), atol=1e-4) and moved.abs().max() <= 8

    run(trainer, tmp_path / "parts", 4)
    assert trainer.resume(tmp_path / "parts", "--steps", 8) == 0
    trainer.assert_same_run(tmp_path / "whole", tmp_path / "parts", 8)
    assert trainer.metrics(tmp_path / "parts", "expert_load") == loads


def test_what_could_not_be_exported_is_refused_before_training(tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "deepseek-v3-16b", "--export-hf", str(tmp_path / "out"), "--out", str(tmp_path / "run")])
    assert stop.value.code == 2 and not (tmp_path / "run").exists()
