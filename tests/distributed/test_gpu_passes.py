"""Passes that need a GPU, over ranks: on a CPU their operators run as references, and the step trains as eager does."""

from dataclasses import replace

import pytest
import torch

import stepgraph
from stepgraph.parallel import next_token_loss
from stepgraph.passes import configured
from tests.distributed import expert_model, ranks, test_experts
from tests.distributed.ranks import make_mesh, on_ranks

#: Those whose kernels have no reference on a CPU, and compilers.
LEFT_OUT = {"attention", "attention_windows", "fuse_attention", "tune_products", "inductor", "cuda_graph"}


def passes():
    """Most parameters are small: their updates are written out, but for those of norms."""
    chosen = [p for p in configured("default") if p.name not in LEFT_OUT]
    chosen = [p.with_options(small=64, several=2) if p.name == "expand_optimizer" else p for p in chosen]
    return [replace(p, needs_cuda=False, serves=None) if p.needs_cuda else p for p in chosen]


def check(spec, experts):
    mesh = make_mesh(spec)
    made = expert_model.parallel_model if experts else ranks.parallel_model
    batch_of = test_experts.own_batch if experts else ranks.own_batch
    models = [made(mesh) for _ in range(2)]
    optimizers = [test_experts.adamw(model) for model in models]
    loss_fn = next_token_loss(mesh)
    step = stepgraph.capture(
        models[1], loss_fn, batch_of(mesh, 0), optimizers[1], max_grad_norm=test_experts.CLIP, passes=passes()
    )
    for i in range(4):
        batch = batch_of(mesh, i)
        expected, _ = test_experts.eager_step(models[0], loss_fn, batch, optimizers[0], 1)
        torch.testing.assert_close(step(batch), expected, rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.to_local(), p.to_local(), rtol=1e-2, atol=1e-4, msg=name)
    reports = {report.name: report for report in step.report}
    assert all(reports[name].changed for name in ("fuse_loss", "embedding_gradient", "expand_optimizer"))


@pytest.mark.parametrize(
    ("spec", "experts"), [("fsdp=2", False), ("tp=2", False), ("fsdp=2,ep=2", True), ("ep=2,tp=2", True)]
)
def test_a_step_trains_as_eager_does(spec, experts):
    on_ranks(2, check, spec, experts)
