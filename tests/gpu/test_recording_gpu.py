"""CUDA graphs recorded more than once, and what the host reads while they replay."""

import os
import subprocess
import sys
import time

import pytest
import torch

from stepgraph.train.trainer import Figures

RECORDED_AGAIN = """
import torch, stepgraph
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
batch = {"x": torch.randn(8, 64, device="cuda")}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
step = stepgraph.capture(model, lambda m, b: m(b["x"]).square().mean(), batch, optimizer, passes="exact")
losses = [step(batch).item() for _ in range(4)]
step._current.runner.runners["step"].forget()  # as after a step that was broken off
losses += [step(batch).item() for _ in range(4)]
assert losses == sorted(losses, reverse=True), losses
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_graphs_are_recorded_again(expandable):
    """torch does not take a pool whose graphs are gone, before its memory is given back: with expandable segments."""
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
    ran = subprocess.run([sys.executable, "-c", RECORDED_AGAIN], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_figures_of_a_step_do_not_wait_for_the_next():
    """The loop reads them when the next step is launched already, behind them on the same stream."""
    figure = torch.ones((), device="cuda") * 3
    figures, begun = Figures(figure, figure + 1), torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    begun.record()
    assert figures.read() == [3.0, 4.0] and not begun.query()


def test_a_steps_time_is_that_between_the_ends_of_two_steps_on_the_gpu():
    """However late the host reads them, as where launching takes longer than the step."""
    x = torch.randn(4096, 4096, device="cuda")
    first = Figures(x.sum())
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(50):
        x = x @ x / 64
    end.record()
    second = Figures(x.sum())
    second.read()
    time.sleep(0.5)
    first.read()
    assert second.ms_since(first) == pytest.approx(begin.elapsed_time(end), rel=0.2)
    assert second.ms_since(None) is None
