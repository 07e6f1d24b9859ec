"""Ranks that hold different values of a replicated parameter."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.parallel import parallelize
from tests.distributed.ranks import make_mesh, on_ranks


def _ranks() -> None:
    mesh = make_mesh("ddp=2")
    torch.manual_seed(torch.distributed.get_rank())
    alike, apart = nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    torch.manual_seed(0)
    alike.reset_parameters()
    for model in (alike, apart):
        parallelize(model, mesh)
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    stepgraph.capture(alike, loss_fn, torch.ones(2, 4), passes="exact")
    with pytest.raises(ValueError, match=r"ranks hold different values of 1\.weight, .*torch\.manual_seed"):
        stepgraph.capture(apart, loss_fn, torch.ones(2, 4), passes="exact")


def test_replicas_of_different_seeds_are_refused():
    on_ranks(2, _ranks)
