"""The run folder: what a run writes, when it reaches the disk, and what a resume drops."""

import errno
import json
import math
import os
import re
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stepgraph.config.environment import environment
from stepgraph.config.train import TrainConfig
from stepgraph.errors import write_text
from stepgraph.inspect.account.page import write_page
from stepgraph.train.records import folder
from stepgraph.train.records.folder import RunFolder, Summary, read_metrics, status_of


def summary(**changes):
    figures = {
        "status": "finished",
        "preset": "llama3-debug",
        "params": 6_000_000,
        "steps": 2,
        "tokens": 4096,
        "skipped_steps": 0,
        "repeated_steps": 0,
        "train_loss_nats": 2.0,
        "val_loss_nats": 2.5,
        "tokens_per_s": 2000.0,
        "step_ms_median": 1000.0,
        "mfu": None,
        "bubble": None,
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
    folder.write("environment.json", environment())
    folder.write("passes.txt", "1. clean-up")
    folder.write("passes.json", [{"name": "clean-up", "seconds": 0.1}])
    folder.write("graph.txt", "graph")
    for step in range(1, 5):
        folder.log(step, loss=5.0 - step, grad_norm=1.0, mfu=None)
    folder.log(4, val_loss=1.5)
    folder.write_summary(summary())
    folder.close()

    assert sorted(path.name for path in folder.path.iterdir()) == [
        *("config.json", "environment.json", "graph.txt", "lock", "metrics.jsonl"),
        *("passes.json", "passes.txt", "summary.json", "tb"),
    ]
    assert TrainConfig.from_json((folder.path / "config.json").read_text()) == TrainConfig()
    assert json.loads((folder.path / "passes.json").read_text())[0]["name"] == "clean-up"
    assert json.loads((folder.path / "summary.json").read_text())["val_loss_nats"] == 2.5
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

    time.sleep(1.1)  # event files are read in the order of the second that they were made in, then by a counter's text
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
    for line in (b"[1]", b"{}", b'{"step": "3"}', b"5", b"null"):
        file.write_bytes(b'{"step": 1}\n' + line)
        with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 has no step: repair or delete"):
            read_metrics(file)
    file.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(file)
    file.write_bytes(b'{"step": 1}\n\0\0\0')
    assert read_metrics(file) == [{"step": 1}]


def test_a_damaged_summary_is_no_end(tmp_path):
    file = tmp_path / "summary.json"
    assert status_of(file.parent) is None
    for content, finished in [(b"{", False), (b"[]", False), (b"{}", False), (b"\xff\xfe", False),
                              (b'{"status": "failed"}', False), (b'{"status": "finished"}', True)]:  # fmt: skip
        file.write_bytes(content)
        assert (status_of(file.parent) == "finished") == finished
    assert status_of(tmp_path / "none") is None


def test_json_stays_strict_when_a_loss_is_not_finite(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log(1, loss=math.nan, grad_norm=math.inf)
    folder.write_summary(summary(status="failed", train_loss_nats=math.nan, error="loss is nan at step 1"))
    folder.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None}]
    written = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert written["train_loss_nats"] is None


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_summary(summary(steps=1))

    def crash(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.write_summary(summary(steps=2))
    folder.close()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path, monkeypatch):
    """Which would take the room that a checkpoint needs."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a.json", "whole")
    monkeypatch.setattr(Path, "replace", lambda *_: full(0))
    with pytest.raises(OSError, match="No space left"):
        write_page(tmp_path / "page.html", {"head": {"title": "a", "mesh": ""}})
    assert not list(tmp_path.iterdir())


def test_every_summary_key_is_documented():
    source = Path(folder.__file__).read_text(encoding="utf-8")
    for key in Summary.__dataclass_fields__:
        assert re.search(rf'^    {key}: .*\n    """.+', source, re.MULTILINE), key
