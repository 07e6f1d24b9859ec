"""``stepgraph bench model`` with real processes on tiny models, its record, summary and refusals."""

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from stepgraph import bench
from stepgraph.bench.model import child, command, models
from stepgraph.bench.model.models import MODELS, TASKS, TINY, WHOLE
from stepgraph.bench.model.profile import Kernel, group_of, kind_of, where
from stepgraph.bench.model.table import ratios, summary, where_line
from stepgraph.bench.rows import Row, geometric_mean
from stepgraph.config.commands import ModelBench
from stepgraph.costs.hardware import GPUS, PRODUCTS_REACHED
from stepgraph.costs.roofline import limits, products_seconds
from tests import forked

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A run with providers that are right, wrong and unavailable: exit status, its record, its folder."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "CHILD", [forked.python(), str(Path(__file__).parent / "wrong_child.py")])
        patch.setitem(command.PROVIDERS, "wrong", None)
        words = ["--providers", "eager,wrong,liger,stepgraph-exact", "--together", "2"]
        words += ["--steps", "2", "--rounds", "2", "--device", "cpu"]
        places = ["--json", str(folder / "record.json"), "--profile", str(folder)]
        status = bench.main(["model", "gpt2-medium-debug", *words, *places])
    return status, json.loads((folder / "record.json").read_text()), folder


@pytest.fixture
def rows(record):
    return {row["provider"]: row for row in record[1]["rows"]}


def test_the_record_holds_every_figure(record, rows):
    settings = record[1]["settings"]
    assert list(rows) == settings["providers"]
    assert settings["models"]["gpt2-medium-debug"]["sizes"] == MODELS["gpt2-medium-debug"].sizes
    for name in ("eager", "stepgraph-exact"):
        row = rows[name]
        assert row["error"] is None and row["disagreement"] is None
        assert len(row["step_ms_all"]) == 2 and min(row["step_ms_all"]) <= row["step_ms"] <= max(row["step_ms_all"])
        assert row["per_s"] == pytest.approx(1000 * 2 * 32 / row["step_ms"])
        assert row["first_step_s"] > 0 and row["versions"]["transformers"] == transformers.__version__
    ours = rows["stepgraph-exact"]
    assert ours["losses"] == rows["eager"]["losses"] and ours["losses"][-1] < ours["losses"][0]
    assert ours["passes"] and ours["capture_s"] > 0


def test_a_wrong_provider_disagrees(record, rows):
    assert record[0] == 1
    assert "wrong: the loss of step" in rows["wrong"]["disagreement"]


def test_a_provider_that_cannot_do_a_model_is_no_failure(rows):
    installed = importlib.util.find_spec("liger_kernel") is not None
    reason = "Liger has no patches for gpt2" if installed else "liger-kernel is not installed: pip install liger-kernel"
    assert rows["liger"]["unavailable"] == reason and rows["liger"]["error"] is None


def test_the_profile_names_what_ran(record):
    text = (record[2] / "gpt2-medium-debug.stepgraph-exact.md").read_text()
    assert "products" in text and "aten::addmm" in text


def test_the_report_prints_the_record(record, capsys):
    path = str(record[2] / "record.json")
    assert bench.main(["report", path, path]) == 0
    said = capsys.readouterr().out
    assert said.count("| least gain") == 1  # one summary of both
    assert "### gpt2-medium-debug, batch 2 x 32, bf16" in said and "losses disagree: wrong" in said


@pytest.mark.parametrize("name", list({str(MODELS[name + TINY]): name for name in WHOLE}.values()))
def test_every_model_is_captured_and_has_the_bits_of_eager(name):
    """Loss and gradients come from the model's library alone; models of one tiny form are tested once."""
    parts = [child.parts_of(models.build(name + TINY, CPU), models.batch_of(name + TINY, CPU)) for _ in range(2)]
    start = [p.clone() for p in parts[0].model.parameters()]
    steps = [
        child.PROVIDERS[provider](those) for provider, those in zip(("eager", "stepgraph-exact"), parts, strict=True)
    ]
    losses = [[step().item() for _ in range(2)] for step in steps]
    assert losses[0] == losses[1] and math.isfinite(losses[0][1])
    after = [list(those.model.parameters()) for those in parts]
    assert all(map(torch.equal, *after))
    moved = {p.requires_grad for p, before in zip(after[0], start, strict=True) if not torch.equal(p, before)}
    assert moved == {True} and torch.bfloat16 in {p.dtype for p in after[0] if p.requires_grad}
    if TASKS[MODELS[name].task].auto_class and "mamba" not in name:
        assert parts[0].model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("qwen3-0.6b", 596),
        ("qwen3-1.7b", 1721),
        ("llama-3.2-1b", 1236),
        ("gemma3-1b", 1000),
        ("gpt2-medium", 356),  # 355 with 1,024 positions
        ("smollm3-3b", 3075),
        ("modernbert-base", 150),
        ("modernbert-large", 396),
        ("vit-l", 304),
        ("nanogpt-124m", 124),
        ("pythia-410m", 405),
        ("olmo2-1b", 1485),
        ("t5-base", 223),  # 248 with a head of its own, which transformers 5 ties
        ("whisper-small", 242),
        ("bert-large", 335),
        ("mamba2-130m", 129),
        ("mistral-7b-lora", 7290),  # 7,248 without the adapters
        ("qwen2-vl-2b", 2209),
        ("dit-l-2", 458),
    ],
)
def test_models_have_the_published_sizes(name, millions):
    model = models.build(name, torch.device("meta"))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_models_live_at_once_as_far_as_they_fit():
    names, two = ["qwen3-moe", "gpt2-medium", "qwen3-0.6b"], ["compile", "stepgraph"]
    pairs = [[(name, provider) for provider in two] for name in names]
    assert command.grouped(names, two, 2, 3, 1000) == [[*pairs[0], *pairs[1], *pairs[2]]]
    assert command.grouped(names, two, 2, 2, 1000) == [pairs[0] + pairs[1], pairs[2]]
    assert command.grouped(names, two, 2, 3, 79) == [pairs[0] + pairs[1], pairs[2]]  # (18 + 23) * 1.75 = 71.75
    assert command.grouped(names[:2], two, 1, 2, 1000) == [[(n, p) for n in names[:2]] for p in two]
    assert command.grouped(names[:1], ["eager", *two], 3, 1, 1) == [[(names[0], p) for p in ("eager", *two)]]


