"""Optimizers that are captured by their own ``step``, in a pipeline: bit for bit those of one process."""

import copy

import pytest
import torch

import stepgraph
from stepgraph import parallel
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import next_token_loss
from tests.capture import own_optimizers
from tests.distributed.ranks import global_batch, make_mesh, on_ranks, whole_model
from tests.distributed.test_pipeline import CLIP, SHORT, eager_gradients, pipelined


def muon(params, lr):
    """Of all ranks' parameters, as a user gives them who does not look which are here."""
    params = list(params)
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr, ns_steps=1)


KINDS = {
    "muon": muon,
    "norms of parameters": own_optimizers.Lamb,
    "a first step of its own": own_optimizers.Momentum,
    "numbers of the host": own_optimizers.Counted,
    "shapes": own_optimizers.Soap,
}


def _check(kinds, folder):
    mesh, n = make_mesh("pp=2"), 2
    first, _ = pipelined(mesh, "1f1b", SHORT)
    for what in kinds:
        kind, alone, loss_fn = KINDS[what], whole_model(SHORT), next_token_loss(mesh)
        optimizer, steps = kind(alone.parameters(), lr=0.01), []
        for _ in range(2):  # the second is loaded
            model = copy.deepcopy(first)
            ours = kind(model.parameters(), lr=0.01)
            step = stepgraph.capture(model, loss_fn, global_batch(0, 1, n), ours, max_grad_norm=CLIP, accumulate=n,
                                     passes="exact", saved=folder)  # fmt: skip
            steps.append((model, ours, step))
        for i in range(3):
            batch = global_batch(i, 1, n)
            for one in (optimizer, *(ours for _, ours, _ in steps)):
                one.param_groups[0]["lr"] *= 0.9
            expected = eager_gradients(alone, one_rank_loss, batch, n)
            torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
            optimizer.step()
            alone.zero_grad()
            for model, _, step in steps:
                assert torch.equal(step(batch), expected), (what, i)
                for name, param in parallel.held_parameters(model).items():
                    assert torch.equal(param.detach().to_local(), alone.get_parameter(name)), (what, i, name)
        made, loaded = (step.saved for *_, step in steps)
        assert made.kept and loaded.loaded, (what, made, loaded)


def test_muon(tmp_path):
    on_ranks(2, _check, ["muon"], tmp_path)


@pytest.mark.long
def test_others(tmp_path):
    on_ranks(2, _check, [what for what in KINDS if what != "muon"], tmp_path)
