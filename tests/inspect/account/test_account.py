"""The account's numbers against the graph, and against the forecast, which adds them up by itself."""

import json

import pytest

from stepgraph.costs.memory import KINDS
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.inspect.account.account import account_of, fullest, peak_of
from stepgraph.models.decoder import SwiGLU
from stepgraph.regions import region
from tests.inspect.account.accounts import GPU, account, config, graphs, planned

#: (mesh, options): sharded and fused; two graphs; two axes of a mesh, recomputed, no kernel fused.
CASES = {
    "fsdp": ("fsdp=4", {"inductor": "full"}),
    "two graphs": ("ddp=2", {"accumulate": 3, "inductor": "full"}),
    "fsdp and tp": ("fsdp=2,tp=2", {"memory": "selective"}),
    "one rank": (None, {"inductor": "full"}),
}


@pytest.fixture(params=CASES.values(), ids=CASES, scope="module")
def case(request):
    mesh, options = request.param
    return mesh, options, account(mesh, **options)


def test_nodes_are_the_graphs(case):
    for found, step in graphs(case[2]):
        nodes, order = found["nodes"], list(step.graph.nodes)
        assert all(len(column) == len(order) for column in nodes.values())
        assert nodes["name"] == [node.name for node in order]
        for i, node in enumerate(order):
            assert {order[j] for j in nodes["inputs"][i]} == set(node.all_input_nodes)
            source = provenance(node)
            assert found["paths"][nodes["path"][i]] == (source.path if source else "")
            assert case[2][0]["phases"][nodes["phase"][i]] == phase_of(node)
            if node.op == "call_function":
                text, *given = found["calls_text"][nodes["call"][i]].split("$")
                assert len(given) == len(nodes["inputs"][i])
                assert text.startswith(str(node.target).removesuffix(".default")) or text.startswith("getitem")
        assert [name for _, _, name in found["inputs"]] == [spec.what.name for spec in step.inputs]


@pytest.mark.parametrize(("device", "times"), [(None, True), ("NVIDIA H200", True), ("CPU with 8 threads", False)])
def test_times_are_forecast_only_for_the_device_that_runs(device, times):
    _, program = account(inductor="full")
    found = account_of(program, config(inductor="full"), GPU, {}, device=device)["head"]["forecast"]
    assert ("step_ms" in found) is ("mfu" in found) is times and found["peak_bytes"] > 0


def test_sums_agree_with_the_forecast(case):
    mesh, options, (found, _) = case
    if mesh is None:
        pytest.skip("a forecast has a mesh; the next test sums for one rank")
    plan, head = planned(mesh, **options), found["head"]["forecast"]
    calls = [(graph, graph["calls"]) for graph in found["graphs"]]
    assert head["step_ms"] == pytest.approx(plan.timeline.step_seconds * 1e3, rel=1e-4)
    assert head["exposed_ms"] == pytest.approx(plan.timeline.exposed_seconds * 1e3, rel=1e-3, abs=1e-4)
    assert sum(n * sum(g["nodes"]["flops"]) for g, n in calls) == plan.flops
    assert sum(n * len(g["collectives"]) for g, n in calls) == len(plan.timeline.collectives)
    assert sum(n * sum(c["bytes"] for c in g["collectives"]) for g, n in calls) == sum(
        c.bytes for c in plan.timeline.collectives
    )
    assert head["peak_bytes"] == plan.peak.total
    assert head["mfu"] == pytest.approx(plan.mfu, rel=1e-4)
    # Whole peaks are the forecast's kind by kind, not only in all.
    assert plan.peak.bytes in [peak_of(graph) for graph in found["graphs"]]


