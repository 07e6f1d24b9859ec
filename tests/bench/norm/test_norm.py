"""``stepgraph bench norm`` on a CPU: a real run on tiny shapes, its record, and the check of results."""

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from stepgraph import bench
from stepgraph.bench import results
from stepgraph.bench.norm import command as norm
from stepgraph.bench.norm import providers as norm_providers
from stepgraph.bench.norm import timing as norm_check
from stepgraph.bench.norm import timing as norm_timing
from stepgraph.bench.norm.results import NormRow, comparisons, findings

CPU = torch.device("cpu")


class Wrong(norm_providers.Eager):
    """Right forward; its backward forgets that the norm depends on x. Its layer norm has no bias."""

    def rms_norm(self, x):
        rstd = (x.detach().float().square().mean(-1, keepdim=True) + norm_providers.EPS).rsqrt()
        return (x * rstd * self.weight).to(x.dtype)

    def layer_norm(self, x):
        return nn.functional.layer_norm(x, (self.n,), self.weight, None, norm_providers.EPS)


class Broken(norm_providers.Eager):
    """Raises, in several lines, for rows longer than 100."""

    def forward(self, x):
        if x.shape[1] > 100:
            raise RuntimeError("no kernel\nfor this shape\nat all")
        return super().forward(x)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A run in fp32: exit status, its record, the record's path."""
    path = tmp_path_factory.mktemp("bench") / "norm.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_timing, "MEASURE_MS", 2)
        patch.setitem(norm.PROVIDERS, "wrong", Wrong)
        patch.setitem(norm.PROVIDERS, "broken", Broken)
        names = "ours,eager,wrong,broken,quack"
        words = ["--shapes", "64x128,33x40", "--dtype", "fp32", "--device", "cpu", "--providers", names]
        status = bench.main(["norm", *words, "--json", str(path)])
    return status, json.loads(path.read_text()), path


def rows_of(record, provider, op):
    return [row for row in record[1]["rows"] if (row["provider"], row["op"]) == (provider, op)]


def test_the_record_holds_every_figure(record):
    status, written, _ = record
    assert status == 0
    settings, rows = written["settings"], written["rows"]
    assert settings["device"] == "cpu" and settings["timings"] == ["wall"] and settings["left_out"] == []
    assert settings["providers"] == ["ours", "eager", "wrong", "broken"]
    assert written["environment"]["versions"]["torch"] == importlib.metadata.version("torch")
    assert len(rows) == 2 * 4 * 4
    ops = ["rms_norm fwd", "rms_norm bwd", "layer_norm fwd", "layer_norm bwd"]
    assert {row["op"] for row in rows} == set(ops)
    copy = settings["copy_gbps"][0]
    for provider in ("ours", "eager"):
        for op, passes in zip(ops, (2, 3, 2, 3), strict=True):
            first, second = rows_of(record, provider, op)
            assert set(first) == {field.name for field in dataclasses.fields(NormRow)}
            assert (first["m"], first["n"], second["m"], second["n"]) == (64, 128, 33, 40)
            assert first["dtype"] == "fp32" and first["timing"] == "wall" and first["error"] is first["wrong"] is None
            assert first["gbps"] == pytest.approx(passes * 64 * 128 * 4 / (first["ms"] * 1e6))
            assert first["pct_copy"] == pytest.approx(100 * first["gbps"] / copy)


def test_a_missing_provider_is_named(record, capsys):
    assert record[1]["settings"]["missing"] == {"quack": "quack is not installed"}
    bench.main(["report", str(record[2])])
    assert "- missing: quack: quack is not installed" in capsys.readouterr().out


def test_a_wrong_result_is_told_apart_and_not_ranked(record):
    assert all(row["ms"] for row in rows_of(record, "wrong", "rms_norm fwd"))
    for op, result in [("rms_norm bwd", "dx is"), ("layer_norm fwd", "y is")]:
        for row in rows_of(record, "wrong", op):
            assert row["wrong"].startswith(result) and "tolerance 0.0001" in row["wrong"]
            assert row["ms"] is row["pct_copy"] is row["error"] is None
    # Its layer norm has no path to the bias: autograd itself refuses.
    assert all("unused" in row["error"] or "not have been used" in row["error"]
               for row in rows_of(record, "wrong", "layer_norm bwd"))  # fmt: skip


