"""A tiny model with layers of experts, as the mesh of experts sees any: on one rank, and parallel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.kernels.moe import combine_rows, gather_rows, grouped_mm, sort_by_expert
from stepgraph.parallel import Mesh, parallelize

VOCAB, DIM, HIDDEN, EXPERTS, SLOTS = 32, 16, 24, 4, 2
PLAN = {
    "embed": "embedding",
    "layers.*.norm": "sequence",
    "layers.*.moe.router": "sequence",
    "layers.*.moe.experts": "sequence",
    "norm": "sequence_gather",
    "head": "columns",
}


class Local:
    """All experts are on this rank."""

    def dispatch(self, x, chosen, n_experts):
        order, places, counts = sort_by_expert(chosen, n_experts)
        return gather_rows(x, order, places), counts.cumsum(0, dtype=torch.int32), (order, places)

    def combine(self, rows, weights, state):
        order, places = state
        return combine_rows(rows, places, weights, order)


class Experts(nn.Module):
    def __init__(self, n_experts):
        super().__init__()
        self.up = nn.Parameter(torch.randn(n_experts, HIDDEN, DIM) * 0.2)
        self.down = nn.Parameter(torch.randn(n_experts, DIM, HIDDEN) * 0.2)

    def forward(self, rows, offsets):
        return grouped_mm(F.silu(grouped_mm(rows, self.up.mT, offsets)), self.down.mT, offsets)


class MoE(nn.Module):
    def __init__(self, n_experts=EXPERTS):
        super().__init__()
        self.n_experts, self.exchange = n_experts, Local()
        self.router, self.experts = nn.Linear(DIM, n_experts, bias=False), Experts(n_experts)
        self.register_buffer("load", torch.zeros(n_experts), persistent=False)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(SLOTS)
        self.load.add_((chosen.unsqueeze(-1) == torch.arange(self.n_experts)).sum((0, 1)))
        rows, offsets, state = self.exchange.dispatch(tokens, chosen, self.n_experts)
        return self.exchange.combine(self.experts(rows, offsets), weights, state).view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.RMSNorm(DIM), MoE()

    def forward(self, x):
        return x + F.dropout(self.moe(self.norm(x)), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, n_layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(n_layers))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


def whole_model(collapsed: bool = False, **options: Any) -> Model:
    """The model on one rank, the same on every rank. ``collapsed``: every token goes to the first two experts."""
    torch.manual_seed(0)
    model = Model(**options).eval()
    if collapsed:
        for block in model.layers:
            block.moe.router.weight.data[:] = 0.0  # ties go to the first experts
    return model


def parallel_model(mesh: Mesh, collapsed: bool = False, **options: Any) -> Model:
    return parallelize(whole_model(collapsed), mesh, PLAN, **options)
