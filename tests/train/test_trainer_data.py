"""Runs on a mixture, with several validation sets, and data that does not fit the model."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from stepgraph.config.train import TrainConfig
from stepgraph.models import llama3_debug
from stepgraph.train.start import open_fitting_data

WORDS = ["--model.n-layers", 1, "--steps", 6, "--val-every", 3, "--checkpoint-every", 3, "--log-every", 1]


@pytest.fixture(scope="module")
def parts(trainer, tmp_path_factory):
    """The corpus as two files of another kind."""
    folder = tmp_path_factory.mktemp("parts")
    texts = trainer.corpus.read_text().split("<|endoftext|>")
    (folder / "code.JSONL").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts[:5]))
    (folder / "web.txt").write_text("<|endoftext|>".join(texts[5:]))
    return folder


def test_a_mixture_goes_on_bitwise_and_each_part_has_its_validation_loss(trainer, parts, tmp_path, capsys):
    data = ["--data", f"{parts}/code.JSONL:3,{parts}/w*.txt:1", "--text-field", "body"]
    assert trainer.here(*WORDS, *data, "--out", tmp_path / "whole") == 0
    assert f"data 75.0% {parts}/code.JSONL: 5 documents" in capsys.readouterr().out
    whole = trainer.metrics(tmp_path / "whole", "val_loss", "val_loss_code", "val_loss_w")
    assert [step for step, *_ in whole] == [3, 6]
    for _, loss, code, web in whole:
        assert loss == pytest.approx(0.75 * code + 0.25 * web) and code != web

    losses, (tensors, texts) = trainer.metrics(tmp_path / "whole", "loss"), trainer.saved(tmp_path / "whole", 6)
    assert trainer.resume(tmp_path / "whole/checkpoints/step-00000003") == 0
    assert trainer.metrics(tmp_path / "whole", "loss") == losses
    again, others = trainer.saved(tmp_path / "whole", 6)
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items()) and texts == others
    assert texts[1]["loader"]["counts"] == [18, 6]


def test_a_streamed_data_set_goes_on_bitwise(trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("stepgraph.train.data.loader.BUFFER_TOKENS", 4096)
    folder = tmp_path / "set"
    folder.mkdir()
    for number, text in enumerate(trainer.corpus.read_text().split("<|endoftext|>")[:4]):
        lines = (json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))
        (folder / f"train-{number}.jsonl").write_text("".join(lines))
    assert trainer.here(*WORDS, "--data", f"hf-stream:{folder}", "--out", tmp_path / "whole") == 0
    said = capsys.readouterr().out
    assert f"data hf-stream:{folder}: 4 files, read during the run" in said
    losses, (tensors, texts) = trainer.metrics(tmp_path / "whole", "loss"), trainer.saved(tmp_path / "whole", 6)
    assert trainer.resume(tmp_path / "whole/checkpoints/step-00000003") == 0
    assert trainer.metrics(tmp_path / "whole", "loss") == losses
    again, others = trainer.saved(tmp_path / "whole", 6)
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items()) and texts == others
    assert texts[1]["loader"]["row"] == 24

    for number in range(4):
        (folder / f"train-{number}.jsonl").write_text('{"text": "other"}\n' * 400)
    assert trainer.resume(tmp_path / "whole/checkpoints/step-00000003", "--steps", 9) == 2
    assert "the documents of --data changed since the data position was saved" in capsys.readouterr().err


def test_validation_sets_of_their_own(trainer, parts, tmp_path):
    words = [*WORDS, "--data", trainer.corpus, "--val-data", f"{parts}/web.txt,{trainer.corpus}"]
    assert trainer.here(*words, "--out", tmp_path / "run") == 0
    ((_, loss, web, text), *_) = trainer.metrics(tmp_path / "run", "val_loss", "val_loss_web", "val_loss_text")
    assert loss == pytest.approx((web + text) / 2)
    assert trainer.events(tmp_path / "run", "val/loss_web")[0] == (3, pytest.approx(web))


def test_weights_that_are_there_have_the_rows_that_they_have():
    """More than the model is advised only where the model is new."""
    small = dataclasses.replace(llama3_debug(), vocab_size=256)
    with pytest.raises(ValueError, match=r"the tokenizer has 257 tokens, the model 256: try --model\.vocab-size 320"):
        open_fitting_data(TrainConfig(model=small))
    for given in ({"init_from_hf": Path("base")}, {"resume": Path("run")}):
        with pytest.raises(ValueError, match="the tokenizer has 257 tokens, the model 256: use the one of these weig"):
            open_fitting_data(TrainConfig(model=small, **given))


def test_weights_of_another_vocabulary_do_not_train_on_bytes_without_a_word():
    """As with a preset that names the model and not its tokenizer."""
    large = dataclasses.replace(llama3_debug(), vocab_size=1024)
    with pytest.warns(UserWarning, match=r"read as bytes, 257 tokens, .* have 1024: .*--tokenizer base/tokenizer.json"):
        open_fitting_data(TrainConfig(model=large, init_from_hf=Path("base")))