def test_who_ran_out_of_memory_among_others_is_measured_again_alone(monkeypatch):
    """As is who ran out alone: once."""
    groups = []

    def measured(lanes, *_):
        for group in lanes:
            groups.append([(lane.row.model, lane.row.provider) for lane in group])
            for lane in group:
                lane.row.error = "OutOfMemoryError: CUDA out of memory" if lane.row.provider == "compile" else None
                yield [lane.row]

    monkeypatch.setattr(command, "measured", measured)
    options = ModelBench(together=2, models_together=2)
    names = ["vit-l", "bert-large"]
    rows = [row for some in command.measure(names, options, ["compile", "eager"], CPU) for row in some]
    assert groups[1:] == [[(name, "compile")] for name in names]
    assert [(row.model, row.provider, bool(row.error)) for row in rows] == [
        (name, provider, provider == "compile") for provider in ("eager", "compile") for name in names
    ]


def test_all_names_every_model_of_its_authors_size():
    assert models.model_names(["vit-l", "all"]) == ["vit-l", *(name for name in WHOLE if name != "vit-l")]
    assert len({MODELS[name].config for name in WHOLE}) >= 16


def test_weights_and_batch_are_the_same_in_every_process():
    text = (
        "import torch; from stepgraph.bench.model import models as m; d = torch.device('cpu'); "
        "w = sum(p.double().abs().sum() for p in m.build('vit-l-debug', d).parameters()); "
        "print(w.item(), m.batch_of('vit-l-debug', d)['pixel_values'].double().sum().item())"
    )
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
    weights = sum(p.double().abs().sum() for p in models.build("vit-l-debug", CPU).parameters())
    assert [float(word) for word in said] == [
        weights.item(),
        models.batch_of("vit-l-debug", CPU)["pixel_values"].double().sum().item(),
    ]


def row(provider, step_ms, memory=10.0, first=10.0, **more):
    return Row(
        model="m", provider=provider, step_ms=step_ms, step_ms_all=[step_ms], peak_mem_gib=memory, first_step_s=first,
        **more,
    )  # fmt: skip


def test_ratios_are_over_the_best_of_the_others():
    rows = [row("eager", 40, 8), row("compile", 20, 12, 60), row("liger", 30, 6), row("stepgraph", 10, 9, 30)]
    found = ratios("m", [*rows, row("stepgraph-max-autotune", 5)])
    assert dataclasses.astuple(found) == ("m", "compile", 2.0, 1.5, 0.5, pytest.approx(39.97 / 39.99))


def test_who_failed_or_is_wrong_counts_for_nothing():
    rows = [row("eager", 40), row("compile", 5, disagreement="x"), row("liger", 5, error="x"), row("stepgraph", 20)]
    assert ratios("m", rows).speed == 2.0 and ratios("m", rows).first_step is None
    assert ratios("m", rows[:3]).speed is None
    assert "m: not compared" in summary([("m", rows[:3])])


def test_the_summary_ends_with_the_mean_and_the_least():
    rows = {
        name: [row("eager", 20, 8), row("stepgraph", ms, memory)] for name, ms, memory in (("a", 10, 4), ("b", 5, 12))
    }
    cells = [
        [*map(str.strip, line.split("|"))] for line in summary([*rows.items()]).splitlines() if line.count("|") > 3
    ]
    assert cells[-2][1:5] == ["geometric mean", "", "2.83x", "0.87x"]
    assert cells[-1][1:5] == ["least gain", "", "2.00x", "1.50x"]


def test_geometric_mean():
    assert geometric_mean([2.0, None, 0.5, 8.0]) == pytest.approx(2.0)
    assert geometric_mean([None]) is None


