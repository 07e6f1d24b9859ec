"""``stepgraph bench train`` with real ranks on a tiny model, and its record."""

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import time
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from stepgraph import bench
from stepgraph.bench.harness import random_batch
from stepgraph.bench.train import command as train
from stepgraph.bench.train.providers import Provider, balance
from stepgraph.bench.train.results import TrainRow, check_losses, ratio, summary, train_section
from stepgraph.models.moe import MoE, MoEConfig
from tests import forked
from tests.bench.step.test_step import SIZES as STEP_SIZES

SIZES = {name: value for name, value in STEP_SIZES.items() if name != "repeats"}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A run over two ranks with a provider that is right, one that is wrong, one that fails and one that is not there:
    exit status, its record, its path, what it printed meanwhile."""
    path = tmp_path_factory.mktemp("bench") / "train.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHON_EXEC", forked.python())  # what torchrun starts ranks with
        patch.setattr(train, "RANK", [str(Path(__file__).parent / "wrong_rank.py")])
        patch.setitem(train.PROVIDERS, "wrong", Provider(None))
        patch.setitem(train.PROVIDERS, "breaks", Provider(None))
        patch.setitem(train.PROVIDERS, "hangs", Provider(None))
        names = "stepgraph,wrong,breaks,hangs,torchtitan"
        words = [*TINY, "--mesh", "fsdp=2", "--first-step-timeout", "12", "--providers", names, "--json", str(path)]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            status = bench.main(["train", "llama3-debug", *words])
    return status, json.loads(path.read_text()), path, said.getvalue()


def rows_of(record):
    return {row["provider"]: row for row in record[1]["rows"]}


@pytest.mark.slow
def test_the_record_holds_every_figure(record):
    settings, rows = record[1]["settings"], rows_of(record)
    assert list(rows) == settings["providers"] == ["stepgraph", "wrong", "breaks", "hangs", "torchtitan"]
    assert settings["benchmark"] == "train" and settings["ranks"] == 2
    chosen = settings["models"]["llama3-debug"]
    assert chosen["mesh"] == "fsdp=2" and chosen["batch_size"] == 2 and chosen["memory"] == "none"
    for row in rows.values():
        assert set(row) == {field.name for field in dataclasses.fields(TrainRow)}
    row = rows["stepgraph"]
    assert row["error"] is row["disagreement"] is row["unavailable"] is None
    assert len(row["step_ms_all"]) == 2 and len(row["rank_step_ms"]) == 2
    assert row["step_ms"] == pytest.approx(sum(row["step_ms_all"]) / 2)
    assert row["step_ms"] >= max(row["rank_step_ms"]) or row["step_ms"] == pytest.approx(max(row["rank_step_ms"]))
    assert row["tokens_per_s_per_gpu"] == pytest.approx(2 * 32 / (row["step_ms"] / 1000))  # a rank reads its own
    assert row["losses"][0] == pytest.approx(math.log(64), rel=0.05) and row["losses"][1] < row["losses"][0]
    assert row["steps_taken"] == 1 + settings["warmup_steps"] + settings["steps"] + 1
    assert min(row["start_s"], row["build_s"], row["capture_s"]) > 0
    assert row["start_s"] + row["build_s"] + row["capture_s"] < row["first_step_s"]
    assert row["peak_mem_gib"] > 0 and row["versions"]["torch"] == importlib.metadata.version("torch")
    assert any("bucket_collectives" in line for line in row["passes"]) and rows["wrong"]["passes"]
    of_gpus = ("mfu", "host_ms", "peak_reserved_gib", "exposure", "kernels_ms")
    assert all(row[name] is None for name in of_gpus)


@pytest.mark.slow
def test_it_prints_what_it_does(record):
    lines = record[3].splitlines()
    printed = [line.split(" | ")[2].partition(" (")[0] for line in lines if line.startswith("llama3-debug | stepgraph")]
    assert printed[0] == "start" and printed[-1].startswith("first step after ")
    # The rank that failed: its own last lines, and not torchrun's.
    assert "    Tried to allocate everything" in lines and "ChildFailedError" not in record[3]


@pytest.mark.slow
def test_a_provider_that_trains_something_else_is_named(record):
    rows = rows_of(record)
    assert record[0] == 1
    assert "wrong: the last loss is" in rows["wrong"]["disagreement"]  # the first precedes any update
    assert rows["wrong"]["step_ms"] > 0  # measured all the same
    assert rows["wrong"]["disagreement"] in record[1]["settings"]["models"]["llama3-debug"]["losses"]


@pytest.mark.slow
def test_a_rank_that_fails_ends_its_provider_and_is_named(record):
    row = rows_of(record)["breaks"]
    assert row["error"] == "rank 1: RuntimeError: CUDA out of memory. Tried to allocate everything"
    assert row["step_ms"] is None


@pytest.mark.slow
def test_a_provider_that_hangs_ends_and_says_where_it_waits(record):
    """Long before --timeout; and the next provider follows."""
    error = rows_of(record)["hangs"]["error"]
    assert "step 1 made no progress for " in error and "(--first-step-timeout 12)" in error
    assert "rank 0" in error and "rank 1" in error and " is in step 1" in error


@pytest.mark.slow
def test_a_provider_that_is_not_there_is_said_aloud(record, capsys):
    assert rows_of(record)["torchtitan"]["unavailable"]
    assert bench.main(["report", str(record[2])]) == 0
    shown = capsys.readouterr().out
    assert "### llama3-debug, fsdp=2, batch 2 x 32 per data-parallel rank, fp32" in shown
    assert "- breaks failed: rank 1: RuntimeError" in shown and "- torchtitan: " in shown
    assert shown.rstrip().splitlines()[-1].startswith("stepgraph / torchtitan: no ratio, torchtitan: ")


@pytest.mark.long
def test_one_rank_in_bf16(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train.json"
    words = [*TINY, "--mesh", "fsdp=1", "--providers", "stepgraph", "--precision", "bf16", "--memory", "full"]
    assert bench.main(["train", *words, "--json", str(path)]) == 0
    _, settings, (row,) = bench.results.read(path)
    assert settings["models"]["llama3-debug"]["losses"] == "no two providers ran: no losses to compare"
    assert row.error is None and row.losses[1] < row.losses[0] and len(row.rank_step_ms) == 1


@pytest.mark.long
def test_async_tensor_parallelism_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train.json"
    words = [*TINY, "--mesh", "tp=2", "--providers", "stepgraph", "--async-tp", "--inductor", "off"]
    assert bench.main(["train", *words, "--json", str(path)]) == 0
    _, settings, (row,) = bench.results.read(path)
    assert settings["models"]["llama3-debug"]["async_tp"] is True
    assert any(". async_tensor_parallel" in line for line in row.passes)


@pytest.mark.slow
def test_ranks_that_take_too_long_are_ended(tmp_path, monkeypatch):
    script = tmp_path / "sleeps.py"
    touch = "pathlib.Path(__file__).with_name(f'pid-{os.getpid()}').touch()"
    script.write_text(f"import os, pathlib, time\n{touch}\ntime.sleep(500)\n")
    monkeypatch.setattr(train, "RANK", [str(script)])
    there = lambda: len(list(tmp_path.glob("pid-*"))) == 2  # noqa: E731
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6 * there(), time=time.time)
    monkeypatch.setattr(train, "time", clock)  # the time is over when both ranks are there
    config, options = train.parse_train([*TINY, "--mesh", "fsdp=2", "--timeout", "3000"])
    row = train.measure("stepgraph", config, options, torch.device("cpu"), None)
    assert row.error == "not finished after 3000 s" and row.step_ms is None
    started = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(started) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_data_parallel_ranks_have_batches_of_their_own():
    config, _ = train.parse_train(TINY)
    one, two = random_batch(config, 0), random_batch(config, 1)
    assert one["tokens"].shape == (2, 32) and not torch.equal(one["tokens"], two["tokens"])
    assert torch.equal(one["tokens"], random_batch(config, 0)["tokens"])


def test_microbatches_are_rows_of_one_batch():
    config, _ = train.parse_train([*TINY, "--accumulate", "3"])
    assert random_batch(config)["targets"].shape == (6, 32) and config.tokens_per_step == 6 * 32


def test_a_bench_of_experts_can_balance_them():
    shape = MoEConfig(n_experts=8, top_k=2, ffn_dim=4, selection_bias=True)
    layer = MoE(16, shape)
    nn.init.normal_(layer.router.weight)
    balance(layer)
    x = torch.randn(2, 12, 16)
    chosen, weights = layer.router(x.flatten(0, 1))
    assert torch.equal(chosen.flatten().bincount(), torch.full((8,), 6)) and weights.shape == (24, 2)
    scores = (x.flatten(0, 1) @ layer.router.weight.T).softmax(-1).gather(1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("deepseek-v3-debug", "--mesh fsdp=2,ep=2 --balanced-routing"),
        ("llama3-debug", "--mesh pp=2 --accumulate 4 --pipeline interleaved"),
    ],
)
def test_experts_and_pipelines_can_be_measured(preset, words, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train.json"
    sizes = ["--model.n-layers=4", "--batch-size=2", "--seq-len=32", "--steps=2", "--device=cpu"]
    assert bench.main(["train", preset, *sizes, *words.split(), "--providers", "stepgraph", "--json", str(path)]) == 0
    _, settings, (row,) = bench.results.read(path)
    assert row.error is None and row.losses[1] < row.losses[0]
    title = train_section(preset, {"cpu": "CPU"} | json.loads(path.read_text())["environment"], settings, [row])
    assert ("balanced routing" if "ep" in words else "pipeline interleaved") in title.splitlines()[0]


def test_presets_bring_their_own_sizes():
    config, _ = train.parse_train(["llama3-8b", "--mesh", "fsdp=2,tp=2"])
    assert (config.seq_len, config.batch_size, config.precision, config.memory) == (8192, 1, "bf16", "none")
    assert config.tokens_per_step == 2 * 8192 and config.mesh_spec.size == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train llama3-9b", "unknown preset 'llama3-9b': did you mean 'llama3-8b'?"),
        ("train --providers stepgraph,torchtita", "unknown provider 'torchtita': did you mean 'torchtitan'?"),
        ("train --mesh fsd=2", "unknown mesh axis 'fsd': did you mean 'fsdp'?"),
        ("train --mesh tp=4", "tp=4 does not divide n_heads=6; try tp=1"),
        ("train --steps 0", "steps=0 must be above 0"),
        ("train --timeout 0", "timeout=0.0 must be above 0"),
        ("train --precision bf16-autocast", "precision=bf16-autocast is not supported here"),
        ("train --json no/such/folder/x.json", "json=no/such/folder/x.json: the folder no/such/folder does not exist"),
        ("train --traces pyproject.toml", "traces=pyproject.toml cannot be a folder: File exists"),
        ("train --mesh pp=2", "accumulate=1 is too small for the schedule 1f1b on pp=2"),
        ("train --pipeline zbv", "pipeline=zbv needs pipeline stages"),
        ("train --expert-capacity 4", "expert_capacity=4.0 changes nothing: add ep=2 to --mesh"),
        ("train --balanced-routing", "balanced_routing needs experts and llama3-debug has none"),
    ],
)
def test_an_error_of_use_is_one_line(arguments, message):
    with pytest.raises(ValueError) as error:
        bench.main([*arguments.split(), "--device", "cpu"])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_it_starts_its_ranks_itself(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setitem(os.environ, name, "1")
    with pytest.raises(ValueError, match="bench train starts its ranks itself: call stepgraph bench train without"):
        bench.main(["train", "--device", "cpu"])


# -- tables and losses, on rows written by hand ----------------------------------------------------------------------

ENVIRONMENT = {
    "versions": {"torch": "2.11.0", "stepgraph": "0.1.0", "cuda": "13.0"},
    "gpus": ["NVIDIA H200"] * 4,
    "cpu": "",
    "torch_threads": 1,
}
SETTINGS = {
    **{"benchmark": "train", "device": "cuda", "ranks": 4, "steps": 20, "warmup_steps": 4, "traced_steps": 3},
    "models": {
        "llama3-8b": {
            **{"mesh": "fsdp=2,tp=2", "batch_size": 1, "seq_len": 8192, "precision": "bf16", "memory": "none"},
            **{"reshard": "auto", "losses": "losses agree"},
        }
    },
}


def row(provider, speed=None, **values):
    step_ms = 1e3 * 8192 / 2 / speed if speed else None
    times = [0.99 * step_ms, step_ms, 1.02 * step_ms] if speed else None
    return TrainRow(
        model="llama3-8b",
        provider=provider,
        step_ms=step_ms,
        step_ms_all=times,
        tokens_per_s_per_gpu=speed,
        **values,
    )


def test_the_table_of_gpus_and_the_ratio():
    exposed = {"window_ms": 400.0, "communication_ms": 100.0, "exposed_ms": 16.0, "idle_ms": 1.0, "share": 0.04}
    rows = [
        row("stepgraph", 10_200.0, mfu=0.598, peak_mem_gib=50.0, peak_reserved_gib=55.0, losses=[12.5, 11.0],
            exposure=exposed, exposure_all=[exposed, exposed], first_step_s=58.0, capture_s=20.0, compile_s=10.0,
            host_ms=2.5),
        row("torchtitan", 8_500.0, mfu=0.498, peak_mem_gib=55.0, peak_reserved_gib=60.0, first_step_s=60.0),
    ]  # fmt: skip
    lines = train_section("llama3-8b", ENVIRONMENT, SETTINGS, rows).splitlines()
    assert lines[0] == "### llama3-8b, fsdp=2,tp=2, batch 1 x 8192 per data-parallel rank, bf16"
    assert lines[2] == "4 x NVIDIA H200; torch 2.11.0, stepgraph 0.1.0, CUDA 13.0"
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0][3] == "tokens/s a GPU" and table[0][-4:] == ["MFU", "host ms", "reserved GiB", "exposed comm."]
    assert table[2][3] == "10,200" and table[2][-4:] == ["59.8%", "2.5", "55.00", "4.0%"]
    assert lines[-1] == "stepgraph / torchtitan: 1.200x tokens/s, 0.91x peak memory"
    assert ratio(rows) == pytest.approx(1.2)


def test_without_a_peer_there_is_no_ratio():
    missing = row("torchtitan", unavailable="not installed: pip install torchtitan==0.2.2")
    assert summary([row("stepgraph", 10.0), missing]) == (
        "stepgraph / torchtitan: no ratio, torchtitan: not installed: pip install torchtitan==0.2.2"
    )
    assert summary([row("stepgraph", 10.0)]).endswith("no ratio, torchtitan: was not asked for")
    failed = [row("stepgraph", error="rank 0: OutOfMemoryError"), row("torchtitan", 10.0)]
    assert summary(failed).endswith("no ratio, stepgraph: failed") and ratio(failed) is None


@pytest.mark.parametrize(
    ("losses", "finding"),
    [
        ([12.5, 11.0], None),
        ([12.51, 11.1], None),
        ([12.6, 11.0], "torchtitan: the first loss is 12.6, that of stepgraph 12.5: 8.0e-03 of the first apart"),
        ([12.5, 10.0], "torchtitan: the last loss is 10, that of stepgraph 11: 8.0e-02 of the first apart, tolerance"),
        ([12.5, None], "torchtitan: a loss is not finite"),
    ],
)
def test_losses_are_compared(losses, finding):
    rows = [row("stepgraph", 1.0, losses=[12.5, 11.0]), row("torchtitan", 1.0, losses=losses)]
    text = check_losses(rows, "bf16")
    if finding is None:
        assert rows[1].disagreement is None and text.startswith("losses agree")
    else:
        assert rows[1].disagreement.startswith(finding) and text == f"losses disagree: {rows[1].disagreement}"
    assert rows[0].disagreement is None


def test_what_is_left_of_a_loss_is_compared_by_the_first():
    rows = [row("stepgraph", 1.0, losses=[12.5, 0.0008]), row("torchtitan", 1.0, losses=[12.5, 0.0002])]
    assert check_losses(rows, "bf16").startswith("losses agree")


def test_a_loss_that_is_not_finite_is_no_reference():
    rows = [row("stepgraph", 1.0, losses=[None, None]), row("torchtitan", 1.0, losses=[12.5, 11.0])]
    assert check_losses(rows, "bf16") == "losses disagree: stepgraph: a loss is not finite"
    assert rows[1].disagreement is None
