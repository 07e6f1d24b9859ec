"""``stepgraph bench step`` with real processes on a tiny model, and its record."""

import dataclasses
import importlib.metadata
import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch

import stepgraph
from stepgraph import bench
from stepgraph.bench import results
from stepgraph.bench.harness import LEARNING_RATE, EagerStep
from stepgraph.bench.model import child as model_child
from stepgraph.bench.rows import Row
from stepgraph.bench.step import child
from stepgraph.bench.step import command as step
from stepgraph.passes import StepOptions
from stepgraph.passes.options import check_step
from tests import forked

SIZES = {
    "model.dim": 32,
    "model.n-layers": 2,
    "model.n-heads": 4,
    "model.n-kv-heads": 2,
    "model.ffn-dim": 64,
    "model.vocab-size": 64,
    "batch-size": 2,
    "seq-len": 32,
    "steps": 2,
    "repeats": 2,
    "device": "cpu",
}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A run with a provider that is right, one that is wrong and one that fails: exit status, its record, its path."""
    path = tmp_path_factory.mktemp("bench") / "step.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "CHILD", [forked.python(), str(Path(__file__).parent / "wrong_child.py")])
        patch.setitem(step.PROVIDERS, "wrong", None)
        names = "eager,wrong,compile,stepgraph-exact"
        status = bench.main(["step", "llama3-debug", *TINY, "--providers", names, "--json", str(path)])
    return status, json.loads(path.read_text()), path


def rows_of(record):
    return {row["provider"]: row for row in record[1]["rows"]}


def test_the_record_holds_every_figure(record):
    settings, rows = record[1]["settings"], rows_of(record)
    assert list(rows) == settings["providers"] == ["eager", "wrong", "compile", "stepgraph-exact"]
    assert settings["models"]["llama3-debug"]["batch_size"] == 2
    assert record[1]["environment"]["versions"]["torch"] == importlib.metadata.version("torch")
    for row in rows.values():
        assert set(row) == {field.name for field in dataclasses.fields(Row)}
    for name in ("eager", "stepgraph-exact"):
        row = rows[name]
        assert row["error"] is row["disagreement"] is None
        assert len(row["step_ms_all"]) == 2 and len(row["losses"]) == child.FIRST_STEPS
        assert row["step_ms"] == pytest.approx(sum(row["step_ms_all"]) / 2)
        assert row["tokens_per_s"] == pytest.approx(2 * 32 / (row["step_ms"] / 1000))
        assert row["loss"] == row["losses"][0] == pytest.approx(math.log(64), rel=0.05)  # knows nothing of 64 tokens
        assert row["losses"][-1] < row["losses"][0]
        assert row["first_step_s"] > 0 and row["peak_mem_gib"] > 0 and row["step_mem_gib"] > 0
        assert row["host_ms"] is None  # CUDA only
        assert row["versions"]["torch"] == importlib.metadata.version("torch")
    # fp32: 24 bits, of which a few updates lose some; what is trained wrongly is beyond all of it (see below).
    # On some CPUs the losses of this tiny model do not move at all.
    assert 0 <= max(rows["eager"]["spread"]) < 1e-5 and len(rows["eager"]["spread"]) == child.FIRST_STEPS
    assert rows["stepgraph-exact"]["spread"] is None
    assert rows["eager"]["capture_s"] is rows["eager"]["compile_s"] is None
    assert 0 < rows["stepgraph-exact"]["capture_s"] <= rows["stepgraph-exact"]["first_step_s"]


def test_the_exact_pipeline_has_eagers_losses_bit_for_bit(record):
    rows = rows_of(record)
    assert rows["stepgraph-exact"]["losses"] == rows["eager"]["losses"]


def test_a_provider_that_trains_something_else_is_named(record):
    rows = rows_of(record)
    assert record[0] == 1
    assert "wrong: the loss of step 2 is" in rows["wrong"]["disagreement"]  # step 1 precedes the first update
    assert rows["wrong"]["step_ms"] > 0  # measured all the same
    assert rows["wrong"]["disagreement"] in record[1]["settings"]["models"]["llama3-debug"]["losses"]


def test_a_provider_that_fails_has_a_row_and_the_others_go_on(record):
    row = rows_of(record)["compile"]
    assert "C++ compiler" in row["error"] and "no-such-compiler" in row["error"] and "\n" not in row["error"]
    assert row["step_ms"] is None and row["step_ms_all"] == []


def test_report_prints_the_tables(record, capsys):
    assert bench.main(["report", str(record[2])]) == 0
    shown = capsys.readouterr().out
    assert "### llama3-debug, batch 2 x 32, fp32" in shown
    assert "| compile         |  failed |" in shown and "- compile failed: " in shown


def test_a_gpu_record_keeps_the_providers_measured_before_an_interruption(tmp_path, monkeypatch):
    def measure(config, options, device):
        for name in options.providers.split(","):
            if name == "stepgraph":
                raise KeyboardInterrupt
            yield [Row(model=config.preset, provider=name, losses=[4.0])]

    monkeypatch.setattr(step, "pick_device", torch.device)
    monkeypatch.setattr(step, "measure", measure)
    path = tmp_path / "step.json"
    words = ["--providers", "eager,compile,stepgraph", "--device", "cuda", "--json", str(path)]
    with pytest.raises(KeyboardInterrupt):
        step.main(["llama3-debug", *words])
    assert [row.provider for row in results.read(path)[2]] == ["eager", "compile"]


def test_who_disagrees_is_told_by_eager_whenever_it_comes():
    rows = [Row(model="m", provider=name, losses=[loss]) for name, loss in (("wrong", 5.0), ("right", 4.0))]
    results.check_losses(rows, "fp32")
    rows.append(Row(model="m", provider="eager", losses=[4.0]))
    results.check_losses(rows, "fp32")
    assert [bool(row.disagreement) for row in rows] == [True, False, False]


@pytest.mark.long
def test_torch_compile_agrees_in_bf16(tmp_path):
    path = tmp_path / "step.json"
    names = "eager,compile"
    assert bench.main(["step", "golf", *TINY, "--model.n-layers=1", "--providers", names, "--json", str(path)]) == 0
    _, settings, rows = results.read(path)
    assert settings["models"]["golf"]["precision"] == "bf16"
    assert "losses agree with eager over 5 steps" in settings["models"]["golf"]["losses"]
    assert rows[1].compile_s > 0


def test_every_process_has_the_same_weights_and_batch():
    (config,), _ = step.parse_step(["golf", *TINY])
    one, two = (child.make_parts(config, torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert all(torch.equal(one.batch[name], two.batch[name]) for name in ("tokens", "targets"))
    assert {p.dtype for p in one.model.parameters()} == {torch.bfloat16}
    assert one.loss_fn(one.model, one.batch).dtype == torch.float32


def test_the_eager_step_is_the_textbook_loop():
    (config,), _ = step.parse_step(TINY)
    parts, reference = (child.make_parts(config, torch.device("cpu")) for _ in range(2))
    one_step = EagerStep(parts)
    optimizer = torch.optim.AdamW(reference.model.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        logits = reference.model(reference.batch["tokens"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), reference.batch["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(one_step(), loss.detach())


def test_a_provider_of_its_name_changes_one_option(monkeypatch):
    given = []
    monkeypatch.setattr(child, "CapturedStep", lambda parts, **options: given.append(options))
    child.PROVIDERS["stepgraph-fa4"](None)
    assert given == [{"attention": "fa4"}]
    check_step(dataclasses.replace(StepOptions(), **given[0]))


@pytest.mark.parametrize("providers", [child.PROVIDERS, model_child.PROVIDERS], ids=["step", "model"])
def test_every_provider_of_ours_has_options_that_passes_take(providers, monkeypatch):
    given = []
    monkeypatch.setattr(stepgraph, "capture", lambda *_, passes, **__: given.append(passes) or mock.Mock(report=[]))
    (config,), _ = step.parse_step(["llama3-debug", *TINY])
    parts = child.make_parts(config, torch.device("cpu"))
    ours = [name for name in providers if name.startswith("stepgraph")]
    for name in ours:
        providers[name](parts)
    assert len(given) == len(ours) and all(given)


def test_presets_bring_their_own_sizes():
    configs, options = step.parse_step(["golf", "llama3-1b", "llama3-debug", "--steps", "3"])
    assert [(config.preset, config.batch_size, config.seq_len, config.precision) for config in configs] == [
        ("golf", 32, 2048, "bf16"),
        ("llama3-1b", 4, 4096, "bf16"),
        ("llama3-debug", 8, 256, "fp32"),
    ]
    assert options.steps == 3 and {config.inductor for config in configs} == {"full"}
    assert options.providers.split(",") == ["eager", "compile", "compile-max-autotune", "stepgraph", "stepgraph-exact"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("stp", "unknown benchmark 'stp': did you mean 'step'?"),
        ("step gulf", "unknown preset 'gulf': did you mean 'golf'?"),
        ("step --providers eager,compil", "unknown provider 'compil': did you mean 'compile'?"),
        ("step --stepz 3", "unknown option --stepz: did you mean --steps?"),
        ("step --steps many", "--steps: 'many' is not a whole number"),
        ("step --steps 0", "steps=0 must be above 0"),
        ("step golf --batch-size 0", "batch_size=0 must be above 0"),
        ("step --device tpu", "--device: 'tpu' is not one of auto, cpu, cuda"),
        ("step --steps 3 golf", "unexpected 'golf': write stepgraph bench step [PRESET ...] [--option VALUE ...]"),
        ("step --seq-len 4096", "seq_len=4096 exceeds model.max_seq_len=2048"),
        ("step --json no/such/folder/x.json", "json=no/such/folder/x.json: the folder no/such/folder does not exist"),
        ("step golf llama3-debug --model.rope-theta 3", "unknown option --model.rope-theta"),
        ("report", "no record given: write stepgraph bench report FILE.json"),
        ("report no-such.json", "no-such.json cannot be read: No such file"),
        ("report pyproject.toml", "pyproject.toml is not a record of stepgraph bench step"),
    ],
)
def test_an_error_of_use_is_one_line(arguments, message, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(ValueError) as error:
        bench.main(arguments.split())
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
def test_compile_under_our_rules_and_autocast(tmp_path):
    path = tmp_path / "step.json"
    words = [
        *TINY,
        "--providers",
        "eager,compile-tuned",
        "--precision",
        "bf16-autocast",
        "--steps",
        "1",
        "--repeats",
        "1",
    ]
    assert bench.main(["step", "golf", *words, "--model.residual-scales", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["settings"]["models"]["golf"]["precision"] == "bf16-autocast"
    assert record["settings"]["models"]["golf"]["model"]["residual_scales"]
    for row in record["rows"]:
        assert row["error"] is row["disagreement"] is None
