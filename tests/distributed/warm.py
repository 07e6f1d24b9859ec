"""Imported by the server that ranks are forked from: what the first capture of a process sets up is there."""

import torch

import stepgraph
from stepgraph.models import next_token_loss
from tests.distributed.ranks import TINY, global_batch, whole_model

with torch.random.fork_rng():
    model = whole_model(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = stepgraph.capture(model, next_token_loss, global_batch(0, 1), optimizer, max_grad_norm=1.0, passes="exact")
    step(global_batch(0, 1))
