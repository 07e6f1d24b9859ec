"""The contract is checked before anything changes; the runner applies, times, reports and dumps."""

import dataclasses
import re
import time
from dataclasses import dataclass

import pytest
import torch

import stepgraph
from stepgraph.capture import set_provenance
from stepgraph.lower import lowering
from stepgraph.passes import (
    PASSES,
    Pass,
    StepOptions,
    Target,
    chosen,
    configured,
    default,
    exact,
    format_report,
    get,
    prepare,
    resolve,
    run_passes,
)
from stepgraph.passes.contract import NoOptions, PassReport, register
from stepgraph.passes.order import ORDER
from stepgraph.run.program import plain_runner

aten = torch.ops.aten


@pytest.fixture
def step(tools):
    return tools.by_hand(lambda x: (x.t().t() * 2,), torch.randn(3, 3))


def make(name, apply=lambda step, options, report: None, **facts):
    return Pass(name, facts.pop("tier", "exact"), apply, name, NoOptions(), **facts)


def refused(step, passes, match, **options):
    """``passes`` is refused in one line, and nothing has changed."""
    before = step.text()
    with pytest.raises(ValueError, match=match) as error:
        run_passes(step, passes, **options)
    assert "\n" not in str(error.value)
    assert step.text() == before and step.log == []


@pytest.mark.parametrize(
    "passes, match",
    [
        (["dead_cod"], "unknown pass 'dead_cod': did you mean 'dead_code'"),
        (["remove_noop_views", "cuda_graf"], "unknown pass 'cuda_graf': did you mean 'cuda_graph'"),
        ("fast", "unknown passes 'fast'; allowed: 'exact', 'default'"),
        (["dead_code", "dead_code"], "dead_code is listed twice"),
        (["inductor", "dead_code"], "dead_code cannot run after inductor, which is terminal"),
        (["remove_noop_views", "cuda_graph"], "cuda_graph cannot run: the step has no CUDA tensors; leave it out"),
        ([make("ranks", needs_process_group=True)], "no process group is initialized"),
        ([make("first", after=("dead_code",)), "dead_code"], "first must come after dead_code; list it later"),
        (["cuda_graph", "inductor"], "cuda_graph must come after inductor; list it later"),
    ],
)
def test_broken_contracts_change_nothing(step, passes, match):
    refused(step, passes, match)


def test_unknown_disabled_pass_is_refused(step):
    refused(step, "exact", "unknown pass 'recomput': did you mean 'recompute'", disable=["recomput"])


def test_unknown_option_is_refused():
    with pytest.raises(ValueError, match="unknown option of pass recompute 'polcy': did you mean 'policy'"):
        get("recompute", polcy="full")
    with pytest.raises(ValueError, match="unknown option of pass dead_code"):
        get("dead_code", hard=True)
    with pytest.raises(ValueError, match="unknown passes 'fast': choose one of default, exact"):
        configured("fast")
    with pytest.raises(ValueError, match="unknown inductor 'on': choose one of full, off, regional"):
        configured(inductor="on")


def test_capture_refuses_too(tools):
    model, batch = tools.Tower(), tools.vectors(6, 12)[0]
    with pytest.raises(ValueError, match="did you mean 'dead_code'"):
        stepgraph.capture(model, tools.mse, batch, passes=["dead_coed"])


def test_no_pass_follows_a_terminal_one_in_another_run(step):
    run_passes(step, [make("end", terminal=True)])
    with pytest.raises(ValueError, match="pass end, which is terminal, has run on this step already"):
        run_passes(step, ["dead_code"])


#: Passes that run only where an option asks for them.
ASKED_FOR = (
    "fp8_experts", "exchange_fp8", "fp8_matmul", "gather_fp8",
    "async_tensor_parallel", "copy_engines", "tag_regions", "fit_memory", "tile_sequence", "offload_optimizer",
    "product_epilogues",
)  # fmt: skip


