"""Initial weights that do not depend on the mesh, drawn without any parameter whole."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.models import DeepSeekV3, Golf, GolfConfig, Llama3
from stepgraph.models.deepseek_v3 import tp_plan
from stepgraph.models.golf import TP_PLAN as GOLF_PLAN
from stepgraph.models.init import CHUNK, Part, _draw, init_parameters
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import Mesh, MeshSpec, parallelize
from stepgraph.parallel.fsdp import local_parts, round_to
from tests.distributed.ranks import TINY
from tests.models.moe_models import DEEPSEEK

SEED = 3
GOLF = GolfConfig(dim=48, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=80, vocab_size=132, residual_scales=True)


@pytest.fixture
def as_rank():
    """Be one rank of a world that is not there."""
    yield compat.init_fake_world
    dist.destroy_process_group()


def on_mesh(text, build, plan):
    with torch.device("meta"):
        model = build()
    parallelize(model, Mesh(MeshSpec.parse(text), "cpu"), plan, device="cpu")
    model.init_weights(SEED, local_parts(model))
    return model


@pytest.mark.parametrize("text", ["fsdp=1", "fsdp=4", "fsdp=3", "tp=2", "fsdp=3,tp=2", "hsdp=2x3,tp=2", "ddp=2,tp=2"])
@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("family", ["llama3", "tied", "golf"])
def test_every_rank_has_its_part_of_the_whole_model(as_rank, family, text, rank):
    config = {"llama3": TINY, "tied": replace(TINY, tie_embeddings=True), "golf": GOLF}[family]
    build, plan = (lambda: Golf(config), GOLF_PLAN) if family == "golf" else (lambda: Llama3(config), TP_PLAN)
    check_part_of_whole(as_rank, build, plan, text, rank)


@pytest.mark.parametrize("text", ["fsdp=4,ep=2", "hsdp=2x2,tp=2,ep=4", "fsdp=16,ep=8", "fsdp=9,ep=1"])
def test_every_rank_has_its_part_of_the_experts(as_rank, text):
    check_part_of_whole(as_rank, lambda: DeepSeekV3(DEEPSEEK), tp_plan(DEEPSEEK), text, -1)


def check_part_of_whole(as_rank, build, plan, text, rank):
    whole = build()
    whole.init_weights(SEED)
    size = MeshSpec.parse(text).size
    as_rank(rank % size, size)
    with patch("stepgraph.models.init.CHUNK", 100):  # parts begin and end inside chunks
        whole.init_weights(SEED)
        with patch("stepgraph.models.init.STAGED", 700):  # and are copied some rows at a time
            model = on_mesh(text, build, plan)
    parts = local_parts(model)
    for name, param in whole.named_parameters():
        part = parts[name]
        expected = param[tuple(slice(*ends) for ends in part.region)]
        assert torch.equal(part.tensor, expected), name
        local = dict(model.named_parameters())[name].to_local()
        assert local.untyped_storage().data_ptr() == part.tensor.untyped_storage().data_ptr()
        assert not local[part.tensor.shape[0] :].any(), "padding is zero"
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name


def test_parts_of_all_ranks_cover_the_whole(as_rank):
    as_rank(0, 6)
    covered = {name: torch.zeros(p.shape) for name, p in Llama3(TINY).named_parameters()}
    for rank in range(6):
        dist.destroy_process_group()
        as_rank(rank, 6)
        for name, part in local_parts(on_mesh("fsdp=3,tp=2", lambda: Llama3(TINY), TP_PLAN)).items():
            covered[name][tuple(slice(*ends) for ends in part.region)] += 1
    for name, count in covered.items():
        assert count.eq(2 if name.endswith("norm.weight") else 1).all(), name


def test_a_part_is_drawn_without_the_rest():
    """A thousandth of a large parameter is drawn in the chunks that it touches."""
    model = torch.nn.Module()
    rows, width = 20_000, 1_000
    part = Part(torch.empty(20, width), torch.Size((rows, width)), ((10_000, 10_020), (0, width)))
    drawn = []
    original = torch.Tensor.normal_
    with patch.object(torch.Tensor, "normal_", lambda t, *a, **k: drawn.append(t.numel()) or original(t, *a, **k)):
        init_parameters(model, 1, 0, {"weight": part})
    assert sum(drawn) <= 2 * CHUNK < rows * width


def test_seeds_of_two_parameters_do_not_run_into_each_other():
    """Seeds that count up from a hash of the name did: these two of Llama 3 405B shared 1,898 chunks."""
    names = "0/layers.75.mlp.up_proj.weight", "0/layers.12.mlp.down_proj.weight"

    def chunk(name, i):
        drawn = torch.empty(CHUNK)
        with ThreadPoolExecutor(1) as pool:
            _draw(drawn, i * CHUNK, 53_248 * 16_384, 1.0, name, pool)
        return drawn

    assert torch.equal(chunk(names[0], 1430), chunk(names[0], 1430))
    for one, other in (names, names[::-1]):
        assert not torch.equal(chunk(one, 0), chunk(other, 1430))


def test_rounding_gives_what_a_bf16_model_has(as_rank):
    whole = Llama3(TINY).bfloat16()
    whole.init_weights(SEED)
    as_rank(1, 2)
    model = on_mesh("fsdp=2", lambda: Llama3(TINY), TP_PLAN)
    round_to(model, torch.bfloat16)
    for name, part in local_parts(model).items():
        rows = slice(*part.region[0])
        assert part.tensor.dtype == torch.float32
        assert torch.equal(part.tensor, dict(whole.named_parameters())[name][rows].float()), name
