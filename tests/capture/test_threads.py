"""Other threads at work while a step is captured."""

import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph import compat
from stepgraph.capture.step_trace import StepTrace

X, MODULE = torch.randn(4, 8), nn.Linear(8, 1)


def captured(_=None):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepgraph.capture(model, lambda m, x: m(x).square().mean(), X, optimizer, passes="exact")


def during_a_trace(monkeypatch, work):
    """A step is captured, and in each of its traces another thread runs ``work``."""
    plain = StepTrace._loss_and_grads
    with ThreadPoolExecutor(1) as other, monkeypatch.context() as patched:
        run = lambda *given: (other.submit(work).result(), plain(*given))[1]  # noqa: E731
        patched.setattr(StepTrace, "_loss_and_grads", run)
        return captured()


def test_captures_of_threads_wait_for_each_other():
    first = captured()(X)  # on this thread: without a GPU, torch 2.11 fails where another is the first to trace
    with ThreadPoolExecutor(3) as pool:
        assert all(step(X) == first for step in pool.map(captured, range(3)))
    assert type(torch.random.default_generator) is torch.Generator


def seed():
    state = torch.get_rng_state()
    torch.manual_seed(7)
    torch.set_rng_state(state)


def train():
    for reentrant in (False, True):
        x = X.clone().requires_grad_()
        checkpoint(MODULE, x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None
    with torch.autocast("cpu"):
        assert MODULE(X).dtype == torch.bfloat16


def fork():
    """The child has torch's own generator, as a worker of a data loader needs, and can capture."""
    if not (child := os.fork()):
        signal.alarm(60)
        plain = type(torch.random.default_generator) is torch.Generator
        with compat.one_thread():
            os._exit(not plain)
    assert os.waitpid(child, 0)[1] == 0


def draw_once(drawn=[]):  # noqa: B006
    if not drawn:
        drawn.append(torch.rand(2))


@pytest.mark.parametrize("work", [seed, train, fork, draw_once], ids=lambda work: work.__name__)
def test_another_thread_finds_torch_as_it_is(monkeypatch, work):
    assert during_a_trace(monkeypatch, work)(X) == captured()(X)


def test_what_another_thread_reads_is_not_compared(monkeypatch):
    seen = torch.zeros(3)
    step = during_a_trace(monkeypatch, lambda: (seen.numpy(), str(seen)))
    seen.fill_(1.0)
    with warnings.catch_warnings(action="error"):
        step(X)  # and it is not captured again


def test_another_thread_that_draws_in_each_trace_is_named(monkeypatch):
    with pytest.raises(
        stepgraph.CaptureError, match=r"another thread drew .*: .*ThreadPoolExecutor-.*its own generator"
    ):
        during_a_trace(monkeypatch, lambda: torch.rand(2))
