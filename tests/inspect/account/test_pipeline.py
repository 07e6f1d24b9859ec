"""The schedule on a page against its definition and the published bubble."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import cli
from stepgraph.config.train import TrainConfig
from stepgraph.costs.memory import KINDS
from stepgraph.graph.step_graph import Call, Kind
from stepgraph.inspect.account.account import pipeline_account
from stepgraph.inspect.account.page import read_page
from stepgraph.parallel.pipeline.schedules import SCHEDULES, rank_of
from tests.distributed.ranks import on_processes
from tests.inspect.account.accounts import GPU


def graphs(schedule, ranks, *, sent=0, **ns):
    """Accounts of rank 0's graphs; ``ns``: of each kind of call. Forward makes node 1 of 10 bytes for backward."""
    stages = range(ranks * SCHEDULES[schedule].chunks)
    made = [
        {"name": f"{kind}.{stage}", "kind": kind, "stage": stage, "step_ns": took, "inputs": [[0, "parameter", "w"]],
         "outputs": [[0, "value", "w", stage], [1, "value", "saved", stage], [2, "value", "message", None]],
         "storages": {"node": [0, 1, 2], "bytes": [1000, 10, 100]}}
        for stage in stages if rank_of(SCHEDULES[schedule], ranks, stage) == 0
        for kind, took in ns.items()
    ]  # fmt: skip
    for call, took, sizes in ((Call(Kind.SEND_FORWARD, 0), 0, [sent]), (Call(Kind.UPDATE), 7, [])):
        storages = {"node": list(range(len(sizes))), "bytes": sizes}
        made.append({"name": call.graph, "kind": call.kind, "stage": call.stage, "step_ns": took, "storages": storages})
    return made


def backward(schedule, ns):
    return {"backward_input": ns, "backward_weight": ns} if SCHEDULES[schedule].halves else {"backward": 2 * ns}


def config(schedule, ranks, microbatches):
    return TrainConfig(mesh=f"pp={ranks}", pipeline=schedule, accumulate=microbatches)


