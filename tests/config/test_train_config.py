"""The configuration of a run: its checks, its JSON form, and the presets."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.models import GolfConfig, Llama3Config, RopeScaling

finite = st.floats(allow_nan=False, allow_infinity=False)
paths = st.none() | st.text("abcXYZ019._- é/", min_size=1).map(Path)
models = st.builds(
    Llama3Config,
    dim=st.sampled_from([64, 128]),
    n_layers=st.integers(1, 200),
    n_heads=st.just(4),
    n_kv_heads=st.sampled_from([1, 2, 4]),
    ffn_dim=st.integers(1, 10**6),
    vocab_size=st.integers(1, 10**6),
    max_seq_len=st.integers(1, 10**6),
    rope_scaling=st.none() | st.builds(RopeScaling, factor=st.floats(1, 64), original_max_seq_len=st.integers(1, 9999)),
    tie_embeddings=st.booleans(),
) | st.builds(GolfConfig, n_layers=st.integers(1, 50), negative_slope=finite, residual_scales=st.booleans())
configs = st.builds(
    TrainConfig,
    data=st.text(),
    seq_len=st.integers(),
    lr=finite,
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    betas=st.tuples(finite, finite),
    max_grad_norm=st.none() | finite,
    precision=st.sampled_from(["fp32", "bf16-autocast", "bf16"]),
    disable_pass=st.lists(st.text(), max_size=3).map(tuple),
    loss_chunks=st.integers(1, 99) | st.just("auto"),
    dump_graphs=st.booleans(),
    out=paths,
    resume=paths,
    model=models,
    preset=st.text(),
)


@given(configs)
def test_json_round_trip_keeps_every_value(config):
    again = TrainConfig.from_json(config.to_json())
    assert again == config
    assert [type(value) for value in vars(again).values()] == [type(value) for value in vars(config).values()]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_survive_json(name):
    config = PRESETS[name]()
    config.validate()
    assert config.preset == name
    assert TrainConfig.from_json(config.to_json()) == config


def test_the_debug_preset_is_small():
    config = PRESETS["llama3-debug"]()
    assert 5e6 < config.model.num_params() < 7e6
    assert config.tokens_per_step == 2048 and config.precision == "fp32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("lr"), "lacks lr"),
        (lambda v: v.update(lrr=1), "did you mean 'lr'"),
        (lambda v: v.update(lr="fast"), "lr='fast'"),
        (lambda v: v.update(seq_len=2.5), "seq_len=2.5"),
        (lambda v: v.update(seq_len=True), "seq_len=True"),
        (lambda v: v.update(betas=[0.9]), r"betas=\[0.9\]"),
        (lambda v: v.update(schedule="cosin"), "schedule='cosin'"),
        (lambda v: v["model"].update(family="llama4"), "unknown model family 'llama4'"),
        (lambda v: v["model"].update(dim=None), "dim=None"),
        (lambda v: v.pop("model"), "with a model"),
    ],
)
def test_a_damaged_configuration_is_refused(change, message):
    values = json.loads(TrainConfig().to_json())
    change(values)
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig.from_json(json.dumps(values))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_runs_from_when_llama_had_an_attention_of_its_own_go_on(attention):
    config = TrainConfig(model=PRESETS["llama3-debug"]().model)
    values = json.loads(config.to_json())
    values["model"]["attention"] = attention
    if attention == "sdpa":
        assert TrainConfig.from_json(json.dumps(values)) == config
    else:
        with pytest.raises(ValueError, match="attention"):
            TrainConfig.from_json(json.dumps(values))


def test_runs_from_before_loss_rows_continue():
    config = TrainConfig()
    values = json.loads(config.to_json())
    del values["loss_rows"]
    assert TrainConfig.from_json(json.dumps(values)) == dataclasses.replace(config, loss_rows="all")


@pytest.mark.parametrize("grouped", ["auto", "torch", "quack"])
def test_runs_from_when_grouped_was_an_option_continue(grouped):
    config = TrainConfig()
    text = json.dumps(json.loads(config.to_json()) | {"grouped": grouped})
    if grouped != "quack":
        assert TrainConfig.from_json(text) == config
    else:
        with pytest.raises(ValueError, match="grouped"):
            TrainConfig.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len=0 must be above 0"),
        ({"steps": -3}, "steps=-3 must be above 0"),
        ({"lr": float("nan")}, "lr=nan must be finite, and above 0"),
        ({"lr": float("inf")}, "lr=inf must be finite, and above 0"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=1.5"),
        ({"decay_fraction": 0.0}, "decay_fraction=0.0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"optimizer": "muon", "precision": "bf16"}, "keeps no master weights: try --precision bf16-autocast"),
        ({"seed": -1}, r"seed=-1 must be 0 or more, and below 2\^63"),
        ({"seed": 1 << 63}, r"seed=9223372036854775808 must be 0 or more, and below 2\^63"),
        ({"keep_every": 30}, "keep_every=30 must be a multiple of checkpoint_every=50, the steps that"),
        ({"keep_every": 30, "checkpoint_every": 0}, "keep_every=30 must be a multiple of checkpoint_every=0"),
        ({"warmup_steps": 150}, "must be below steps=150: try --warmup-steps 15"),
        ({"seq_len": 4096}, "exceeds model.max_seq_len=2048"),
        ({"memory": "half"}, "unknown memory policy 'half'"),
        ({"memory": "budget=0"}, "memory budget=0 is neither a size above 0 in GiB nor a share"),
        ({"disable_pass": ("cuda-graph",)}, "unknown pass 'cuda-graph': did you mean 'cuda_graph'"),
        ({"reshard": "always"}, "reshard=always needs a mesh: add --mesh"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype=bf16 needs a mesh"),
        ({"stage_sends": "nccl"}, "unknown stage_sends 'nccl'"),
        ({"stage_sends": "symmetric", "mesh": "fsdp=2"}, "stage_sends=symmetric needs pipeline stages"),
        ({"norm": "inductor", "inductor": "off"}, "norm=inductor with inductor=off"),
        ({"async_tp": True}, "async_tp needs tensor parallelism: add tp=2"),
        (
            {"async_tp": True, "mesh": "tp=2", "model": PRESETS["llama3-1b"]().model, "passes": "exact"},
            "async_tp=True with passes=exact, which adds up as eager does",
        ),
        ({"resume": Path("no/such/run")}, "not a run folder"),
        ({"init_from_hf": Path("no/such/model")}, "not a folder"),
        ({"document_mask": "yes"}, "unknown document_mask 'yes'"),
        ({"export_hf": Path("x"), "model": GolfConfig()}, "works for Llama 3, .* models only: choose a preset"),
    ],
)
def test_validate_refuses_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        dataclasses.replace(TrainConfig(), **change).validate()
    assert "\n" not in str(error.value)


def test_the_fix_for_a_long_decay_is_accepted():
    config = TrainConfig(schedule="wsd", steps=100, warmup_steps=30, decay_fraction=0.9)
    with pytest.raises(ValueError, match=r"try --decay-fraction 0\.7$"):
        config.validate()
    dataclasses.replace(config, decay_fraction=0.7).validate()


def test_a_resumed_run_stays_in_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(TrainConfig().to_json())
    TrainConfig(resume=tmp_path).validate()
    assert TrainConfig(resume=tmp_path).run_folder() == tmp_path
    with pytest.raises(ValueError, match="drop --out"):
        TrainConfig(resume=tmp_path, out=tmp_path / "other").validate()


def test_a_run_without_out_gets_a_folder_of_its_own():
    assert TrainConfig(out=Path("a/b")).run_folder() == Path("a/b")
    folder = TrainConfig(preset="golf").run_folder()
    assert folder.parent == Path("runs") and folder.match("golf-20??????T??????.??????Z")


@pytest.mark.parametrize("memory", ["none", "full", "selective", "budget=0.5", "budget=40", "budget=0.25GiB"])
def test_memory_policies(memory):
    TrainConfig(memory=memory).validate()
