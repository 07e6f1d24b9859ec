"""A head in parts of the tokens under FSDP: one gather of its weight serves all parts, and one reduction."""

from dataclasses import replace

import pytest
import torch

import stepgraph
from stepgraph.graph import collectives
from stepgraph.parallel import MeshSpec, next_token_loss
from stepgraph.passes import configured, get
from tests.distributed.ranks import make_mesh, on_ranks, own_batch, parallel_model


def passes(chunks):
    """The default ones without a compiler, and the loss's on a CPU too."""
    found = configured("default", inductor="off", reshard="always", cuda_graph=False, disable_pass=("fuse_norm",))
    fuse = replace(get("fuse_loss", chunks=chunks), needs_cuda=False)
    return [fuse if p.name == "fuse_loss" else p for p in found]


def trained(mesh, chosen, **options):
    """(loss, gradients by name, captured step) of one step on every rank."""
    model, batch = parallel_model(mesh, **options), own_batch(mesh, 0, 2)
    step = stepgraph.capture(model, next_token_loss(mesh), batch, passes=chosen)
    loss = step(batch)
    return loss, {name: param.grad.to_local() for name, param in model.named_parameters()}, step


def count(step):
    return {
        kind: len([n for n in step.graph.graph.nodes if n.target is operator])
        for kind, operator in {"gathers": collectives.ALL_GATHER, "reductions": collectives.REDUCE_SCATTER}.items()
    }


def check(text):
    mesh = make_mesh(text)
    for options, tolerance in (({}, 1e-5), ({"param_dtype": torch.bfloat16}, 3e-2)):
        loss, grads, one = trained(mesh, passes(1), **options)
        given, mine, step = trained(mesh, passes(3), **options)
        report = next(report for report in step.report if report.name == "fuse_loss")
        assert "logits in 3 parts" in report.summary and report.notes == []
        assert count(step) == count(one) and min(count(one).values()) > 1
        torch.testing.assert_close(given, loss, rtol=1e-5, atol=0)
        for name, grad in grads.items():
            scale = grad.abs().max().item()
            torch.testing.assert_close(mine[name], grad, rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("text", ["fsdp=2", pytest.param("hsdp=2x2", marks=pytest.mark.long)])
def test_loss_and_gradients_stay(text):
    on_ranks(MeshSpec.parse(text).size, check, text)