def test_pipelines_skip_what_cannot_run_and_say_why(step):
    reports = run_passes(step, "default", disable=["inductor"])
    for_inductor = [name for name in ORDER if PASSES[name].serves == "inductor"]
    assert [r.name for r in reports] == [n for n in ORDER if n not in ("inductor", *for_inductor, *ASKED_FOR)]
    lines = {r.name: r.line() for r in reports}
    assert lines["cuda_graph"] == "cuda_graph [exact]: skipped, the step has no CUDA tensors"
    assert lines["fuse_loss"] == "fuse_loss [numerics]: skipped, the step has no CUDA tensors"


def test_pipelines_list_every_registered_pass_once():
    assert sorted(ORDER) == sorted(PASSES)
    assert [p.name for p in default()] == [name for name in ORDER if name not in ASKED_FOR]
    always = [n for n in ORDER if not PASSES[n].serves and n not in ASKED_FOR]
    assert [p.name for p in exact()] == [n for n in always if PASSES[n].tier == "exact"]
    assert {p.tier for p in PASSES.values()} == {"exact", "numerics"}
    assert all(p.doc for p in PASSES.values())


def test_facts_name_passes_that_exist():
    for p in PASSES.values():
        assert {*p.after, *([p.serves] if p.serves else [])} <= set(PASSES), p.name
        assert p.terminal or not any(PASSES[name].terminal for name in p.after), p.name


def test_capture_takes_the_record_of_options(tools):
    model, batch = tools.llama(n_layers=1), tools.tokens()[0]
    options = StepOptions("exact", memory="full", disable_pass=("dead_code",))
    step = stepgraph.capture(model, tools.next_token_loss, batch, passes=options)
    assert [r.name for r in step.report] == [p.name for p in exact() if p.name != "dead_code"]
    assert next(r for r in step.report if r.name == "recompute").summary.startswith("policy full")
    with pytest.raises(ValueError, match="unknown norm 'kernels': did you mean 'kernel'"):
        stepgraph.capture(model, tools.next_token_loss, batch, passes=StepOptions(norm="kernels"))


def test_a_run_and_a_forecast_take_the_same_passes(monkeypatch):
    """One that is new is in both, but for one that says it chooses kernels alone; options say whether it runs."""
    new = make("new", from_options=lambda options: {} if options.memory == "full" else None)
    kernels = make("kernels", tier="numerics", forecast=False)
    for p in (new, kernels):
        monkeypatch.setitem(PASSES, p.name, p)
    monkeypatch.setattr("stepgraph.passes.order.ORDER", (*ORDER[:3], "new", "kernels", *ORDER[3:]))
    forecast = Target("cuda", 2**30, 8, process_groups=True, simulated=True)
    for memory in ("full", "none"):
        options = StepOptions(memory=memory, async_tp=True, copy_engines=True)
        run = [p.name for p in resolve(options, (), dataclasses.replace(forecast, simulated=False))]
        assert run == [p.name for p in chosen(options)]
        assert ("new" in run) == (memory == "full") and "kernels" in run
        named = [p.name for p in resolve(options, (), forecast)]
        assert named == [name for name in run if PASSES[name].forecast] and len(named) < len(run) - 1


def test_the_target_completes_what_the_options_leave_open():
    options = StepOptions(async_tp=True, copy_engines=True)
    target = Target("cuda", 2**30, ranks_per_machine=4, process_groups=True)
    found = {p.name: p.options for p in resolve(options, (), target)}
    assert found["reshard_after_forward"].budget_gib == 0.9
    assert found["copy_engines"].ranks_per_machine == found["async_tensor_parallel"].ranks_per_machine == 4
    (mine,) = resolve([get("reshard_after_forward", budget_gib=3.0)], (), target)
    assert mine.options.budget_gib == 3.0


