"""The run folder, the progress line, and the figures in both."""

import io
import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stepgraph.config.environment import environment, git_state
from stepgraph.config.train import TrainConfig
from stepgraph.costs import hardware
from stepgraph.train.records import metrics
from stepgraph.train.records.metrics import Progress, RunFolder, Summary, format_progress, read_metrics
from stepgraph.train.records.plot import running_mean

FIGURES = {"loss": 4.12341, "grad_norm": 0.968, "step_ms": 117.6, "tokens_per_s": 139_200.0, "mem_gib": 48.87}


def summary(**changes):
    figures = {
        "status": "finished",
        "preset": "llama3-debug",
        "params": 6_000_000,
        "steps": 2,
        "tokens": 4096,
        "train_loss_nats": 2.0,
        "val_loss_nats": 2.5,
        "unigram_entropy_nats": 3.2,
        "tokens_per_s": 2000.0,
        "step_ms_median": 1000.0,
        "mfu": None,
        "capture_s": 1.0,
        "compile_s": 2.0,
        "peak_mem_gib": 0.5,
        "wall_s": 9.0,
        "versions": {"torch": "2.13.0"},
    }
    return Summary(**figures | changes)


def test_a_run_leaves_its_files(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    folder.write_config(TrainConfig())
    folder.write_environment(environment())
    folder.write_passes("1. clean-up", [{"name": "clean-up", "seconds": 0.1}])
    folder.write_graph("graph")
    for step in range(1, 5):
        folder.log(step, loss=5.0 - step, grad_norm=1.0, mfu=None)
    folder.log(4, val_loss=1.5)
    folder.write_summary(summary())
    folder.draw_loss(3.2)
    folder.close()

    assert sorted(path.name for path in folder.path.iterdir()) == [
        *("config.json", "environment.json", "graph.txt", "loss.png", "metrics.jsonl"),
        *("passes.json", "passes.txt", "summary.json", "tb"),
    ]
    assert TrainConfig.from_json((folder.path / "config.json").read_text()) == TrainConfig()
    assert json.loads((folder.path / "passes.json").read_text())[0]["name"] == "clean-up"
    assert json.loads((folder.path / "summary.json").read_text())["val_loss_nats"] == 2.5
    assert (folder.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(folder.path / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 4), (2, 3), (3, 2), (4, 1)]
    assert [(event.step, event.value) for event in events.Scalars("val/loss")] == [(4, 1.5)]
    assert "train/mfu" not in events.Tags()["scalars"]


def test_records_reach_the_file_at_once(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.log(1, loss=2.0)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    folder.close()


def test_a_folder_with_anything_in_it_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty: .*--resume") as error:
        RunFolder(tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(tmp_path / "notes.txt")


def test_a_resumed_run_drops_the_steps_it_repeats(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(1, 8):
        folder.log(step, loss=float(step))
    folder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # killed in the middle of a line

    resumed = RunFolder(tmp_path, resume_step=5)
    resumed.log(6, loss=60.0)
    resumed.close()
    losses = [(record["step"], record["loss"]) for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 60.0)]
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == losses


def test_a_damaged_line_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(file)


def test_json_stays_strict_when_a_loss_is_not_finite(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log(1, loss=math.nan, grad_norm=math.inf)
    folder.write_summary(summary(status="failed", train_loss_nats=math.nan, error="loss is nan at step 1"))
    folder.draw_loss(None)
    folder.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None}]
    written = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert written["train_loss_nats"] is None


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_summary(summary(steps=1))

    def crash(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.write_summary(summary(steps=2))
    folder.close()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


def test_every_summary_key_is_documented():
    source = Path(metrics.__file__).read_text(encoding="utf-8")
    for key in Summary.__dataclass_fields__:
        assert re.search(rf'^    {key}: .*\n    """.+', source, re.MULTILINE), key


def test_the_progress_line():
    line = format_progress(20, 1000, **FIGURES, mfu=0.412, eta_s=115)
    assert line == (
        "step 20/1000 | loss 4.1234 | grad_norm 0.97 | 118 ms | 139k tok/s | mfu 41% | mem 48.9 GiB | eta 1.9m"
    )
    assert format_progress(20, 1000, **FIGURES, eta_s=115) == line.replace(" | mfu 41%", "")


@pytest.mark.parametrize(
    ("step_ms", "tokens_per_s", "eta_s", "shown"),
    [
        (3.14159, 812.4, 0.2, "3.14 ms | 812 tok/s | mem 48.9 GiB | eta 0s"),
        (42.06, 1840.0, 45.0, "42.1 ms | 1.84k tok/s | mem 48.9 GiB | eta 45s"),
        (99.96, 99_960.0, 59.9, "100 ms | 100k tok/s | mem 48.9 GiB | eta 1.0m"),
        (12_345.6, 1_234_000.0, 3600 * 5.26, "12346 ms | 1.23M tok/s | mem 48.9 GiB | eta 5.3h"),
        (999.7, 999_700.0, 86400 * 2.5, "1000 ms | 1.00M tok/s | mem 48.9 GiB | eta 2.5d"),
    ],
)
def test_the_progress_line_scales_its_units(step_ms, tokens_per_s, eta_s, shown):
    figures = FIGURES | {"step_ms": step_ms, "tokens_per_s": tokens_per_s}
    assert format_progress(1, 2, **figures, eta_s=eta_s).endswith(shown)


def test_progress_is_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with Progress(100, start_step=8, console=Console(file=out, width=40)) as progress:
        progress.update(9, **FIGURES)
        progress.note("[val] step 9 | val_loss 4.2")
        progress.update(10, **FIGURES)
    first, note, second = out.getvalue().splitlines()
    assert first.startswith("step 9/100 | loss 4.1234 |") and first.endswith("| eta 11s")
    assert note == "[val] step 9 | val_loss 4.2"
    assert second.startswith("step 10/100 |")
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(("width", "bar"), [(160, True), (80, False)])
def test_progress_is_one_live_line_on_a_terminal(width, bar):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, legacy_windows=False, _environ={"TERM": "xterm"})
    with Progress(100, console=console) as progress:
        for step in (1, 2, 3):
            progress.update(step, **FIGURES)
        progress.note("validation")
    assert "step 3/100" in out.getvalue() and "\x1b[2K" in out.getvalue()  # the line is cleared and written again
    assert out.getvalue().count("validation") == 1
    assert ("━" in out.getvalue()) == bar
    assert "eta 1" in out.getvalue()  # nothing is cut off


def test_the_time_left_is_the_wall_clocks(monkeypatch):
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with Progress(10, console=Console(file=out)) as progress:
        progress.update(1, **FIGURES | {"step_ms": 1000.0})  # no second reading yet: nine steps of one second
        progress.update(3, **FIGURES | {"step_ms": 1000.0})  # two steps took four seconds: seven more take 14
    assert [line.rsplit("| ", 1)[1] for line in out.getvalue().splitlines()] == ["eta 9s", "eta 14s"]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peaks_of_known_devices(name, tflops):
    assert hardware.peak_flops(name, torch.bfloat16) == tflops * 1e12
    assert hardware.peak_flops(name, torch.float32) is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NVIDIA H20",
            "NVIDIA GB200",
            "NVIDIA L40",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
        ),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "cpu", ""),
    ],
)
def test_a_device_that_only_resembles_a_known_one_has_no_peak(name):
    assert hardware.peak_flops(name, torch.bfloat16) is None


