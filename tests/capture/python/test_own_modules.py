"""Programs of several Python modules: a captured step follows what they read, and refuses what they change."""

import random
import sys

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError
from tests.capture.python.own_modules import LINKS, REFUSED, VALUES, loaded, write


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def compare(folder, package, value, links, choose):
    write(folder, package, value, links, choose)
    losses = []
    for captured in (False, True):
        random.seed(3)
        last, first = loaded(package, links)
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4), torch.randn(3, 4)
        loss_fn = lambda model, x, last=last: (model(x) * last.call()).square().mean()  # noqa: E731
        if captured and value in REFUSED:
            with pytest.raises(CaptureError):
                stepgraph.capture(model, loss_fn, x, passes="exact")
            return
        step = stepgraph.capture(model, loss_fn, x, passes="exact") if captured else loss_fn
        for new in (2.0, 3.0, 4.0):
            losses.append(float(step(x) if captured else step(model, x)))
            exec(VALUES[value][1], {"first": first, "value": new})
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("link", LINKS)
def test_what_each_kind_of_call_leads_to(folder, link):
    choose = random.Random(link)
    for i in range(2):
        value = choose.choice([REFUSED, sorted(VALUES)][i])
        compare(folder, f"own_{i}", value, [link], choose)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(400))
def test_programs(folder, seed):
    choose = random.Random(seed)
    links = choose.choices(sorted(LINKS), k=choose.randint(1, 3))
    compare(folder, "own", choose.choice(sorted(VALUES)), links, choose)