def test_a_provider_that_fails_has_a_row_and_the_others_go_on(record):
    failed, ran = rows_of(record, "broken", "rms_norm fwd")
    assert failed["error"] == "RuntimeError: no kernel for this shape" and failed["ms"] is None
    assert ran["error"] is None and ran["ms"] > 0
    assert all(row["ms"] > 0 for row in rows_of(record, "broken", "rms_norm bwd"))


def test_report_prints_the_tables(record, capsys):
    assert bench.main(["report", str(record[2])]) == 0
    shown = capsys.readouterr().out
    assert "### layer_norm bwd, fp32, wall clock" in shown and "| 33x40  |" in shown and "| 64x128 |" in shown
    assert "- wrong is wrong: rms_norm bwd 64x128, 33x40: dx is" in shown
    assert "- broken failed: rms_norm fwd 64x128: RuntimeError: no kernel for this shape" in shown
    assert "- on a CPU the figures are good for ratios only" in shown
    assert shown.count("- slower than 1.02x the best peer at") == 4


def test_a_budget_ends_the_run_after_a_shape(tmp_path, capsys):
    path = tmp_path / "norm.json"
    words = "--op rms_norm --direction fwd --dtype fp32 --device cpu --providers ours --budget 0 --shapes 8x8,9x9"
    bench.main(["norm", *words.split(), "--json", str(path)])
    _, settings, rows = results.read(path)
    assert settings["left_out"] == ["8x8", "9x9"] and rows == []
    assert "out of budget (0 s), left out: 8x8, 9x9" in capsys.readouterr().out


@pytest.mark.slow
def test_random_shapes_are_always_the_same_and_of_every_kind(monkeypatch):
    monkeypatch.setattr(norm, "_most", lambda device: 2**40)
    gpu = torch.device("cuda")
    shapes = norm.NormOptions(shapes="random").shape_list(gpu)
    assert len(set(shapes)) == 120 and shapes == norm.NormOptions(shapes="random").shape_list(gpu)
    assert [kind(n) for kind in (lambda n: n % 128, lambda n: n % 8) for _, n in shapes].count(0) > 80
    assert sum(n % 2 for _, n in shapes) > 20 and max(m * n * 2 for m, n in shapes) <= 1.01 * 2**30
    monkeypatch.setattr(norm, "_most", lambda device: 2**25)
    fewer = norm.NormOptions(shapes="random").shape_list(gpu)
    assert fewer == [(m, n) for m, n in shapes if m * n * 2 <= 2**25]
    assert 0 < len(norm.NormOptions(shapes="random").shape_list(CPU)) < len(fewer)


def test_torch_compile_runs_backward_again_and_again(tmp_path):
    path = tmp_path / "norm.json"
    words = "--device cpu --dtype fp32 --op rms_norm --providers ours,compile,compile-max-autotune,compile-tuned "
    words += "--shapes 32x64"
    assert bench.main(["norm", *words.split(), "--json", str(path)]) == 0
    _, _, rows = results.read(path)
    assert [row.error or row.wrong for row in rows] == [None] * 8 and all(row.ms > 0 for row in rows)


@pytest.mark.parametrize("op", norm_providers.OPS)
@pytest.mark.parametrize("dtype", norm_check.TOLERANCES)
@pytest.mark.parametrize("shape", [(1, 64), (70, 1), (9, 5), (40, 1000)])
def test_the_check_takes_what_is_right_and_refuses_each_wrong_result(op, dtype, shape, monkeypatch):
    monkeypatch.setattr(norm_check, "PIECE", 4000)  # several pieces, the last one short
    torch.manual_seed(0)
    x, dy = norm_check.make_inputs(*shape, dtype, CPU)
    params = [nn.Parameter((0.1 * torch.randn(shape[1]) + 1).to(dtype)) for _ in range(1 + (op == "layer_norm"))]
    # In float64, rounded once: what a kernel without a fault gives.
    exact = [t.detach().double().requires_grad_() for t in (x, *params)]
    provider = norm_providers.Eager(op, *exact[1:], *[None] * (op == "rms_norm"))
    y64 = provider.forward(exact[0])
    grads = [g.to(dtype) for g in provider.backward(y64, exact[0], dy.double())]
    y, values = y64.detach().to(dtype), [p.detach() for p in params]
    assert norm_check.check_forward(op, x, values, y) is None
    assert norm_check.check_backward(op, x, values, dy, grads) is None
    assert "y is" in norm_check.check_forward(op, x, values, y * 1.05)
    assert "y is" in norm_check.check_forward(op, x, values, y.double())
    assert "y is" in norm_check.check_forward(op, x, values, torch.full_like(y, float("nan")))
    for place, name in enumerate(["dx", "dw", "db"][: len(grads)]):
        bad = [g + 10 * dy.abs().max() * (i == place) for i, g in enumerate(grads)]  # 1 / sqrt(EPS) at length 1
        assert f"{name} is" in norm_check.check_backward(op, x, values, dy, bad)