@pytest.mark.parametrize(
    ("name", "kind", "group"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"),
        ("triton_red_fused_add_mul_12", "reduction", "triton_red_fused_add_mul"),
        ("triton_red_fused_add_mul_rsqrt_1", "norm", "triton_red_fused_add_mul_rsqrt"),
        ("triton_poi_fused_add_div_mul_sqrt_1", "optimizer", "triton_poi_fused_add_div_mul_sqrt"),
        ("triton_per_fused_linalg_vector_norm_3", "optimizer", "triton_per_fused_linalg_vector_norm"),
        ("triton_tem_fused_flex_attention_2", "attention", "triton_tem_fused_flex_attention"),
        ("void pytorch_flash::flash_bwd_kernel<Traits<64> >", "attention", "pytorch_flash::flash_bwd_kernel"),
        ("Memcpy DtoD (Device -> Device)", "copies", "Memcpy DtoD (Device -> Device)"),
        ("backward_kernel", "norm", "backward_kernel"),
        ("_gradient_kernel", "loss", "_gradient_kernel"),
        ("_a_kernel_of_yours", "other", "_a_kernel_of_yours"),
    ],
)
def test_kernels_are_grouped(name, kind, group):
    assert (kind_of(name), group_of(name)) == (kind, group)


#: Three steps of 10 ms: a product of 6 ms, a copy that runs together with it for 2 ms of 3, and a norm of 1 ms.
KERNELS = [
    Kernel(name, 1e4 * step + 1e3 * start, 1e4 * step + 1e3 * end)
    for step in range(3)
    for name, start, end in (("nvjet_x", 0, 6), ("Memcpy DtoD", 4, 7), ("forward_kernel", 8, 9))
]


def test_where_the_time_of_a_step_goes():
    found = where(KERNELS, 10.0, {"products": 5.0, "attention": 0.0})
    assert found["ms"] == pytest.approx({"products": 6.0, "copies": 3.0, "norm": 1.0, "host gaps": 2.0})
    said = where_line(row("stepgraph", 10.0, where=found))
    assert said == (
        "50% is products and attention at their measured peak (5.0 ms); "
        "beyond: copies 3.0, host gaps 2.0, products 1.0, norm 1.0 ms"
    )
    assert where_line(row("stepgraph", 10.0, where=where(KERNELS, 8.0, None))).startswith("products 6.0, copies 3.0")
    assert f"- m, 10 ms: {said}" in summary([("m", [row("eager", 20), row("stepgraph", 10.0, where=found)])])


def test_a_profile_that_fails_loses_no_other_figure(monkeypatch):
    def measured(groups, *_):
        for group in groups:
            for lane in group:
                lane.row.step_ms = 10.0
                lane.ask = lambda request, row=lane.row: setattr(row, "error", "CUPTI") or {}
                _[-1](lane)
            yield [lane.row for lane in group]

    monkeypatch.setattr(command, "measured", measured)
    options = ModelBench(profile=Path.cwd())
    ((found,),) = command.measure(["vit-l"], options, ["stepgraph"], CPU)
    assert (found.error, found.profile_error) == (None, "CUPTI") and found.per_s == 12800


def test_the_limit_is_that_of_the_steps_products():
    parts = child.parts_of(models.build("qwen3-0.6b-debug", CPU), models.batch_of("qwen3-0.6b-debug", CPU))
    graph = child.PROVIDERS["stepgraph-exact"](parts).step.graph.graph
    found, gpu = limits(graph, GPUS["h100"]), GPUS["h100"]
    assert found["products"] + found["attention"] > products_seconds(graph, gpu) > 0
    weights = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 128 + 256 * 64  # attention, MLP, head; each in three products
    rate = gpu.flops[torch.bfloat16] * PRODUCTS_REACHED
    assert found["products"] == pytest.approx(3 * 2 * 2 * 32 * weights / rate, rel=0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model given: name one or more of all, qwen3-0.6b"),
        (["qwen3-0.6"], "did you mean 'qwen3-0.6b'.*allowed: .*vit-l"),
        (["zzz"], "unknown model 'zzz'; allowed: all, .*vit-l"),
        (["vit-l", "--providers", "eagr"], "unknown provider 'eagr': did you mean 'eager'"),
        (["vit-l", "--rounds", "0"], "rounds=0 must be above 0"),
        (["vit-l", "--total-s", "0"], "total_s=0.0 must be above 0"),
        (["vit-l", "--models-together", "0"], "models_together=0 must be above 0"),
        (["vit-l", "--together", "-1"], "together=-1 must be above 0"),
        (["vit-l", "--profile", "pyproject.toml/x"], "profile=pyproject.toml/x cannot be a folder: Not a directory"),
    ],
)
def test_wrong_use_is_one_line(words, message):
    with pytest.raises(ValueError, match=message) as error:
        bench.main(["model", *words])
    assert "\n" not in str(error.value)


def test_without_transformers_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"transformers, which is missing: pip install 'stepgraph\[hf\]'"):
        bench.main(["model", "vit-l-debug"])
