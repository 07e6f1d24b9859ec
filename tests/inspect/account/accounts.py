"""Accounts that tests of the page share."""

import dataclasses
import functools

from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS
from stepgraph.graph.program import StepProgram
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.forecast.forecast import forecast, simulated
from tests.distributed.ranks import TINY

GPU = GPUS["h200"]
MODEL = dataclasses.replace(TINY, dim=64, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256, n_layers=2)


def config(mesh=None, **options):
    """A run of a model of two small blocks."""
    settings = {"precision": "bf16", "batch_size": 2, "seq_len": 32, "inductor": "off"} | options
    return TrainConfig(preset="small", mesh=mesh, steps=20, model=MODEL, **settings)


@functools.cache
def account(mesh=None, **options):
    """Its account, and its program after all passes."""
    chosen = config(mesh, **options)
    with simulated(chosen, GPU) as (program, groups):
        return account_of(program, chosen, GPU, groups, device=None), program


@functools.cache
def planned(mesh, **options):
    """Its forecast, made by itself."""
    return forecast(config(mesh, **options), GPU)


def graphs(made: tuple[dict, StepProgram]):
    """(account, graph) of each graph."""
    found, program = made
    return [(graph, program.graphs[graph["name"]]) for graph in found["graphs"]]
