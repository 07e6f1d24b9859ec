"""Experts over GPUs, with NCCL: one CUDA graph a step, repeated with larger buffers where routing needs them."""

import copy

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.models import DeepSeekV3, DeepSeekV3Config, MoEConfig, family_of
from stepgraph.parallel import local_parts, next_token_loss, parallelize
from stepgraph.passes import configured
from tests.gpu.test_ranks_gpu import on_gpus

CONFIG = DeepSeekV3Config(
    dim=256,
    n_layers=3,
    n_dense_layers=1,
    n_heads=8,
    ffn_dim=512,
    moe=MoEConfig(n_experts=8, top_k=2, ffn_dim=128, n_shared=1, scoring="sigmoid", selection_bias=True),
    vocab_size=1024,
    max_seq_len=512,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
MESHES = {"fsdp=2,ep=2": 2, "ep=2,tp=2": 2, "fsdp=4,ep=2": 4, "hsdp=2x2,ep=2": 4}


def build(mesh, capacity=2.0, collapsed=False):
    with torch.device("meta"):
        model = DeepSeekV3(CONFIG)
    parallelize(
        model,
        mesh,
        family_of(CONFIG).tp_plan(CONFIG),
        device="cuda",
        param_dtype=torch.bfloat16,
        expert_capacity=capacity,
    )
    model.init_weights(0, local_parts(model))
    if collapsed:
        for router in model.routers:  # every token to the first two experts, those of one rank
            router.expert_bias.copy_(-10.0 * torch.arange(CONFIG.moe.n_experts))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def batch_of(mesh, step):
    generator = torch.Generator().manual_seed(1000 * step + mesh.dp_place)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 513), generator=generator).cuda()
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def parts_of(model):
    return [*(p.detach().to_local() for p in model.parameters()), *model.buffers()]


def _one_graph_bitwise_eager(mesh):
    model, optimizer = build(mesh)
    step = stepgraph.capture(
        model, next_token_loss(mesh), batch_of(mesh, 0), optimizer, max_grad_norm=1.0, passes=configured("exact")
    )
    assert step.verify(batch_of(mesh, 1)).bitwise
    for i in range(4):
        step(batch_of(mesh, i))
        assert step.metrics["repeated"] == 0
    report = next(report for report in step.report if report.name == "cuda_graph")
    assert report.summary.startswith("1 CUDA graph, 0 nodes on the host"), report.notes


@pytest.mark.parametrize("spec", MESHES)
def test_a_step_is_one_cuda_graph_and_bitwise_eager(spec):
    on_gpus(spec, _one_graph_bitwise_eager)


def _repeated(mesh):
    outcomes = []
    for capacity in (0.5, 16.0):
        model, optimizer = build(mesh, capacity, collapsed=True)
        step = stepgraph.capture(
            model, next_token_loss(mesh), batch_of(mesh, 0), optimizer, max_grad_norm=1.0, passes=configured("exact")
        )
        losses, repeats = [], []
        for i in range(5):  # the third replays
            losses.append(step(batch_of(mesh, i)))
            repeats.append(int(step.metrics["repeated"]))
        outcomes.append((losses, repeats, parts_of(model)))
    (small, repeats, state), (large, never, expected) = outcomes
    assert repeats[0] >= 1 and repeats[2:] == [0, 0, 0] and never == [0] * 5
    assert all(map(torch.equal, small, large)) and all(map(torch.equal, state, expected))


@pytest.mark.parametrize("spec", ["fsdp=2,ep=2", "fsdp=4,ep=2"])
def test_routing_that_needs_more_room_repeats_the_step(spec):
    on_gpus(spec, _repeated)


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("passes", ["exact", "default"])
def test_a_step_left_out_changes_nothing_in_a_cuda_graph(passes, master):
    """Warm-up, recording and replays: a spoiled step keeps every bit, and others are those of an unguarded step."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if master else torch.float32
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 8)).to("cuda", dtype)
    other = copy.deepcopy(model)

    def optimizer_of(m):
        return stepgraph.MasterAdamW(m.parameters()) if master else torch.optim.AdamW(m.parameters(), fused=True)

    def loss_fn(m, batch):
        return (m(batch["x"]) - batch["y"]).float().square().mean()

    batch = {"x": torch.randn(32, 64, device="cuda", dtype=dtype), "y": torch.randn(32, 8, device="cuda", dtype=dtype)}
    spoiled = batch | {"y": batch["y"] * float("nan")}
    optimizer = optimizer_of(model)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0, on_nonfinite="skip", passes=passes)
    plain = stepgraph.capture(other, loss_fn, batch, optimizer_of(other), max_grad_norm=1.0, passes=passes)
    for i in range(6):
        entries = [t for entry in optimizer.state.values() for t in entry.values()]
        state = [*model.parameters(), *model.buffers(), *entries]
        before = [t.detach().clone() for t in state]
        step(spoiled)
        assert step.metrics["skipped"], i
        assert all(map(torch.equal, before, state)), i
        torch.testing.assert_close(step(batch), plain(batch), rtol=0 if passes == "exact" else 1e-2, atol=0)
        assert not step.metrics["skipped"], i
    if passes == "exact":
        assert all(map(torch.equal, model.parameters(), other.parameters()))
