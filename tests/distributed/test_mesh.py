"""The mesh's text, its checks, and the plan's."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepgraph import compat, parallel
from stepgraph.models import Llama3
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import Mesh, MeshSpec, layouts, parallelize
from stepgraph.parallel.tensor import STYLES, check_plan, style_of
from tests.distributed.ranks import TINY, on_processes


@pytest.mark.parametrize(
    ("text", "sizes", "shown"),
    [
        ("fsdp=4,tp=2", (1, 4, 2), "fsdp=4,tp=2"),
        ("tp=2, fsdp=4", (1, 4, 2), "fsdp=4,tp=2"),
        ("ddp=3", (3, 1, 1), "ddp=3"),
        ("hsdp=2x4,tp=2", (2, 4, 2), "hsdp=2x4,tp=2"),
        ("tp=8", (1, 1, 8), "fsdp=1,tp=8"),
        ("fsdp=1", (1, 1, 1), "fsdp=1"),
        ("ep=2", (1, 2, 1), "fsdp=2,ep=2"),
        ("ep=4,tp=2", (1, 2, 2), "fsdp=2,tp=2,ep=4"),
        ("tp=4,ep=2", (1, 1, 4), "fsdp=1,tp=4,ep=2"),
        ("ep=4,hsdp=2x2,tp=2", (2, 2, 2), "hsdp=2x2,tp=2,ep=4"),
        ("cp=2", (1, 2, 1), "fsdp=1,cp=2"),
        ("fsdp=2,cp=4,tp=2", (1, 8, 2), "fsdp=2,cp=4,tp=2"),
        ("cp=2,ddp=3", (6, 1, 1), "ddp=3,cp=2"),
        ("hsdp=2x1,cp=2", (2, 2, 1), "hsdp=2x1,cp=2"),
        ("cp=2,ep=4", (1, 4, 1), "fsdp=2,cp=2,ep=4"),
    ],
)
def test_parse(text, sizes, shown):
    spec = MeshSpec.parse(text)
    assert (spec.dp_replicate, spec.dp_shard, spec.tp) == sizes
    assert str(spec) == shown and MeshSpec.parse(shown) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fdsp=2", "unknown mesh axis 'fdsp': did you mean 'fsdp'?"),
        ("", "unknown mesh axis '': choose one of cp, ddp, ep, fsdp, hsdp, pp, tp"),
        ("fsdp", "mesh 'fsdp': 'fsdp' has no size above 0; write it as in fsdp=2"),
        ("fsdp=2x4", "mesh 'fsdp=2x4': 'fsdp=2x4' has no size above 0; write it as in fsdp=2"),
        ("hsdp=8", "mesh 'hsdp=8': 'hsdp=8' has no size above 0; write it as in hsdp=2x4 (replicas x shards)"),
        ("tp=0", "mesh 'tp=0': 'tp=0' has no size above 0; write it as in tp=2"),
        ("tp=2,tp=2", "mesh 'tp=2,tp=2' names tp twice; name it once"),
        ("fsdp=6,ep=4", "mesh fsdp=6,ep=4: ep=4 does not divide its 6 ranks of shards and tp; try ep=3 or ep=6"),
        ("hsdp=4x2,ep=8", "mesh hsdp=4x2,ep=8: ep=8 does not divide its 2 ranks of shards and tp; try ep=2"),
        (
            "fsdp=99999999999",
            "mesh fsdp=99999999999 has 99,999,999,999 ranks, and 1,048,576 is the most: use a smaller one",
        ),
        ("ddp=2,fsdp=3", "mesh 'ddp=2,fsdp=3' has two data-parallel axes; shards with replicas are hsdp=2x3"),
    ],
)
def test_texts_that_are_refused(text, message):
    with pytest.raises(ValueError) as refused:
        MeshSpec.parse(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        (
            "fsdp=4,tp=2",
            6,
            "fsdp=4,tp=2 has 8 ranks and there are 6 processes: try the mesh fsdp=3,tp=2, or start 8",
        ),
        ("fsdp=4,tp=2", 1, "fsdp=4,tp=2 has 8 ranks and there is 1 process: try the mesh fsdp=1, or start 8"),
        (
            "tp=4",
            6,
            "fsdp=1,tp=4 has 4 ranks and there are 6 processes: try the mesh fsdp=2,tp=3, or start 4",
        ),
        ("hsdp=2x4", 4, "hsdp=2x4 has 8 ranks and there are 4 processes: try the mesh hsdp=2x2, or start 8"),
        (
            "fsdp=2,cp=2",
            2,
            "fsdp=2,cp=2 has 4 ranks and there are 2 processes: try the mesh fsdp=1,cp=2, or start 4",
        ),
        ("ddp=2", 3, "ddp=2 has 2 ranks and there are 3 processes: try the mesh ddp=3, or start 2"),
    ],
)
def test_worlds_that_do_not_fit(text, world, message):
    with pytest.raises(ValueError) as refused:
        MeshSpec.parse(text).check_world(world)
    ranks = message.split()[-1]
    how = f"(torchrun --nproc-per-node {ranks}, or stepgraph train --nproc {ranks})"
    assert str(refused.value) == f"mesh {message} {how}"


def test_tp_must_divide():
    with pytest.raises(ValueError, match=r"^tp=3 does not divide n_heads=32; try tp=2 or tp=4$"):
        MeshSpec(tp=3).check_divides({"n_heads": 32, "n_kv_heads": 8})
    with pytest.raises(ValueError, match=r"^tp=16 does not divide n_kv_heads=8; try tp=8$"):
        MeshSpec(tp=16).check_divides({"n_heads": 32, "n_kv_heads": 8})


@pytest.fixture
def world():
    compat.init_fake_world(5, 8)
    yield
    dist.destroy_process_group()


def test_ranks_count_tp_fastest(world):
    mesh = Mesh(MeshSpec.parse("hsdp=2x2,tp=2"), "cpu")
    assert (mesh.place("dp_replicate"), mesh.place("dp_shard"), mesh.place("tp")) == (1, 0, 1)
    assert mesh.dp_place == 2
    assert mesh.axis("tp").mesh.tolist() == [4, 5]
    assert mesh.axis("dp_shard").mesh.tolist() == [5, 7]
    assert mesh.axis("dp_replicate").mesh.tolist() == [1, 5]
    mesh = Mesh(MeshSpec.parse("fsdp=2,cp=2,tp=2"), "cpu")
    assert (mesh.dp_place, mesh.cp_place, mesh.spec.dp, mesh.place("dp_shard")) == (1, 0, 2, 2)
    assert dist.get_process_group_ranks(mesh.context_group) == [5, 7]
    assert Mesh(MeshSpec.parse("fsdp=8"), "cpu").axis("tp") is None
    with pytest.raises(ValueError, match="mesh fsdp=4 has 4 ranks and there are 8 processes"):
        Mesh(MeshSpec.parse("fsdp=4"), "cpu")


def test_patterns_match_whole_paths():
    linear, norm = nn.Linear(2, 2), nn.RMSNorm(2)
    assert style_of("layers.11.attn.q_proj", linear, TP_PLAN).split == {"weight": 0, "bias": 0}
    assert style_of("layers.3", nn.Module(), TP_PLAN) is None
    assert style_of("layers.3.norm", norm, TP_PLAN) is None
    with pytest.raises(ValueError, match=r"^layers.0.mlp.up_proj is a RMSNorm, and style 'columns' is for nn.Linear"):
        style_of("layers.0.mlp.up_proj", norm, TP_PLAN)
    with pytest.raises(ValueError, match=r"^unknown tensor-parallel style 'colums': did you mean 'columns'\?$"):
        style_of("head", linear, {"head": "colums"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layers.*.mlp.gate": "columns"},
            "names 'layers.*.mlp.gate', which matches no module; remove it",
        ),
        (
            {"head": None},
            f"has no style for head.weight; add one of {', '.join(STYLES)}",
        ),
    ],
)
def test_plans_that_do_not_fit(change, message):
    plan = {key: value for key, value in (TP_PLAN | change).items() if value}
    with pytest.raises(ValueError) as refused:
        check_plan(Llama3(TINY), plan, 2)
    assert str(refused.value) == f"the tensor-parallel plan {message}"


def test_models_that_are_refused(world):
    with pytest.raises(ValueError, match=r"^tp=8 does not divide dimension 0 of embed.weight, 130; try tp=5$"):
        parallelize(Llama3(TINY), Mesh(MeshSpec.parse("tp=8"), "cpu"), TP_PLAN)
    mesh = Mesh(MeshSpec.parse("fsdp=4,tp=2"), "cpu")
    with pytest.raises(ValueError, match=r"^mesh fsdp=4,tp=2 splits tensors and the model has no plan; pass plan="):
        parallelize(Llama3(TINY), mesh)
    model = parallelize(Llama3(TINY), mesh, TP_PLAN)
    with pytest.raises(ValueError, match=r"^the model is parallel already; build a new one"):
        parallelize(model, mesh, TP_PLAN)
    tied = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(ValueError, match=r"^the plan splits b.weight, which is tied, in two ways; make its"):
        parallelize(tied, mesh, {"a": "columns", "b": "rows"})


def test_what_parallelize_leaves(world):
    model = parallelize(Llama3(TINY), Mesh(MeshSpec.parse("fsdp=4,tp=2"), "cpu"), TP_PLAN)
    assert isinstance(model, Llama3) and repr(model) == repr(Llama3(TINY))
    assert model.state_dict().keys() == Llama3(TINY).state_dict().keys()
    found = layouts(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    # 130 rows: 65 on each of two tp ranks, 17 on each of four shards, 3 of them padding.
    assert found["embed.weight"].padded and model._modules["embed"]._parameters["weight"].shape == (136, 48)
    assert found["embed.weight"].without_padding(model.embed._parameters["weight"]).shape == (130, 48)
    assert found["layers.0.attn.o_proj.weight"].local_shape == (12, 24)
    assert torch.equal(found["norm.weight"].own(torch.arange(12)), torch.arange(12))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"MASTER_PORT": None}, "the environment's MASTER_PORT is not set: start ranks by torchrun"),
        ({"MASTER_ADDR": None}, "the environment's MASTER_ADDR is not set: start ranks by torchrun"),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": None},
            "the environment's TORCHELASTIC_RESTART_COUNT is not set",
        ),
    ],
    ids=str,
)
def test_an_environment_that_starts_no_rank_is_one_line(changed, says, monkeypatch):
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29999"}
    for name, value in (there | changed).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{says}"):
        parallel.started(MeshSpec.parse("fsdp=2"), "cpu", 1.0).__enter__()


def test_an_agent_without_a_run_id_is_one_line(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValueError, match="TORCHELASTIC_RUN_ID is not set"):
        parallel.job_store()


def _meet_where_another_listens(_):
    with socket.socket() as held:
        held.bind(("localhost", 0))
        held.listen()
        port = held.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
        with pytest.raises(ValueError, match=f"^the ranks cannot meet at localhost:{port}: it is in use, use another"):
            parallel.started(MeshSpec.parse("fsdp=2"), "cpu").__enter__()


def test_a_port_in_use_is_one_line():
    """In a process of its own: torch has counted the group that it could not make."""
    on_processes(1, _meet_where_another_listens, ())


def test_a_mesh_without_process_groups_says_how_to_open_them():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"^mesh fsdp=2 needs process groups and none are open: .*parallel\.started"):
        Mesh(MeshSpec.parse("fsdp=2"), "cpu")
