"""The options of a run that starts from a Hugging Face folder and no preset."""

import json
from dataclasses import replace

import pytest
import torch

from stepgraph.cli import parse_train
from stepgraph.config.presets import fine_tuning
from stepgraph.models import FAMILIES, deepseek_v3_debug, llama3_debug, qwen3_30b_a3b

MODELS = [llama3_debug(), deepseek_v3_debug(), qwen3_30b_a3b()]


def folder_of(config, folder):
    (family,) = [family for family in FAMILIES if family.config is type(config)]
    (folder / "config.json").write_text(json.dumps(family.hugging_face.write_config(config, torch.float32)))
    return folder


@pytest.mark.parametrize("config", MODELS, ids=lambda config: type(config).__name__)
def test_the_model_is_that_of_the_folder(config, tmp_path):
    found = fine_tuning(folder_of(config, tmp_path)).model
    if hasattr(config, "moe"):  # the rate that balances experts is of training, and in no checkpoint
        found = replace(found, moe=replace(found.moe, balance_rate=config.moe.balance_rate))
    assert found == config


def test_options_and_the_tokenizer_beside_the_weights(tmp_path):
    folder_of(llama3_debug(), tmp_path)
    config = parse_train(["--init-from-hf", str(tmp_path), "--lr", "1e-4", "--steps", "5"])
    assert (config.lr, config.steps, config.warmup_steps, config.seq_len) == (1e-4, 5, 0, 1024)
    assert (config.model, config.init_from_hf, config.tokenizer) == (
        llama3_debug(),
        tmp_path,
        str(tmp_path / "tokenizer.json"),  # never bytes without a word: the run refuses where it is missing
    )
    assert parse_train(["--init-from-hf", str(tmp_path)]).tokenizer == str(tmp_path / "tokenizer.json")
    assert parse_train(["--init_from_hf", str(tmp_path)]).tokenizer == str(tmp_path / "tokenizer.json")
    assert parse_train(["llama3-debug", "--init-from-hf", str(tmp_path)]).tokenizer == "bytes"  # a preset's own


def test_options_of_a_file_are_on_top_of_those_of_fine_tuning(tmp_path):
    folder_of(llama3_debug(), tmp_path)
    file = tmp_path / "run.toml"
    for text, words in (
        (f"init-from-hf = '{tmp_path}'\nseed = 3", []),
        ("seed = 3", ["--init-from-hf", str(tmp_path)]),
    ):
        file.write_text(text)
        config = parse_train(["--config", str(file), *words])
        assert (config.lr, config.weight_decay, config.seed, config.init_from_hf) == (2e-5, 0.0, 3, tmp_path)
        file.write_text(f"preset = 'llama3-debug'\n{text}")
        assert parse_train(["--config", str(file), *words]).lr == 2e-3


def test_every_kind_of_model_that_a_family_reads_is_one_it_names():
    kinds = [kind for family in FAMILIES if family.hugging_face for kind in family.hugging_face.model_types]
    assert len(kinds) == len(set(kinds)) == 4


@pytest.mark.parametrize("content", [{"model_type": "vit"}, {}], ids=["another", "none"])
def test_a_model_of_no_family_is_one_line(content, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no causal language model of type (None|'vit'); use one"):
        parse_train(["--init-from-hf", str(tmp_path)])
