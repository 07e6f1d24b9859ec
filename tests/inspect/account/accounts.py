"""Accounts that tests of the page share."""

import functools

from stepgraph.costs.hardware import GPUS
from stepgraph.graph.program import StepProgram
from stepgraph.inspect.account.account import account_of
from stepgraph.inspect.forecast.forecast import forecast, simulated
from tests.inspect.test_plan import config

GPU = GPUS["h200"]


@functools.cache
def account(mesh=None, **options):
    """The account of a model of two small blocks, and its program after all passes."""
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
