"""What a run asks of its device."""

import re
import subprocess
import sys

import pytest
import torch

from stepgraph.cli import main
from stepgraph.config.device import device_of, taken_by_others
from stepgraph.config.train import TrainConfig
from stepgraph.models.llama3 import Llama3Config


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


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("n_layers = 1000000000", "the model does not fit: .*; lower dim=384 or n_layers=1000000000"),
        ("dim = 1000000008", "the model does not fit: .*; lower dim=1000000008 or n_layers="),
        ("dim = 1000000007", "n_heads=6 does not divide dim=1000000007; try n_heads=1"),
        ("n_layers = 1e9", "n_layers=1000000000.0 in a run's configuration must be int"),
    ],
)
def test_a_model_far_beyond_memory_is_one_line_before_anything_is_made(model, says, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f"preset = 'llama3-debug'\n[model]\n{model}\n")
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(tmp_path / "run.toml"), "--device", "cpu", "--out", str(tmp_path / "run")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and re.search(says, line) and not (tmp_path / "run").exists()


def test_the_memory_of_each_rank_counts():
    sizes = {"n_heads": 128, "n_kv_heads": 128, "ffn_dim": 1 << 16, "vocab_size": 1 << 10, "max_seq_len": 8}
    model = Llama3Config(dim=1 << 14, n_layers=2000, **sizes)
    with pytest.raises(ValueError, match=r"the model does not fit: .*GiB, the cpu device has"):
        device_of(TrainConfig(model=model, device="cpu"))
    with pytest.raises(ValueError, match="on each of 2 ranks, the cpu device has"):
        device_of(TrainConfig(model=model, device="cpu", mesh="fsdp=2"))
    many = TrainConfig(model=model, device="cpu", mesh="fsdp=4096")
    assert device_of(many).type == "cpu"


@pytest.mark.parametrize(
    ("free", "own", "said"), [(1, 2, "; other processes hold 77.0 GiB of it: end them"), (8, 70, "")]
)
def test_memory_that_other_processes_hold_is_named(free, own, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own << 30)
    assert taken_by_others(torch.device("cuda")) == said and taken_by_others(torch.device("cpu")) == ""
