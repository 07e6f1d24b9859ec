"""DeepSeek-V3 and Qwen3-MoE over ranks, each with all experts: FSDP and tensor parallelism."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.config.hf_weights import load_hf, save_hf
from stepgraph.models import family_of
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import MeshSpec, local_parts, next_token_loss, parallelize
from tests.distributed.ranks import full, make_mesh, on_ranks
from tests.distributed.test_exact import CLIP, PARTS, adamw, eager_step
from tests.models.moe_models import DEEPSEEK, QWEN, SIGMOID, our_model

STEPS = 2
DENSE = dataclasses.replace(DEEPSEEK, n_layers=2, moe=dataclasses.replace(SIGMOID, balance_loss=0.5))
# Three experts over two ranks: FSDP splits the next dimension of their weights, which divides.
THREE = dataclasses.replace(DENSE.moe, n_experts=3, top_k=2, n_shared=3, n_groups=1, top_groups=1)
WIDE = dataclasses.replace(DENSE, q_lora_rank=None, moe=THREE)
SMALL_QWEN = dataclasses.replace(QWEN, n_layers=1)


def parallel_model(config, mesh):
    return parallelize(our_model(config), mesh, family_of(config).tp_plan(config))


def batches(config, mesh, step):
    """(the batch of all data-parallel ranks, this rank's part)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (2 * mesh.spec.dp, 17), generator=generator)
    whole = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return whole, {key: value[2 * mesh.dp_place :][:2].contiguous() for key, value in whole.items()}


def check_exact(mesh, config):
    """Graph and eager program agree bit for bit, the biases of all ranks too; and the ranks agree with each other."""
    loss_fn = next_token_loss(mesh)
    eager, captured = parallel_model(config, mesh), parallel_model(config, mesh)
    optimizers = adamw(eager), adamw(captured)
    example = batches(config, mesh, 0)[1]
    options = {"max_grad_norm": CLIP, "accumulate": PARTS, "passes": "exact"}
    step = stepgraph.capture(captured, loss_fn, example, optimizers[1], **options)
    for i in range(STEPS):
        batch = batches(config, mesh, i)[1]
        loss, norm = eager_step(eager, loss_fn, batch, optimizers[0])
        metrics = stepgraph.end_of_step(eager)
        assert torch.equal(step(batch), loss), i
        assert torch.equal(step.metrics["grad_norm"], norm), i
        assert torch.equal(step.metrics["expert_load"], metrics["expert_load"]), i
        for (name, a), b in zip(eager.named_parameters(), captured.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), (i, name)
        for (name, a), b in zip(eager.named_buffers(), captured.buffers(), strict=True):
            assert torch.equal(a, b), (i, name)
    for router in captured.routers:
        if router.expert_bias is not None:
            first = router.expert_bias.clone()
            dist.broadcast(first, 0)
            assert torch.equal(router.expert_bias, first)


def check_one_rank(mesh, config):
    """Loss and gradients as on one rank with the whole batch, but for the order of sums; exactly the same load."""
    loss_fn, alone, model = next_token_loss(mesh), our_model(config), parallel_model(config, mesh)
    whole, own = batches(config, mesh, 0)
    expected, loss = one_rank_loss(alone, whole), loss_fn(model, own)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        scale = a.grad.abs().max().item()
        torch.testing.assert_close(full(model, name, b.grad), a.grad, rtol=0, atol=1e-5 * scale, msg=name)
    assert torch.equal(stepgraph.end_of_step(alone)["expert_load"], stepgraph.end_of_step(model)["expert_load"])
    for one, other in zip(alone.routers, model.routers, strict=True):
        assert one.expert_bias is None or torch.equal(one.expert_bias, other.expert_bias)


def check_files(mesh, config, folder):
    """Each rank reads its part of the experts; what it holds is written whole."""
    model, expected = parallel_model(config, mesh), our_model(config)
    save_hf(model, folder, max_shard_bytes=60_000)
    for part in local_parts(model).values():
        part.tensor.fill_(torch.nan)
    for router in model.routers:
        if router.expert_bias is not None:
            router.expert_bias.fill_(torch.nan)
    load_hf(model, folder)
    alone = our_model(config, seed=1)
    load_hf(alone, folder)
    for (name, a), b, c in zip(expected.named_parameters(), model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(model, name, b.detach()), a) and torch.equal(c, a), name
    buffers = dict(model.named_buffers())  # and the rank's place
    for (name, a), b in zip(expected.named_buffers(), alone.buffers(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, buffers[name]), name


def check(text, config, folder):
    mesh = make_mesh(text)
    check_exact(mesh, config)
    check_one_rank(mesh, config)
    check_files(mesh, config, folder)


def check_both(folder):
    check_exact(make_mesh("tp=2"), DENSE)
    check_one_rank(make_mesh("tp=2"), DENSE)
    check_one_rank(make_mesh("fsdp=2"), WIDE)
    check_files(make_mesh("fsdp=2"), WIDE, folder)


def test_two_ranks(tmp_path):
    on_ranks(2, check_both, tmp_path / "files")


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["fsdp=2", "tp=2", "fsdp=2,tp=2"])
@pytest.mark.parametrize("config", [DENSE, WIDE, SMALL_QWEN], ids=["deepseek", "no-query-compression", "qwen"])
def test_any_ranks(mesh, config, tmp_path):
    on_ranks(MeshSpec.parse(mesh).size, check, mesh, config, tmp_path / "files")
