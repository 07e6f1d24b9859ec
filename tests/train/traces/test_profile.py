"""A profiled run, and what watching a step may not change."""

import errno
import gzip
import json

import pytest
import torch

import stepgraph
from stepgraph import cli
from stepgraph.inspect.account.page import read_page
from stepgraph.train.traces.profile import StepProfile


@pytest.fixture(scope="module")
def profiled(trainer, tmp_path_factory):
    """The folder of a run of six steps, two microbatches each, of which the fourth and fifth are profiled."""
    folder = tmp_path_factory.mktemp("profiled") / "run"
    short = ("--steps", 6, "--val-every", 0, "--checkpoint-every", 0, "--val-batches", 1, "--passes", "exact")
    process = trainer.start("--out", folder, *short, "--accumulate", 2, "--profile", "4:6")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "warning" not in printed, printed
    return folder


def test_the_page_has_measured_times(profiled):
    account = read_page(profiled / "page.html")
    summary = json.loads((profiled / "summary.json").read_text())
    measured = account["head"]["measured"]
    # The third step alone: the first two warm up, and a profile makes its steps and those next to them slower.
    assert measured["step_ms"] is None or measured["step_ms"] == summary["step_ms_median"]
    assert account["head"]["device"].startswith("CPU") and account["head"]["forecast"].keys() == {"peak_bytes"}
    records = [json.loads(line) for line in (profiled / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "val_loss", "tokens_per_s"):
        assert account["curves"][name] == [[r["step"], r[name]] for r in records if name in r]
    assert account["curves"]["loss"][-1] == [6, measured["loss"]]
    profile = account["profile"]
    assert profile["steps"] == [4, 6] and profile["on"] == "CPU"
    graphs = {graph["name"]: graph["nodes"] for graph in account["graphs"]}
    assert set(graphs) == {"microbatch", "update"}
    for key, found in profile["nodes"].items():
        name, _, node = key.partition("/")
        assert node in graphs[name]["name"] and found["ns"] >= 0 and found["of"] == 1
    for name, nodes in graphs.items():
        ran = [n for n, phase in zip(nodes["name"], nodes["phase"], strict=True) if account["phases"][phase] in
               ("forward", "loss", "backward", "optimizer")]  # fmt: skip
        assert {f"{name}/{n}" for n in ran} <= set(profile["nodes"])


def test_the_trace_names_nodes_and_modules(profiled):
    events = json.loads(gzip.decompress((profiled / "trace.json.gz").read_bytes()))["traceEvents"]
    ranges = [e["name"] for e in events if str(e.get("name", "")).startswith("stepgraph:")]
    # Two microbatches a step, two steps.
    assert sum(name.startswith("stepgraph:microbatch/mm|") for name in ranges) in (4, 8)  # once or on two lines
    assert any("|layers.1.mlp" in name for name in ranges)


def test_a_trace_that_cannot_be_written_or_is_of_steps_that_are_done(trainer, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(StepProfile, "_write", full)
        short = ("--steps", 6, "--val-every", 0, "--checkpoint-every", 0, "--val-batches", 1)
        assert trainer.here("--out", run, *short, "--profile", "3:4") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert trainer.resume(run, "--profile", "4:6") == 0
    said = "warning: --profile 4:6 is left out: after step 3, 6 is the first that can be profiled"
    assert said in capsys.readouterr().out and not (run / "trace.json.gz").exists()


def test_watching_changes_no_bit():
    losses = []
    for watch in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(6, 4)
        step = stepgraph.capture(model, lambda m, x: m(x).square().mean(), batch, optimizer, passes="exact")
        seen = []
        step(batch)
        if watch:
            with step.watched(lambda graph, node, seen=seen: seen.append((graph, node.name))):
                losses.append(step(batch))
            names = [n.name for n in step.graph.graph.nodes if n.op == "call_function"]
            assert seen == [("step", name) for name in names]
        else:
            losses.append(step(batch))
        count = len(seen)
        losses.append(step(batch))
        assert len(seen) == count
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--profile", "10"),
            "profile=10 is not a range of steps from 3 or later: write 10:13 for 10, 11 and 12",
        ),
        (
            ("--profile", "2:4"),
            "profile=2:4 is not a range of steps from 3 or later: write 10:13 for 10, 11 and 12",
        ),
        (
            ("--profile", "5:5"),
            "profile=5:5 is not a range of steps from 3 or later: write 10:13 for 10, 11 and 12",
        ),
        (("--profile", "10:14"), "profile=10:14 goes beyond steps=12: use earlier steps"),
        (("--memory-snapshot",), "memory_snapshot records a GPU's allocations and device=cpu: drop one of them"),
    ],
)
def test_errors_of_use_are_one_line(words, message, trainer, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(trainer.arguments(*words))
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"