def test_mfu_is_the_share_of_the_peak():
    assert hardware.mfu(10_000.0, 6 * 8e9, 989.5e12) == pytest.approx(0.4851, abs=1e-4)
    assert hardware.mfu(10_000.0, 6 * 8e9, None) is None


def test_peak_memory_is_this_processs_and_counts_what_was_given_back():
    code = (
        "import torch; from stepgraph.train.metrics import peak_mem_gib; cpu = torch.device('cpu')\n"
        "before = peak_mem_gib(cpu); block = torch.ones(2**26); del block; print(before, peak_mem_gib(cpu))"
    )
    ballast = torch.ones(2**28)  # 1 GiB, which getrusage would report as the peak of the process started here
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    del ballast
    before, after = map(float, shown.split())
    assert 0.05 < before < 1
    assert after - before == pytest.approx(0.25, abs=0.1)


def test_the_running_mean_does_not_lag():
    values = [100.0 - step for step in range(300)]
    assert running_mean(values) == pytest.approx(values)
    noisy = [value + (5 if step % 2 else -5) for step, value in enumerate(values)]
    errors = [abs(mean - value) for mean, value in zip(running_mean(noisy), values, strict=True)]
    assert max(errors[20:-20]) < 1
    assert running_mean([]) == [] and running_mean([3.0]) == [3.0]


def test_the_environment_names_no_machine():
    found = environment()
    text = json.dumps(found)
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu_count"] >= 1
    assert socket.gethostname() not in re.split(r"[^\w.-]+", text)
    assert str(Path(metrics.__file__).parent) not in text and str(Path.home()) + "/" not in text


def test_the_state_of_a_git_checkout(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@t")
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
