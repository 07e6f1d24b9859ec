"""What a run asks of its device."""

import subprocess
import sys

import pytest
import torch

from stepgraph.config.device import device_of
from stepgraph.config.train import TrainConfig


def test_peak_memory_is_this_processs_and_counts_what_was_given_back():
    code = (
        "import torch; from stepgraph.config.device import peak_mem_gib; cpu = torch.device('cpu')\n"
        "before = peak_mem_gib(cpu); block = torch.ones(2**26); del block; print(before, peak_mem_gib(cpu))"
    )
    ballast = torch.ones(2**28)  # 1 GiB, which getrusage would report as the peak of the process started here
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    del ballast
    before, after = map(float, shown.split())
    assert 0.05 < before < 1
    assert after - before == pytest.approx(0.25, abs=0.1)


def test_where_there_is_no_gpu_its_allocations_are_not_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(TrainConfig()).type == "cpu"
    with pytest.raises(ValueError, match=r"^memory_snapshot records a GPU's allocations and torch sees no GPU here: "):
        device_of(TrainConfig(memory_snapshot=True))
