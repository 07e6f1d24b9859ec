"""What torchtitan is told, as far as it can be checked without it: names, sizes, and the initial weights."""

import importlib.machinery
import importlib.metadata

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from stepgraph import compat
from stepgraph.bench.train import command as train
from stepgraph.bench.train import titan
from stepgraph.config.presets import PRESETS
from stepgraph.models import Llama3, Llama3Config
from stepgraph.models.rope import apply_rope, rope_tables

CUDA = torch.device("cuda")
TINY = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=88, vocab_size=64, max_seq_len=16)


def config(preset="llama3-8b", *words):
    return train.parse_train([preset, "--mesh", "fsdp=2,tp=2", *words]).config()


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
        ("golf", [], "it has no such model: choose a llama3 preset"),
        ("llama3-1b", [], "it cannot tie the head to the embedding: add --model.no-tie-embeddings"),
        ("llama3-8b", ["--memory", "budget=0.5"], "it has no counterpart to --memory budget=0.5"),
        ("llama3-8b", ["--reduce-dtype", "bf16"], "it reduces gradients in fp32 alone: add --reduce-dtype fp32"),
    ],
)
def test_what_it_cannot_do(preset, words, reason, installed):
    assert titan.unavailable(config(preset, *words), CUDA).startswith(reason)
    if "--model" in reason:
        assert titan.unavailable(config(preset, "--model.no-tie-embeddings"), CUDA) is None


def test_it_needs_a_gpu_and_its_version(installed, monkeypatch):
    assert titan.unavailable(config(), torch.device("cpu")) == "it needs a GPU"
    monkeypatch.setattr(titan.importlib.metadata, "version", lambda name: "0.1.0")
    assert titan.unavailable(config(), CUDA) == "0.1.0 is installed: pip install torchtitan==0.2.2"


def test_the_job_says_the_same_work():
    job = titan.job_sections(config("llama3-8b", "--memory", "selective"), "folder")
    training, mesh = job["training"], job["parallelism"]
    assert (training["seq_len"], training["local_batch_size"], training["max_norm"]) == (8192, 1, 1.0)
    assert training["mixed_precision_param"] == "bfloat16" and "dtype" not in training  # fp32 at rest, its default
    assert (mesh["data_parallel_shard_degree"], mesh["tensor_parallel_degree"]) == (2, 2)
    assert mesh["data_parallel_replicate_degree"] == 1
    assert job["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert job["compile"]["enable"] and not job["checkpoint"]["enable"]
    assert job["optimizer"]["lr"] == 1e-4 and job["optimizer"]["implementation"] == "fused"


@pytest.mark.parametrize("preset", ["llama3-debug", "llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b"])
def test_the_feed_forward_comes_out_as_wide(preset):
    """torchtitan's own rule for the width, applied to what it is given."""
    model = PRESETS[preset]().model
    sizes = titan.model_sizes(model)
    width = int(sizes["ffn_dim_multiplier"] * int(2 * 4 * sizes["dim"] / 3))
    assert sizes["multiple_of"] * -(-width // sizes["multiple_of"]) == model.ffn_dim


class Block(nn.Module):
    """torchtitan's names; the attention inside as if it were compiled."""

    def __init__(self, c: Llama3Config):
        super().__init__()
        kv = c.n_kv_heads * c.head_dim
        shapes = {"wq": (c.dim, c.dim), "wk": (kv, c.dim), "wv": (kv, c.dim), "wo": (c.dim, c.dim)}
        self.attention = nn.ModuleDict(
            {"_orig_mod": nn.ModuleDict({k: nn.Linear(n, m, bias=False) for k, (m, n) in shapes.items()})}
        )
        widths = {"w1": (c.ffn_dim, c.dim), "w2": (c.dim, c.ffn_dim), "w3": (c.ffn_dim, c.dim)}
        self.feed_forward = nn.ModuleDict({k: nn.Linear(n, m, bias=False) for k, (m, n) in widths.items()})
        self.attention_norm, self.ffn_norm = nn.RMSNorm(c.dim), nn.RMSNorm(c.dim)


class Model(nn.Module):
    def __init__(self, c: Llama3Config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.n_layers)})
        self.norm, self.output = nn.RMSNorm(c.dim), nn.Linear(c.dim, c.vocab_size, bias=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_starts_from_our_weights(precision):
    run = PRESETS["llama3-debug"]()
    run = type(run)(**{**vars(run), "model": TINY, "seed": 3, "precision": precision})
    theirs, ours = Model(TINY), Llama3(TINY)
    titan.fill(theirs, run)
    ours.init_weights(3)
    if precision == "bf16":
        ours.bfloat16()
    layer, block = theirs.layers["1"], ours.layers[1]
    attention = layer.attention["_orig_mod"]
    for got, expected in [
        *((theirs.tok_embeddings, ours.embed), (theirs.output, ours.head), (attention["wv"], block.attn.v_proj)),
        *((attention["wo"], block.attn.o_proj), (layer.feed_forward["w1"], block.mlp.gate_proj)),
        *((layer.feed_forward["w2"], block.mlp.down_proj), (layer.feed_forward["w3"], block.mlp.up_proj)),
    ]:
        assert torch.equal(got.weight, expected.weight.float())

    # Rotated neighbours there and rotated halves here: the same scores between positions.
    x = torch.randn(1, 16, TINY.dim, generator=torch.Generator().manual_seed(0))
    tables = rope_tables(16, TINY.head_dim, TINY.rope_theta, TINY.rope_scaling)
    turns = torch.complex(tables[0], tables[1].neg())[..., : TINY.head_dim // 2]  # (T, 1, head_dim / 2)

    def neighbours(weight):
        heads = torch.view_as_complex((x @ weight.T).view(1, 16, -1, TINY.head_dim // 2, 2).contiguous())
        return torch.view_as_real(heads * turns).flatten(3)

    def halves(weight):
        return apply_rope((x @ weight.float().T).view(1, 16, -1, TINY.head_dim), *tables)

    def scores(q, k):
        return torch.einsum("bthd,bshd->bhts", q[:, :, :2], k)

    got = scores(neighbours(attention["wq"].weight), neighbours(attention["wk"].weight))
    torch.testing.assert_close(got, scores(halves(block.attn.q_proj.weight), halves(block.attn.k_proj.weight)))


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
        param = DTensor.from_local(local, mesh, (Shard(0), Shard(split)), run_check=False)
        assert titan.held(param, torch.Size((22, 8)), split) == expected
    finally:
        dist.destroy_process_group()


def test_its_own_configuration_has_every_field():
    pytest.importorskip("torchtitan")
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs

    job = JobConfig()
    for section, fields in titan.job_sections(config(), "folder").items():
        assert all(hasattr(getattr(job, section), name) for name in fields), section
    TransformerModelArgs(**titan.model_sizes(TINY))
