"""Masked targets: the loss of ranks and microbatches with unlike numbers of them is the mean over all tokens."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph.parallel import MeshSpec, next_token_loss
from stepgraph.passes import configured, get
from tests.distributed.ranks import SEQ, TINY, full, make_mesh, on_ranks, parallel_model, whole_model

PARTS, ROWS = 2, 2  # microbatches, and rows of each
PASSES = [*configured("exact", cuda_graph=False), replace(get("fuse_loss"), needs_cuda=False)]


def uneven(rows):
    """A batch whose rows have 0 to SEQ targets, those of the second microbatch none."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, TINY.vocab_size, (rows, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(rows, SEQ, generator=generator) < torch.linspace(0, 1, rows).unsqueeze(1)] = -100
    targets[ROWS : 2 * ROWS] = -100
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


def check(meshes):
    for text in meshes:
        mesh = make_mesh(text)
        own = PARTS * ROWS
        whole = uneven(own * mesh.spec.dp)
        batch = {k: v[mesh.dp_place * own :][:own].contiguous() for k, v in whole.items()}
        batch["targets_per_row"] = (batch["targets"] >= 0).sum() / own
        model = parallel_model(mesh)
        step = stepgraph.capture(model, next_token_loss(mesh), batch, passes=PASSES, accumulate=PARTS)
        assert next(report for report in step.report if report.name == "fuse_loss").changed == 1
        loss = step(batch)
        alone = whole_model()
        expected = F.cross_entropy(alone(whole["tokens"]).flatten(0, 1), whole["targets"].flatten())
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0, msg=text)
        grads = {name: param.grad for name, param in model.named_parameters()}
        for name, param in alone.named_parameters():
            scale = param.grad.abs().max().item()  # fp32, from sums in another order
            grad = full(model, name, grads[name])
            torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-5 * scale, msg=f"{text} {name}")


@pytest.mark.parametrize(
    "meshes", [("fsdp=2", "tp=2"), pytest.param(("fsdp=2,tp=2", "hsdp=2x2"), marks=pytest.mark.long)]
)
def test_one_rank_with_the_whole_batch_has_the_same_loss_and_gradients(meshes):
    on_ranks(MeshSpec.parse(meshes[0]).size, check, meshes)
