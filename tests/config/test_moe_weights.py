"""Experts in and out of the Hugging Face format, whose files `transformers` itself reads and writes."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from stepgraph.config.hf_weights import load_hf, save_hf
from stepgraph.models import YarnScaling, config_from_hf, family_of
from tests.models.moe_models import KINDS, QWEN, SIGMOID, SOFTMAX, hf_model, our_model, tokens_for

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
FILED = ("deepseek", "no-query-compression", "softmax-groups", "yarn", "qwen-not-normalized-tied")


def same_state(one, other):
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("kind", FILED)
def test_files_go_to_hugging_face_and_back(kind, tmp_path):
    ours, config = our_model(KINDS[kind]), KINDS[kind]
    read_config = family_of(config).hugging_face.read_config
    save_hf(ours, tmp_path / "ours", max_shard_bytes=60_000)  # several files
    assert read_config(tmp_path / "ours") == replace(config, moe=replace(config.moe, balance_rate=0.001))
    hf, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values())
    tokens = tokens_for(config)
    torch.testing.assert_close(hf(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-4)

    hf_model(ours, tmp_path / "theirs").save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == read_config(tmp_path / "ours")
    loaded = our_model(config, seed=1)
    load_hf(loaded, tmp_path / "theirs")
    same_state(loaded, ours)
    again = our_model(config, seed=2)
    load_hf(again, tmp_path / "ours")
    same_state(again, ours)


def test_each_expert_is_a_tensor_of_the_file(tmp_path):
    ours = our_model(KINDS["deepseek"])
    save_hf(ours, tmp_path / "one")
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as file:
        gate, up = (file.get_tensor(f"model.layers.2.mlp.experts.5.{part}_proj.weight") for part in ("gate", "up"))
        bias = file.get_tensor("model.layers.2.mlp.gate.e_score_correction_bias")
    moe = ours.layers[2].mlp
    assert torch.equal(torch.cat((gate, up)), moe.experts.gate_up_proj.weight[5])
    assert torch.equal(bias, moe.router.expert_bias)


def test_weights_of_other_experts_are_refused_and_change_nothing(tmp_path):
    config = KINDS["deepseek"]
    save_hf(our_model(config), tmp_path / "here")
    other = our_model(replace(config, moe=replace(SIGMOID, scale=1.0, balance_rate=0.5)), seed=1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"moe\.scale is 2\.5 there and 1\.0 here; build it"):
        load_hf(other, tmp_path / "here")
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    load_hf(our_model(replace(config, moe=replace(SIGMOID, balance_rate=0.5))), tmp_path / "here")  # the rate is free


def test_a_missing_expert_is_told_by_name(tmp_path):
    ours = our_model(KINDS["deepseek"])
    hf = hf_model(ours, tmp_path / "hf")
    hf.save_pretrained(tmp_path / "hf")
    save_hf(our_model(replace(KINDS["deepseek"], moe=replace(SIGMOID, n_experts=4, n_groups=2))), tmp_path / "few")
    (tmp_path / "few" / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.experts\.4\.gate_proj\.weight and \d+ more"):
        load_hf(ours, tmp_path / "few")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("deepseek", {"selection_bias": False}),
        ("deepseek", {"n_shared": 0}),
        ("softmax", {"selection_bias": True}),
        ("softmax", {"normalize": True}),
        ("qwen", {"n_shared": 1}),
        ("qwen", {"scoring": "sigmoid"}),
    ],
)
def test_what_hugging_face_has_no_form_for_is_refused(kind, change, tmp_path):
    config = replace(KINDS[kind], moe=replace(KINDS[kind].moe, **change))
    with pytest.raises(ValueError, match=r"Hugging Face.* has no form for"):
        save_hf(family_of(config).model(config), tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func is 'softmax', DeepSeek-V3 has 'sigmoid'"),
        ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported"),
        ("deepseek", {"rope_scaling": YARN | {"attention_factor": 1.2}}, r"YaRN with attention_factor=1\.2 is not"),
        ("deepseek", {"rope_scaling": YARN | {"mscale_all_dim": 0.7}}, "mscale=None and mscale_all_dim=0.7 .* neither"),
        ("qwen", {"rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": 1}}, "use a checkpoint with neither"),
        ("qwen", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, Qwen3-MoE has 1"),
        ("qwen", {"num_experts_per_tok": 9}, "top_k=9 is above the 8 experts"),
    ],
)
def test_another_model_is_refused(kind, change, message, tmp_path):
    theirs = family_of(KINDS[kind]).hugging_face
    raw = theirs.write_config(KINDS[kind], torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        theirs.read_config(tmp_path)


def test_softmax_scores_are_deepseek_v2s(tmp_path):
    config = replace(KINDS["softmax"], moe=SOFTMAX)
    raw = family_of(config).hugging_face.write_config(config, torch.bfloat16)
    assert (raw["model_type"], raw["architectures"]) == ("deepseek_v2", ["DeepseekV2ForCausalLM"])


def test_yarn_is_read_as_transformers_reads_it(tmp_path):
    raw = family_of(QWEN).hugging_face.write_config(QWEN, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_scaling": YARN}))
    scaling = YarnScaling(4.0, original_max_seq_len=8, mscale=1.0, mscale_all_dim=0.0)
    assert config_from_hf(tmp_path) == replace(QWEN, rope_scaling=scaling)
    with pytest.raises(ValueError, match=r"has no form for YarnScaling.*: use mscale=1 with mscale_all_dim=0$"):
        save_hf(our_model(replace(QWEN, rope_scaling=YarnScaling(4.0))), tmp_path / "out")
