"""What torchtitan is told: names, sizes, and initial weights with which its own models compute what ours do."""

import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from stepgraph import bench, compat
from stepgraph.bench import results
from stepgraph.bench.train import command as train
from stepgraph.bench.train import providers, titan
from stepgraph.config.presets import PRESETS
from stepgraph.models import Llama3Config, family_of, next_token_loss
from stepgraph.models.deepseek_v3 import DeepSeekV3Config
from stepgraph.models.moe import MoEConfig
from stepgraph.models.rope import RopeScaling, YarnScaling

CUDA = torch.device("cuda")
SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 64, "max_seq_len": 48}
TINY = Llama3Config(**SHAPE, n_kv_heads=2, ffn_dim=88)
EXPERTS = {"n_experts": 8, "top_k": 3, "ffn_dim": 24, "n_shared": 1, "selection_bias": True}
HEADS = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}


def config(preset="llama3-8b", *words):
    return train.parse_train([preset, "--mesh", "fsdp=2,tp=2", *words])[0]


@pytest.fixture
def installed(monkeypatch):
    """A torchtitan of the right version, as far as the checks look."""
    spec = importlib.machinery.ModuleSpec("torchtitan", None)
    monkeypatch.setattr(titan.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(titan.importlib.metadata, "version", lambda name: titan.VERSION)


def test_not_installed(monkeypatch):
    monkeypatch.setattr(titan.importlib.util, "find_spec", lambda name: None)
    assert titan.unavailable(config(), CUDA) == "not installed: pip install torchtitan==0.2.2"


def test_what_it_can_do(installed):
    for words in (["--memory", "selective"], ["--memory", "full"], ["--precision", "fp32"], ["--reshard", "never"]):
        assert titan.unavailable(config("llama3-8b", *words), CUDA) is None


@pytest.mark.parametrize(
    ("preset", "words", "reason"),
    [
        ("qwen3-30b-a3b", [], "it has no such model: choose a llama3 or deepseek-v3 preset"),
        ("deepseek-v3-16b", ["--model.moe.balance-loss", "1e-4"], "it has no balance loss of sequences"),
        ("deepseek-v3-16b", ["--model.moe.n-groups", "8"], "it ranks groups by their best two scores"),
        ("golf", [], "it has no such model: choose a llama3 or deepseek-v3 preset"),
        ("llama3-1b", [], "it cannot tie the head to the embedding: add --no-model.tie-embeddings"),
        ("llama3-8b", ["--memory", "budget=0.5"], "it has no counterpart to --memory budget=0.5"),
        ("llama3-8b", ["--reduce-dtype", "bf16"], "it reduces gradients only in fp32: add --reduce-dtype fp32"),
    ],
)
def test_what_it_cannot_do(preset, words, reason, installed):
    assert titan.unavailable(config(preset, *words), CUDA).startswith(reason)
    if "--model" in reason:
        assert titan.unavailable(config(preset, "--no-model.tie-embeddings"), CUDA) is None


def test_it_needs_a_gpu_and_its_version(installed, monkeypatch):
    assert titan.unavailable(config(), torch.device("cpu")) == "it needs a GPU"
    monkeypatch.setattr(titan.importlib.metadata, "version", lambda name: "0.1.0")
    assert titan.unavailable(config(), CUDA) == "0.1.0 is installed: pip install torchtitan==0.2.2"


def test_the_job_says_the_same_work():
    sections = titan.job_sections(config("llama3-8b", "--memory", "selective"), "folder")
    training, mesh = sections["training"], sections["parallelism"]
    assert (training["seq_len"], training["local_batch_size"], training["max_norm"]) == (8192, 1, 1.0)
    assert training["mixed_precision_param"] == "bfloat16" and "dtype" not in training  # fp32 at rest, its default
    assert (mesh["data_parallel_shard_degree"], mesh["tensor_parallel_degree"]) == (2, 2)
    assert mesh["data_parallel_replicate_degree"] == 1
    assert (training["global_batch_size"], mesh["expert_parallel_degree"], mesh["pipeline_parallel_degree"]) == (
        2,
        1,
        1,
    )
    assert sections["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert sections["compile"]["enable"] and not sections["checkpoint"]["enable"]
    assert sections["optimizer"]["lr"] == 1e-4 and sections["optimizer"]["implementation"] == "fused"
    assert sections["model"]["converters"] == [] and titan.FLOAT8 not in sections


def test_the_job_of_a_pipeline_and_of_microbatches():
    words = ["--mesh", "pp=2,fsdp=2", "--accumulate", "8", "--pipeline", "zbv"]
    sections = titan.job_sections(config("llama3-8b", *words), "folder")
    assert sections["training"]["local_batch_size"] == 8 and sections["training"]["global_batch_size"] == 16
    mesh = sections["parallelism"]
    assert (mesh["pipeline_parallel_degree"], mesh["pipeline_parallel_microbatch_size"]) == (2, 1)
    assert mesh["pipeline_parallel_schedule"] == "ZBVZeroBubble" and "dtype" not in sections["training"]
    alone = titan.job_sections(config("llama3-8b", "--mesh", "pp=2", "--accumulate", "2"), "folder")
    assert alone["training"]["dtype"] == "bfloat16"  # it mixes precisions by FSDP alone, and would compute in fp32
    training = titan.job_sections(config("llama3-8b", "--accumulate", "8"), "folder")["training"]
    assert training["local_batch_size"] == 1 and training["global_batch_size"] == 16


def test_the_job_of_experts_and_of_fp8(installed):
    words = ["--mesh", "fsdp=4,ep=2", "--balanced-routing"]
    shape, options = train.parse_train(["deepseek-v3-16b", *words])
    sections = titan.job_sections(shape, "folder", options.balanced_routing)
    assert sections["parallelism"]["expert_parallel_degree"] == 2 and sections["debug"]["moe_force_load_balance"]
    fp8 = titan.job_sections(config("llama3-8b", "--fp8", "tensorwise", "--precision", "bf16"), "folder")
    assert fp8["model"]["converters"] == [titan.FLOAT8]
    assert fp8[titan.FLOAT8]["enable_fsdp_float8_all_gather"] and fp8[titan.FLOAT8]["filter_fqns"] == ["output"]


@pytest.mark.parametrize("preset", ["llama3-debug", "llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b"])
def test_the_feed_forward_comes_out_as_wide(preset):
    """torchtitan's own rule for the width, applied to what it is given."""
    model = PRESETS[preset]().model
    sizes = titan.llama3_sizes(model)
    width = int(sizes["ffn_dim_multiplier"] * int(2 * 4 * sizes["dim"] / 3))
    assert sizes["multiple_of"] * -(-width // sizes["multiple_of"]) == model.ffn_dim


SHAPES = {
    "llama": TINY,
    "llama-scaled": Llama3Config(
        **SHAPE, n_kv_heads=4, ffn_dim=64, rope_scaling=RopeScaling(8.0, original_max_seq_len=16)
    ),
    "deepseek": DeepSeekV3Config(
        **SHAPE,
        **HEADS,
        n_dense_layers=1,
        ffn_dim=40,
        q_lora_rank=None,
        moe=MoEConfig(**EXPERTS, normalize=False),
        norm_eps=1e-5,
        rope_scaling=YarnScaling(40.0, 16, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-groups": DeepSeekV3Config(
        **SHAPE,
        **HEADS,
        n_dense_layers=0,
        ffn_dim=40,
        q_lora_rank=24,
        moe=MoEConfig(**EXPERTS, scoring="sigmoid", scale=2.5, n_groups=4, top_groups=2),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_its_model_computes_what_ours_does(name, monkeypatch):
    """torchtitan's own classes, from the arguments and the weights that they are given: loss and norm of gradients."""
    count = torch.histc  # which on a CPU knows no integers
    monkeypatch.setattr(torch, "histc", lambda values, **options: count(values.float(), **options).to(values.dtype))
    config = SHAPES[name]
    run = dataclasses.replace(PRESETS["llama3-debug"](), model=config, seed=3)
    family = family_of(config)
    peer = titan.PEERS[family.name]
    arguments = peer.arguments(config)
    arguments.max_seq_len, arguments.moe_impl = config.max_seq_len, "standard"
    if hasattr(arguments, "moe_args"):
        arguments.moe_args.use_grouped_mm = False  # fp32
    spec = importlib.import_module(peer.module).get_train_spec()
    theirs, ours = spec.model_cls(arguments), family.model(config)
    with torch.no_grad():
        theirs.init_weights()
    titan.fill(theirs, run)
    ours.init_weights(3)
    generator = torch.Generator().manual_seed(0)
    batch = {k: torch.randint(config.vocab_size, (2, 48), generator=generator) for k in ("tokens", "targets")}
    loss = next_token_loss(ours, batch)
    theirs_loss = F.cross_entropy(theirs(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
    torch.testing.assert_close(theirs_loss, loss)
    loss.backward()
    theirs_loss.backward()
    norms = [torch.stack([p.grad.norm() for p in model.parameters()]).norm() for model in (ours, theirs)]
    torch.testing.assert_close(*norms, rtol=1e-4, atol=0)


def test_it_starts_from_our_weights_rounded():
    run = dataclasses.replace(PRESETS["llama3-debug"](), model=TINY, precision="bf16")
    theirs = nn.ModuleDict({"tok_embeddings": nn.Embedding(TINY.vocab_size, TINY.dim)})
    titan.fill(theirs, run)
    ours = family_of(TINY).model(TINY)
    ours.init_weights(run.seed)
    assert torch.equal(theirs["tok_embeddings"].weight, ours.embed.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("rank", "split", "expected"),
    [
        (0, 0, ((0, 6), (0, 8))),  # tp splits 22 rows in two, FSDP each 11 in chunks of 6 and 5
        (1, 0, ((11, 17), (0, 8))),
        (2, 0, ((6, 11), (0, 8))),
        (3, 0, ((17, 22), (0, 8))),
        (1, 1, ((0, 11), (4, 8))),  # tp splits 8 columns
        (2, 1, ((11, 22), (0, 4))),
    ],
)
def test_what_a_rank_holds(rank, split, expected):
    """Of a (22, 8) matrix over fsdp=2,tp=2."""
    compat.init_fake_world(rank, 4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        local = torch.empty([stop - start for start, stop in expected])
        places = (Shard(0), Shard(split))
        param = DTensor.from_local(local, mesh, places, run_check=False, shape=torch.Size((22, 8)), stride=(8, 1))
        assert titan.held(param) == expected
    finally:
        dist.destroy_process_group()


def test_a_field_that_its_configuration_lacks_is_refused(monkeypatch):
    theirs = titan.job_config(config("llama3-8b", "--mesh", "pp=2", "--accumulate", "2"), "folder")
    assert theirs.parallelism.pipeline_parallel_schedule == "1F1B" and theirs.training.seq_len == 8192
    monkeypatch.setattr(titan, "job_sections", lambda *_: {"training": {"sequence": 8}})
    with pytest.raises(AttributeError, match="sequence"):
        titan.job_config(config(), "folder")


class TorchaosFloat8:
    """As much of `Float8LinearConfig` as torchtitan's converter takes; torchao need not be installed for it."""

    def __init__(self, enable_fsdp_float8_all_gather, emulate):
        self.enable_fsdp_float8_all_gather, self.recipe = enable_fsdp_float8_all_gather, "tensorwise"

    @classmethod
    def from_recipe_name(cls, recipe):
        found = cls(False, False)
        found.recipe = recipe
        return found


@pytest.fixture
def converters(monkeypatch):
    """``converters(config)``: torchtitan's own, built from our job as its ``Trainer`` builds them, with a GPU."""
    from torchtitan.components.quantization import float8
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.model_converter import build_model_converters

    monkeypatch.setattr(float8, "has_cuda_capability", lambda *_: True)
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=2)

    def build(run):
        importlib.import_module(titan.PEERS[family_of(run.model).name].module)  # the `Trainer` knows no more
        return build_model_converters(titan.job_config(run, "folder"), dims)

    with inductor.patch(emulate_precision_casts=False):  # a converter sets it for the process
        yield build


FP8 = ["--mesh", "fsdp=2", "--precision", "bf16", "--fp8"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise-bf16-weight-gradients"])
@pytest.mark.parametrize("preset", ["llama3-8b", "deepseek-v3-16b"])
def test_its_own_converters_are_built(preset, recipe, converters, monkeypatch):
    if importlib.util.find_spec("torchao") is None:
        torchao = types.ModuleType("torchao.float8")
        torchao.Float8LinearConfig = TorchaosFloat8
        monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
        monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
    (found,) = converters(config(preset, *FP8, recipe)).converters
    assert found.enabled and found.filter_fqns == ["output"]
    assert found.config.enable_fsdp_float8_all_gather == found.precompute_scale == (recipe == "tensorwise")
    assert converters(config(preset, "--precision", "bf16")).converters == []


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise-bf16-weight-gradients"])
def test_torchao_takes_what_the_converters_give(recipe, converters):
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    from torchao.float8.float8_linear import Float8Linear

    model = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in ("wq", "output")})
    converters(config("llama3-8b", *FP8, recipe)).convert(model)
    assert type(model["wq"]) is Float8Linear and type(model["output"]) is nn.Linear


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "--mesh pp=2 --accumulate 4",
        "--mesh pp=2 --accumulate 4 --pipeline interleaved",
        "--mesh fsdp=2",
        "--mesh fsdp=2 --precision bf16 --fp8 tensorwise",
    ],
)
def test_its_ranks_train_as_ours_do(words, tmp_path, monkeypatch):
    """Both over two gloo ranks: the same model, tokens, microbatches and losses."""
    if "fp8" in words:
        pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(train, "RANK", [str(Path(__file__).parent / "titan_rank.py")])
    monkeypatch.setitem(train.PROVIDERS, "torchtitan", providers.Provider(providers.torchtitan))
    sizes = {"dim": 32, "n-layers": 4, "n-heads": 4, "n-kv-heads": 2, "ffn-dim": 64, "vocab-size": 64}
    sizes = [f"--model.{name}={size}" for name, size in sizes.items()]
    path = tmp_path / "train.json"
    short = ["--batch-size=2", "--seq-len=32", "--steps=2", "--device=cpu", "--inductor=off", "--json", str(path)]
    assert bench.main(["train", "llama3-debug", *sizes, *words.split(), *short]) == 0
    _, settings, (ours, theirs) = results.read(path)
    assert ours.error is theirs.error is None and theirs.losses[1] < theirs.losses[0]
    assert settings["models"]["llama3-debug"]["losses"].startswith("losses agree")
