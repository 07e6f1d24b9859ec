"""Hugging Face checkpoints, written and read by transformers itself, and broken ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from stepgraph.config.hf_weights import load_hf, save_hf
from stepgraph.models import Golf, GolfConfig, Llama3, Llama3Config, RopeScaling
from stepgraph.models.llama3 import LLAMA3

SMALL = Llama3Config(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=97, max_seq_len=64, rope_theta=500_000.0
)
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
VARIANTS = {
    "gqa": SMALL,
    "mha": replace(SMALL, n_kv_heads=4),
    "tied": replace(SMALL, tie_embeddings=True),
    "scaled": replace(SMALL, rope_scaling=SCALING),
}
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
HF_VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "scaled": {"rope_parameters": LLAMA3_ROPE},
}


def hf_model(**changes) -> LlamaForCausalLM:
    """A random model of transformers' own making."""
    torch.manual_seed(0)
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE,
        "initializer_range": 0.1,
    }
    return LlamaForCausalLM(LlamaConfig(**(small | changes)))


def tokens() -> torch.Tensor:
    return torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(2))


def assert_same_logits(ours: Llama3, hf: LlamaForCausalLM) -> None:
    with torch.no_grad():
        expected = hf(tokens()).logits
        # fp32 sums in another order, as in tests/models/test_llama3.py.
        torch.testing.assert_close(ours(tokens()), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    hf_model().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    hf_model().save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    return tmp_path / "hf"


# ---- both ways through transformers


@pytest.mark.parametrize("shards", [None, "100KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_what_transformers_wrote(tmp_path, variant, shards):
    hf = hf_model(**HF_VARIANTS[variant])
    hf.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    config = LLAMA3.hugging_face.read_config(tmp_path)
    assert config == VARIANTS[variant]
    model = Llama3(config)
    load_hf(model, tmp_path)
    assert_same_logits(model, hf)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000, 1], ids=["single", "sharded", "one-tensor-each"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_reads_what_we_wrote(tmp_path, variant, max_shard_bytes):
    model = Llama3(VARIANTS[variant])
    save_hf(model, tmp_path / "new" / "folder", max_shard_bytes=max_shard_bytes)
    hf, info = LlamaForCausalLM.from_pretrained(
        tmp_path / "new" / "folder", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), "no missing, unexpected or mismatched tensors"
    assert_same_logits(model, hf)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_is_bitwise(tmp_path, variant):
    model, again = Llama3(VARIANTS[variant]), Llama3(VARIANTS[variant])
    save_hf(model, tmp_path, max_shard_bytes=100_000)
    assert LLAMA3.hugging_face.read_config(tmp_path) == model.config
    load_hf(again, tmp_path)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_bf16_is_kept_on_the_way_out_and_cast_on_the_way_in(tmp_path):
    model = Llama3(SMALL).bfloat16()
    save_hf(model, tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert LlamaForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    wide = Llama3(SMALL)
    load_hf(wide, tmp_path)
    assert wide.embed.weight.dtype == torch.float32
    assert torch.equal(wide.embed.weight, model.embed.weight.float())


def test_shards_stay_within_the_limit(tmp_path):
    save_hf(Llama3(SMALL), tmp_path, max_shard_bytes=60_000)
    sizes = [sum(t.nbytes for t in load_file(path).values()) for path in tmp_path.glob("*.safetensors")]
    assert max(sizes) <= 60_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes) == sum(p.nbytes for p in Llama3(SMALL).parameters())


def test_a_model_from_meta_gets_its_rope_tables_too(checkpoint):
    with torch.device("meta"):
        model = Llama3(SMALL)
    model.to_empty(device="cpu")
    model.rope_cos.fill_(torch.nan)
    load_hf(model, checkpoint)
    assert_same_logits(model, hf_model())


def test_the_older_config_form_is_read(checkpoint):
    """transformers 4 wrote ``rope_theta`` and ``rope_scaling``, as the published Llama 3 checkpoints have them."""
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("rope_parameters", None)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    path.write_text(json.dumps(raw | {"rope_theta": 500_000.0, "rope_scaling": scaling}))
    assert LLAMA3.hugging_face.read_config(checkpoint) == replace(SMALL, rope_scaling=SCALING)
    path.write_text(json.dumps(raw | {"rope_theta": 500_000.0, "rope_parameters": {"rope_type": "default"}}))
    assert LLAMA3.hugging_face.read_config(checkpoint).rope_theta == 500_000.0  # both, as transformers reads them
    assert LlamaConfig.from_pretrained(checkpoint).rope_parameters["rope_theta"] == 500_000.0
    path.write_text(json.dumps(raw | {"rope_theta": 500_000.0, "rope_scaling": None}))
    assert LLAMA3.hugging_face.read_config(checkpoint) == SMALL


def test_a_longer_max_seq_len_is_not_another_model(checkpoint):
    load_hf(Llama3(replace(SMALL, max_seq_len=128)), checkpoint)


def test_a_tied_head_stored_twice_is_read_if_it_is_a_copy(tmp_path):
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    model = Llama3(VARIANTS["tied"])
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path)
    load_hf(model, tmp_path)
    assert_same_logits(model, hf_model(tie_word_embeddings=True))
    save_file(tensors | {"lm_head.weight": embedding + 1}, path)
    refused(model, tmp_path, "lm_head.weight differs from the embedding")


def test_frequencies_that_old_llamas_saved_are_passed_over(checkpoint):
    rewrite(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    model = Llama3(SMALL)
    load_hf(model, checkpoint)
    assert_same_logits(model, hf_model())


# ---- broken checkpoints: one line, and the model is as it was


def refused(model: Llama3, folder: Path, *parts: str) -> None:
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    with pytest.raises(ValueError) as error:
        load_hf(model, folder)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, before[name]), f"{name} was written"


def rewrite(folder: Path, change) -> None:
    """Rewrite the single safetensors file with ``change(tensors)`` applied."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# Late tensors, so that a loader which writes as it goes would have written others before.
LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop("model.norm.weight"), ["lacks model.norm.weight"]),
        (lambda t: [t.pop("model.norm.weight"), t.pop(LAST)], ["lacks", "and 1 more"]),
        (lambda t: t.update(extra=torch.ones(3)), ["holds extra, which the model lacks"]),
        (lambda t: t.update({LAST: t[LAST].T.contiguous()}), [LAST, "(96, 64)", "(64, 96)"]),
        (lambda t: t.update({LAST: t[LAST].to(torch.float8_e4m3fn)}), [LAST, "F8_E4M3", "unquantized"]),
        (lambda t: t.update({LAST: t[LAST].to(torch.int8)}), [LAST, "I8", "unquantized"]),
    ],
    ids=["missing", "two-missing", "unexpected", "transposed", "fp8", "int8"],
)
def test_wrong_tensors_are_refused(checkpoint, change, parts):
    rewrite(checkpoint, change)
    refused(Llama3(SMALL), checkpoint, *parts)


@pytest.mark.parametrize(
    "keep", [0, 4, 100, 0.5, -1], ids=["empty", "4-bytes", "half-header", "half", "one-byte-short"]
)
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_truncated_file_is_refused(kind, keep, request):
    folder = request.getfixturevalue("checkpoint" if kind == "single" else "sharded")
    path = sorted(folder.glob("*.safetensors"))[-1]  # the last shard: the others are whole
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    refused(Llama3(SMALL), folder, path.name, "corrupt or truncated")


def test_a_corrupt_header_is_refused(checkpoint):
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)
    refused(Llama3(SMALL), checkpoint, "model.safetensors is corrupt or truncated")


def edit_json(path: Path, change) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def test_a_broken_index_is_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    good = index.read_text()
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    model = Llama3(SMALL)

    def moved(raw):
        place = raw["weight_map"]
        place[LAST] = next(file for file in files if file != place[LAST])

    for change, part in [
        (lambda raw: raw.pop("weight_map"), "has no weight_map"),
        (lambda raw: raw["weight_map"].update({LAST: 3}), "has no weight_map"),
        (moved, f"lacks {LAST}"),
        (lambda raw: raw["weight_map"].pop(LAST), f"lacks {LAST}"),
        (lambda raw: raw["weight_map"].update(ghost="model-9.safetensors"), "model-9.safetensors is missing"),
    ]:
        index.write_text(good)
        edit_json(index, change)
        refused(model, sharded, part)
    index.write_text(good[:-20])
    refused(model, sharded, "model.safetensors.index.json is not valid JSON")
    index.write_text("[]")
    refused(model, sharded, "holds a list, not a JSON object")
    index.unlink()
    refused(model, sharded, "has neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        # The same shapes, yet another model: only the configuration tells.
        ({"n_heads": 8, "n_kv_heads": 4}, ["n_heads is 4 there and 8 here", "n_kv_heads is 2 there and 4 here"]),
        ({"rope_theta": 10_000.0}, ["rope_theta is 500000.0 there and 10000.0 here"]),
        ({"rope_scaling": SCALING}, ["rope_scaling is None there"]),
        ({"norm_eps": 1e-6}, ["norm_eps is 1e-05 there and 1e-06 here"]),
        ({"n_layers": 3}, ["n_layers is 2 there and 3 here", "build it as it is there (--model.n-layers)"]),
        ({"tie_embeddings": True}, ["tie_embeddings is False there and True here"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(checkpoint, change, parts):
    refused(Llama3(replace(SMALL, **change)), checkpoint, *parts)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral', Llama 3 has 'llama'"),
        ({"model_type": None}, "model_type is None"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, Llama 3 trains without dropout here; set it to 0.0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "lacks 'factor'"),
        ({"rope_parameters": ["default"]}, "config.json: the settings of its RoPE are ['default'], not a JSON object"),
        ({"head_dim": 32}, "head_dim=32 is not hidden_size / num_attention_heads = 16"),
        ({"hidden_size": 66}, "n_heads=4 does not divide dim=66"),
        ({"hidden_size": "64"}, "config.json: dim='64' is not a whole number; use one above 0"),
        ({"num_attention_heads": 4.0}, "config.json: n_heads=4.0 is not a whole number; use one above 0"),
    ],
)
def test_a_config_that_is_not_llama3_is_refused(checkpoint, change, part):
    edit_json(checkpoint / "config.json", lambda raw: raw.update(change))
    with pytest.raises(ValueError) as error:
        LLAMA3.hugging_face.read_config(checkpoint)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_config_without_a_field_or_a_folder_without_config_is_refused(checkpoint, tmp_path):
    edit_json(checkpoint / "config.json", lambda raw: raw.pop("num_hidden_layers"))
    with pytest.raises(ValueError, match=r"config\.json lacks 'num_hidden_layers'; use the config\.json of a Llama 3"):
        LLAMA3.hugging_face.read_config(checkpoint)
    (checkpoint / "config.json").unlink()
    refused(Llama3(SMALL), checkpoint, "config.json is missing")
    (checkpoint / "config.json").mkdir()
    refused(Llama3(SMALL), checkpoint, "config.json is a folder: use a file")
    refused(Llama3(SMALL), tmp_path / "nowhere", "config.json is missing")


def test_only_a_real_llama3_model_is_taken(checkpoint, tmp_path):
    with torch.device("meta"):
        meta = Llama3(SMALL)
    golf = Golf(GolfConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=53))
    for act, folder in [(load_hf, checkpoint), (save_hf, tmp_path / "out")]:
        with pytest.raises(ValueError, match=r"embed\.weight is on the meta device; call model\.to_empty"):
            act(meta, folder)
        with pytest.raises(
            ValueError,
            match=r"takes a model of Llama 3, .*, transformers, got Golf; use one from stepgraph\.models",
        ):
            act(golf, folder)
    assert not (tmp_path / "out").exists()


def test_a_sharded_tensor_model_is_refused(tmp_path):
    class Sharded(torch.nn.Parameter):
        """Stands for DTensor, whose type a Parameter takes on."""

    model = Llama3(SMALL)
    model.norm.weight = Sharded(torch.ones(64))
    with pytest.raises(ValueError, match=r"norm\.weight is a Sharded; use a model of plain, unsharded tensors"):
        save_hf(model, tmp_path)


def test_a_taken_folder_is_refused_and_untouched(checkpoint):
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with pytest.raises(ValueError, match=r"already holds a checkpoint \(config\.json\); use a new folder"):
        save_hf(Llama3(SMALL), checkpoint)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_save_that_fails_leaves_nothing_that_reads_as_a_checkpoint(tmp_path, monkeypatch):
    """The disk fills up at the second shard."""
    from stepgraph.config import hf_weights

    written = []

    def save_one_only(tensors, path, metadata):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(hf_weights, "save_file", save_one_only)
    with pytest.raises(OSError, match="No space left"):
        save_hf(Llama3(SMALL), tmp_path, max_shard_bytes=100_000)
    refused(Llama3(SMALL), tmp_path, "config.json is missing")


def test_both_single_file_and_shards_read_as_transformers_does(sharded, tmp_path):
    """transformers takes the single file; so do we."""
    other = tmp_path / "other"
    torch.manual_seed(9)
    model = Llama3(SMALL)
    save_hf(model, other)
    shutil.copy(other / "model.safetensors", sharded / "model.safetensors")
    ours = Llama3(SMALL)
    load_hf(ours, sharded)
    assert torch.equal(ours.head.weight, model.head.weight)
    assert_same_logits(ours, LlamaForCausalLM.from_pretrained(sharded))