def test_a_forecast_runs_what_needs_a_gpu_on_a_cpu(step):
    seen = []
    p = make("gpu", lambda step, options, report: seen.append(report.name), needs_cuda=True)
    run_passes(step, [p], target=Target("cuda", simulated=True))
    assert seen == ["gpu"]


def test_configured_sets_the_trainers_options():
    passes = {p.name: p for p in configured(memory="budget=2GiB", inductor="full", cuda_graph=False)}
    assert passes["recompute"].options.budget == 2.0 and "inductor" in passes
    assert "cuda_graph" not in passes
    assert "inductor" not in {p.name for p in configured(inductor="off")}
    regional = {p.name: p for p in configured(inductor="regional")}
    assert regional["inductor"].options.mode == "regional" and passes["inductor"].options.mode == "full"
    assert "expand_optimizer" in passes and "expand_optimizer" not in regional  # worth it only when all is compiled


def test_passes_prepare_before_the_step_is_traced(tools, monkeypatch):
    seen = []
    model, batch = tools.Tower(), tools.vectors(6, 12)[0]
    early = make("early", prepare=lambda target: seen.append(target.device))
    late = make("late", prepare=lambda device: seen.append("late"))

    trace_step = lowering.trace_step
    monkeypatch.setattr(lowering, "trace_step", lambda *a, **k: seen.append("traced") or trace_step(*a, **k))
    monkeypatch.setitem(PASSES, "late", late)  # so that it can be disabled by name
    stepgraph.capture(model, tools.mse, batch, passes=[early, late], disable=["late"])
    assert seen == ["cpu", "traced"]


def test_inductor_starts_its_workers_for_gpus_alone(monkeypatch):
    started = []
    monkeypatch.setattr("stepgraph.compat.start_compile_workers", lambda: started.append(True))
    prepare("default", (), Target("cpu"))
    prepare("default", ("inductor",), Target("cuda"))
    assert not started
    prepare("default", (), Target("cuda"))
    assert started == [True]


def test_disabled_passes_are_left_out(step):
    names = [r.name for r in run_passes(step, "exact", disable=["recompute", "cuda_graph"])]
    assert names == [p.name for p in exact() if p.name not in ("recompute", "cuda_graph")]


def test_register_gives_a_pass_its_facts(monkeypatch):
    @dataclass(frozen=True)
    class Options:
        size: int = 1

    monkeypatch.setattr("stepgraph.passes.contract.PASSES", {})

    @register("sized", "numerics", options=Options(), terminal=True)
    def sized(step, options, report):
        """Does a thing.

        More about it.
        """

    from stepgraph.passes.contract import PASSES as registered

    p = registered["sized"]
    assert (p.name, p.tier, p.doc, p.terminal) == ("sized", "numerics", "Does a thing.", True)
    assert p.with_options(size=3).options.size == 3 and p.options.size == 1


def test_options_and_report_reach_the_pass(step):
    def apply(step, options, report):
        report.matched, report.changed = 3, options.changed
        report.notes.append("one was odd")

    @dataclass(frozen=True)
    class Options:
        changed: int = 0

    odd = dataclasses.replace(make("odd", apply), options=Options()).with_options(changed=2)
    reports = run_passes(step, ["dead_code", odd])
    assert reports == step.log
    text = format_report(reports)
    assert re.fullmatch(
        r"1\. dead_code \[exact\]: 0 unused nodes removed; nodes 3 \(\+0\); \d+\.\d\d s\n"
        r"2\. odd \[exact\]: 2 of 3 changed; nodes 3 \(\+0\); \d+\.\d\d s\n"
        r"   one was odd",
        text,
    )


def test_the_report_of_several_graphs_has_a_heading_for_each():
    reports = [PassReport("one", "exact", graph="stage 0", changed=1), PassReport("two", "exact", graph="forward.0")]
    lines = format_report(reports).splitlines()
    assert [lines[0], lines[2]] == ["graph of the stage 0:", "graph of the forward.0:"] and len(lines) == 4


