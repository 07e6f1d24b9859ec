"""Checkpoints of an own loop by ``torch.distributed.checkpoint``: padded parameters and state on several meshes."""

import dataclasses

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import stepgraph
from stepgraph.parallel import held_parameters, layouts, next_token_loss, parallelize, plan_pipeline
from tests.distributed.ranks import TINY, full, make_mesh, on_ranks, own_batch, whole_model

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def mean_square(model, x):
    return model(x).square().mean()


def captured(model, loss_fn, batch, accumulate=1):
    """The model, its optimizer and a step, which has run."""
    optimizer = torch.optim.AdamW(held_parameters(model).values(), lr=0.01, fused=True)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, accumulate=accumulate, passes="exact")
    step(batch)
    return model, optimizer, lambda: step(batch)


def linear(text):
    """130 rows: over four shards 33 each, over two shards of two parts 33 of 65, so that other rows are padding."""
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Linear(8, 130)), make_mesh(text), {"0": "columns"})
    return captured(model, mean_square, torch.ones(2, 8))


def llama(text):
    mesh = make_mesh(text)
    model, loss_fn, batch = (
        whole_model(dataclasses.replace(TINY, n_layers=2)),
        next_token_loss(mesh),
        own_batch(mesh, 0),
    )
    pipeline = plan_pipeline(model, loss_fn, own_batch(mesh, 0, 1), mesh) if mesh.spec.pp > 1 else None
    return captured(parallelize(model, mesh, pipeline=pipeline), loss_fn, batch, mesh.spec.pp)


def wholes(model, optimizer):
    found = {}
    for name, param in held_parameters(model).items():
        state = optimizer.state[param]
        for key, value in {"": param.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"]}.items():
            local = value.to_local()
            assert local.count_nonzero() == layouts(model)[name].own(local).count_nonzero(), "padding stays zero"
            found[name, key] = full(model, name, value)
    return found


def _loads(folder, make, source, target) -> None:
    model, optimizer, step = make(source)
    step()
    expected = wholes(model, optimizer)
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer, options=FLAT), strict=True)), checkpoint_id=folder)
    model, optimizer, step = make(target)
    state = dict(zip("mo", get_state_dict(model, optimizer, options=FLAT), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"], options=FLAT)
    found = wholes(model, optimizer)
    assert found and all(torch.equal(found[key], expected[key]) for key in found.keys() & expected.keys())
    step()


def test_padded_state_is_loaded_on_another_mesh(tmp_path):
    on_ranks(4, _loads, str(tmp_path), linear, "fsdp=4", "fsdp=2,tp=2")


def test_stages_are_saved(tmp_path):
    on_ranks(2, _loads, str(tmp_path), llama, "pp=2", "fsdp=2")
