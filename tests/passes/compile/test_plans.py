"""Attention's first calls: one for each form, which change nothing and may find no room."""

import operator

import pytest
import torch
from torch import fx

from stepgraph.passes.compile import plans


@pytest.mark.parametrize("room", [True, False])
def test_each_form_is_called_once_and_generators_are_put_back(room, monkeypatch):
    called = []

    def attend(x, scale):
        called.append((*x.shape, *x.stride(), scale, torch.rand(1)))
        if not room:
            raise torch.OutOfMemoryError("full")

    graph = fx.Graph()
    for stride, scale in [((3, 1), 1.0), ((3, 1), 1.0), ((1, 2), 1.0), ((3, 1), 2.0)]:
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty_strided((2, 3), stride)
        graph.call_function(attend, (x,), {"scale": scale})
        graph.call_function(operator.neg, (x,))
    fork = torch.random.fork_rng
    monkeypatch.setattr(plans, "_PLANNED", (attend,))
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    state = torch.get_rng_state()
    plans.build_plans(graph)
    assert [call[:-1] for call in called] == [(2, 3, 3, 1, 1.0), (2, 3, 1, 2, 1.0), (2, 3, 3, 1, 2.0)]
    assert torch.equal(torch.get_rng_state(), state)