@given(st.integers(2, 6), st.integers(0, 12), st.integers(1, 10**6), st.integers(1, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_bubble_of_1f1b_is_the_published_one(ranks, more, forward, back):
    """Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
    section 2.2: (p - 1)(t_f + t_b) of idle time for m (t_f + t_b) of work."""
    m = ranks + more
    made = pipeline_account(graphs("1f1b", ranks, forward=forward, backward=back), config("1f1b", ranks, m), GPU)
    assert made["ns"] == pytest.approx((m + ranks - 1) * (forward + back), abs=m)
    assert made["bubble"] == pytest.approx((ranks - 1) / (m + ranks - 1))
    assert made["waiting"] == pytest.approx([made["bubble"]] * ranks)
    assert made["in_flight"] == [min(ranks - stage, m) for stage in range(ranks)]
    assert made["kept"] == 10 * (min(ranks, m) - 1)  # neither the parameter nor what is sent
    assert (made["rank"], made["after_ns"]) == (0, 7)


def test_what_is_kept_between_the_halves_counts():
    """On ZB1P's first rank of two, one of two microbatches waits for its second half while the other for its first."""
    made = {graph["name"]: graph for graph in graphs("zero-bubble", 2, forward=1, **backward("zero-bubble", 1))}
    made["backward_input.0"]["outputs"] = [[3, "value", "gradient", 0]]
    made["backward_input.0"]["storages"] = {"node": [3], "bytes": [500]}
    made["backward_weight.0"]["inputs"] = [[0, "value", "gradient"], [1, "value", "saved"]]
    found = pipeline_account(list(made.values()), config("zero-bubble", 2, 2), GPU)
    assert found["kept"] == (500 + 10) + 10 - 10  # but for the one that is computed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_computations_follow_what_they_read(schedule):
    ranks, m, sent = 4, 8, 450_000  # 1 us over NVLink
    made = pipeline_account(
        graphs(schedule, ranks, sent=sent, forward=10_000, **backward(schedule, 10_000)),
        config(schedule, ranks, m),
        GPU,
    )
    stages = range(len(made["stages"]))
    ends = {(kind, stage, micro): end for _, kind, stage, micro, _, end in made["spans"]}
    kinds = {"forward", *backward(schedule, 1)}
    assert len(ends) == len(made["spans"]) and ends.keys() == {
        (kind, stage, micro) for kind in kinds for stage in stages for micro in range(m)
    }
    first = "backward_input" if SCHEDULES[schedule].halves else "backward"
    free = dict.fromkeys(range(ranks), 0)
    for rank, kind, stage, micro, start, end in sorted(made["spans"], key=lambda span: span[4]):
        assert rank == made["stages"][stage] == rank_of(SCHEDULES[schedule], ranks, stage)
        assert start >= free[rank] - 1
        free[rank] = end
        reads = {
            "forward": ("forward", stage - 1, micro),
            first: (first, stage + 1, micro) if stage + 1 in stages else ("forward", stage, micro),
            "backward_weight": ("backward_input", stage, micro),
        }[kind]
        if reads in ends:
            travels = round(sent / GPU.nvlink * 1e9) if made["stages"][reads[1]] != rank else 0
            assert start >= ends[reads] + travels - 2
    busy = m * len(stages) // ranks * 30_000
    assert made["waiting"] == pytest.approx([1 - busy / made["ns"]] * ranks, abs=1e-4)
    assert 0 < made["bubble"] < (ranks - 1) / m


def _command(_, words):
    cli.main(words)


def test_the_page_of_a_preset_shows_a_stage_and_what_every_stage_costs(tmp_path):
    words = ["--mesh", "pp=2,fsdp=2", "--accumulate", "2", "--seq-len", "32", "--inductor", "off", "--split", "0,1"]
    files = {"html": tmp_path / "page.html", "text": tmp_path / "graphs.txt"}
    words += ["--stage", "1", "--model.n-layers", "4", *(f"--{k}={v}" for k, v in files.items())]
    # In a process of its own: it stands for another rank than tests after it, see `in_fake_world`.
    on_processes(1, _command, (["inspect", "llama3-debug", *words],))
    made = read_page(files["html"])
    names = [graph["name"] for graph in made["graphs"]]
    assert {"forward.1", "backward.1", "gather.1", "send_backward.1", "update"} < {*names}
    assert not any(name.endswith(".0") for name in names)
    text = files["text"].read_text().splitlines()
    assert [line for line in text if line.startswith("# ")] == [
        f"# {graph['name']}, called {graph['calls']} times per step" for graph in made["graphs"]
    ]
    assert {report["graph"] for report in made["passes"]} >= {"stage 1", "forward.1", "gather.1", "update"}
    # What the stage's forward leaves for its backward, which is another graph, are activations.
    stored = next(graph["storages"] for graph in made["graphs"] if graph["name"] == "forward.1")
    kinds = zip(stored["kind"], stored["last"], strict=True)
    results = [KINDS[kind] for kind, last in kinds if last == max(stored["last"]) - 1]
    assert len(results) > 9 and set(results) == {"activations"}
    # One block on the first stage, all others on the second, which therefore takes longer than what it waits for.
    pipeline = made["pipeline"]
    assert pipeline["rank"] == 1 and not pipeline["assumed"]
    spans = {(kind, stage, micro): end - start for _, kind, stage, micro, start, end in pipeline["spans"]}
    own = {graph["name"]: graph["step_ns"] for graph in made["graphs"]}
    for kind, micro in itertools.product(("forward", "backward"), (0, 1)):
        assert spans[kind, 1, micro] > 1.5 * spans[kind, 0, micro]
    assert spans["forward", 1, 0] == pytest.approx(own["forward.1"], abs=2)
    assert spans["gather", 1, None] == pytest.approx(own["gather.1"], abs=2)


def test_other_meshes_have_none():
    assert pipeline_account([], TrainConfig(mesh="fsdp=2"), GPU) is None
    assert pipeline_account([], TrainConfig(), GPU) is None