def test_both_times_are_in_the_report(step):
    def apply(step, options, report):
        report.matched = 1
        start = time.perf_counter()
        time.sleep(0.05)
        report.compile_s = time.perf_counter() - start
        time.sleep(0.02)

    (report,) = run_passes(step, [make("both", apply)])
    assert report.compile_s >= 0.05 and report.apply_s >= 0.02
    assert f"{report.apply_s:.2f} s, compile {report.compile_s:.2f} s" in report.line()


def test_node_counts_are_in_the_report(step):
    reports = run_passes(step, ["remove_noop_views", "dead_code"])
    assert [(r.nodes_before, r.nodes_after) for r in reports] == [(3, 2), (2, 1)]
    assert "nodes 1 (-1)" in reports[1].line()


def test_a_pass_that_breaks_the_graph_is_caught(step):
    def apply(step, options, report):
        first, *_, last = step.nodes()
        last.append(first)  # its reader now comes before it

    with pytest.raises(RuntimeError, match="before"):
        run_passes(step, [make("breaks", apply)])


def test_what_runs_is_the_rewritten_graph(step):
    def apply(step, options, report):
        for node in step.nodes():
            if node.target is aten.mul.Tensor:
                node.update_arg(1, 3)
                set_provenance(node, None)

    run_passes(step, [make("triples", apply)])
    assert torch.equal(plain_runner(step)([torch.ones(3, 3)])[0], torch.full((3, 3), 3.0))


def test_dump_writes_the_graph_before_and_after_each_pass(tools, tmp_path):
    model, batch = tools.llama(), tools.tokens()[0]
    optimizer = tools.adamw(model)
    folder = tmp_path / "deep" / "graphs"
    passes = ["remove_noop_views", "dedupe_casts", "dead_code", "inplace_update"]
    step = stepgraph.capture(model, tools.next_token_loss, batch, optimizer, passes=passes, dump=folder)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["00-captured.txt", *(f"{i:02d}-{name}.txt" for i, name in enumerate(passes, 1))]
    texts = [(folder / name).read_text() for name in files]
    for text, count in zip(texts, [step.report[0].nodes_before, *(r.nodes_after for r in step.report)], strict=True):
        lines = text.splitlines()
        inputs = sum(" = input" in line or " = constant" in line for line in lines)
        assert len(lines) == inputs + count + 1 and lines[-1].startswith("return ")
        assert re.search(r"^mm\w*: float32\[\d+, \d+\] = aten\.mm\(.*# forward layers\.0\.\S+ \w+\.py:\d+$", text, re.M)
    assert len(set(texts)) == len(texts)
    assert "aten.div_" in texts[-1] and "aten.div_" not in texts[-2]
    assert texts[-1] == step.graph.text()


def test_exposed_communication_is_forecast_once_for_each_graph_between_passes_that_move_it(step, monkeypatch):
    def count_up(step, options, report):
        next(n for n in step.nodes() if n.target is aten.mul.Tensor).update_arg(1, count_up.by)
        count_up.by += 1

    count_up.by = 3
    forecasts = iter([(1.0, 9.0), (2.0, 9.0), (3.0, 9.0), (4.0, 9.0), (5.0, 9.0)])
    monkeypatch.setattr("stepgraph.passes.runner.exposed", lambda graph: next(forecasts))
    idle, moves = make("idle", communicates=True), dict(apply=count_up, communicates=True)
    reports = run_passes(
        step, [make("a", **moves), idle, make("b", **moves), make("other", count_up), make("c", **moves)]
    )
    seconds = [re.findall(r"(\d+)\.00 ms of", note) for report in reports for note in report.notes]
    assert seconds == [["1000", "2000"], ["2000", "3000"], ["4000", "5000"]]
    assert [report.name for report in reports if report.notes] == ["a", "b", "c"]