def row(provider, ms, m=65536, n=4096, timing="graph", **values):
    made = NormRow(op="rms_norm bwd", m=m, n=n, dtype="bf16", provider=provider, timing=timing, **values)
    if ms:
        made.set_time(ms, 4000)
    return made


def test_ours_is_held_against_the_best_peer_at_each_shape():
    rows = [
        *(row("ours", 0.50), row("eager", 2.00), row("quack", 0.40)),
        *(row("ours", 0.30, m=32768), row("eager", 1.20, m=32768), row("quack", None, m=32768, wrong="dx is off")),
        *(row("ours", None, n=64, error="broke"), row("eager", 0.10, n=64), row("quack", 0.20, n=64)),
        *(row("ours", 0.0102, n=128), row("eager", 0.01, n=128)),
    ]
    ((_, shapes),) = comparisons(rows).items()
    assert [shape.shape for shape in shapes] == ["65536x64", "65536x128", "32768x4096", "65536x4096"]
    means, slow, large = findings(shapes)
    assert slow == "slower than 1.02x the best peer at 2 of 4 shapes: 65536x64, 65536x4096 (1.25x quack)"
    eager, quack, best = (4 * 4 / 1.02) ** (1 / 3), 0.8, (0.8 * 4 / 1.02) ** (1 / 3)
    assert means == (
        f"geometric mean of times as fast (shapes): eager {eager:.2f}x (3), quack {quack:.2f}x (1), "
        f"the best peer {best:.2f}x (3)"
    )
    # 3 passes of 512 MiB in 0.5 ms at 4000 GB/s: 1610612736 / 0.0005 / 4e12
    assert "at least 67.1% of copy (32768x4096), mean 73.8%, over 2 shapes" in large


def test_a_graph_moves_enough_and_not_too_much():
    assert norm_timing.calls_in_graph(2**31) == 2
    assert norm_timing.calls_in_graph(2**26) == 8
    assert norm_timing.calls_in_graph(128) == norm_timing.MOST_CALLS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shapes 12288", "shapes=12288: '12288' is not ROWSxLENGTH, two numbers above 0"),
        ("--shapes 4x8,0x64", "'0x64' is not ROWSxLENGTH"),
        ("--shapes 4x8,", "'' is not ROWSxLENGTH"),
        ("--shapes 4x-8", "'4x-8' is not ROWSxLENGTH"),
        ("--shapes 2x3x4", "'2x3x4' is not ROWSxLENGTH"),
        ("--providers ours,quak", "unknown provider 'quak': did you mean 'quack'?"),
        ("--op rmsnorm", "--op: 'rmsnorm' is not one of rms_norm, layer_norm, both"),
        ("--dtype fp8", "--dtype: 'fp8' is not one of"),
        ("--bugdet 3", "unknown option --bugdet: did you mean --budget?"),
        ("--json no/such/folder/x.json", "json=no/such/folder/x.json: the folder no/such/folder does not exist"),
    ],
)
def test_an_error_of_use_is_one_line(arguments, message, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(ValueError) as error:
        bench.main(["norm", *arguments.split()])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_compile_under_our_rules_is_no_peer_and_is_held_against_the_best_kernel():
    rows = [row("ours", 1.0), row("quack", 1.1), row("compile-tuned", 1.25), row("ours", 2.0, n=512)]
    rows += [row("eager", 1.0, n=512), row("compile-tuned", 1.0, n=512), row("ours", 1.0, n=64)]
    small, middle, large = comparisons(rows)["rms_norm bwd", "graph"]
    assert (small.tuned, middle.tuned, large.tuned) == (None, 1.0, 0.8)
    assert middle.best.provider == "eager" and large.best.provider == "quack"
    assert findings([small, middle, large])[-1] == (
        "compile-tuned at 0.89 of the best kernel's speed (geometric mean), below 0.9 at 1 of 2 shapes: "
        "65536x4096 (0.80)"
    )
    assert not any("compile-tuned at" in line for line in findings([small]))


def test_without_an_option_every_provider_is_measured():
    assert norm.NormOptions().names() == list(norm_providers.PROVIDERS)