def test_kernels_and_times_fill_the_compute_stream(case):
    for found, _ in graphs(case[2]):
        nodes = found["nodes"]
        assert sum(nodes["ns"]) == pytest.approx(found["compute_ns"], rel=1e-4, abs=len(nodes["ns"]))
        charged = {i for i, ns in enumerate(nodes["ns"]) if ns}
        assert charged <= {kernel for kernel in nodes["kernel"] if kernel >= 0}
        assert all(nodes["kernel"][kernel] == kernel for kernel in nodes["kernel"] if kernel >= 0)
        ends = 0
        for i in sorted(charged, key=lambda i: nodes["start"][i]):
            assert nodes["start"][i] >= ends - 2  # rounded to ns
            ends = nodes["start"][i] + nodes["ns"][i]
        waits = sum(c["exposed"] for c in found["collectives"])
        assert ends <= found["step_ns"] + 2 and found["step_ns"] <= found["compute_ns"] + waits + sum(
            c["ns"] for c in found["collectives"] if c["waited"] is None
        ) + len(nodes["ns"])


def test_collectives_travel_in_order(case):
    for found, _ in graphs(case[2]):
        free = {}
        for c in found["collectives"]:
            assert c["ready"] <= c["launched"] <= c["started"]
            assert c["started"] >= free.get(c["axis"], 0) - 2
            if c["waited"] is not None and "mm" not in c["kind"]:
                assert c["exposed"] == pytest.approx(max(0, c["started"] + c["ns"] - c["waited"]), abs=3)
                free[c["axis"]] = c["started"] + c["ns"]
        if case[0] == "fsdp=4":  # overlapped: some are needed later than they are launched
            assert any(c["waited"] > c["launched"] for c in found["collectives"])


def test_storages_are_alive_from_maker_to_last_reader(case):
    for found, step in graphs(case[2]):
        order, storages = list(step.graph.nodes), found["storages"]
        at, sizes = fullest(found)
        alive = dict.fromkeys(KINDS, 0) | found["other_graphs"]
        for node, size, kind, last in zip(*(storages[k] for k in ("node", "bytes", "kind", "last")), strict=True):
            assert size == tensor_bytes(order[node])
            if order[node].op in ("placeholder", "get_attr"):
                assert last == len(order)
            else:
                readers = [order.index(user) for user in order[node].users if user.op != "output"]
                assert last >= max(readers, default=node)
            if last == len(order) or node <= at <= last:
                alive[KINDS[kind]] += size
        assert alive == sizes


def test_two_graphs_hold_each_others_state():
    found, _ = account("ddp=2", accumulate=3, inductor="full")
    micro, update = found["graphs"]
    assert (micro["calls"], update["calls"]) == (3, 1)
    assert found["schedule"] == [["microbatch", 0], ["microbatch", 1], ["microbatch", 2], ["update", None]]
    assert micro["other_graphs"]["optimizer"] > 0 and "parameters" not in micro["other_graphs"]
    assert sum(peak_of(micro).values()) > sum(micro["storages"]["bytes"][i] for i in range(len(micro["inputs"])))


def test_regions_are_those_that_the_model_names(monkeypatch):
    plain = SwiGLU.forward

    def named(self, x):
        with region("feed-forward"):
            return plain(self, x)

    monkeypatch.setattr(SwiGLU, "forward", named)
    found, _ = account.__wrapped__()
    (graph,) = found["graphs"]
    inside = {True: set(), False: set()}
    for i, (path, place) in enumerate(zip(graph["nodes"]["path"], graph["nodes"]["region"], strict=True)):
        if graph["nodes"]["ns"][i] and found["phases"][graph["nodes"]["phase"][i]] in ("forward", "backward"):
            inside["mlp" in graph["paths"][path].split(".")].add(graph["regions"][place])
    assert inside == {True: {"feed-forward"}, False: {""}}


def test_it_is_plain_data(case):
    found, _ = case[2]
    assert json.loads(json.dumps(found, allow_nan=False))["head"] == found["head"]
    assert {report["name"] for report in found["passes"]} >= {"remove_noop_views", "dead_code"}
    changed = [report for report in found["passes"] if report["excerpts"]]
    assert changed and all(e["before"] or e["after"] for report in changed for e in report["excerpts"])
