"""``stepgraph train --mesh pp=2``: the same run as one process's, bit for bit, its checkpoints for any mesh."""

import itertools
import json
import shutil

import pytest
import torch

from stepgraph import cli
from stepgraph.inspect.account.page import read_page
from tests.distributed.test_train import TINY_RUN, corpus, records, saved, train_on  # noqa: F401  (corpus: a fixture)

RUN = [*TINY_RUN, "--model.n-layers", "4", "--batch-size", "1", "--accumulate", "4", "--passes", "exact"]


def run_alone(*words):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *map(str, words)])
    assert stop.value.code == 0


def check_same_run(ours, theirs):
    for name in ("loss", "grad_norm", "val_loss"):
        assert records(ours, name) == records(theirs, name), name
    here, there = saved(ours / "checkpoints/step-00000006"), saved(theirs / "checkpoints/step-00000006")
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        assert torch.equal(here[name], tensor), name


def test_a_pipeline_trains_as_one_process(corpus, tmp_path):  # noqa: F811
    words = [*RUN, "--data", corpus, "--document-mask", "on"]
    run_alone(*words, "--out", tmp_path / "alone")
    train_on(2, *words, "--mesh", "pp=2", "--pipeline", "zero-bubble", "--out", tmp_path / "run")
    check_same_run(tmp_path / "run", tmp_path / "alone")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert 0 < summary["bubble"] < 1
    page = read_page(tmp_path / "run/page.html")
    assert page["head"]["measured"]["bubble"] == summary["bubble"]
    assert {span[0] for span in page["pipeline"]["spans"]} == {0, 1} and 0 < page["pipeline"]["bubble"] < 1
    # Every computation of the last step, as each rank did it: one after the other, and after what it reads.
    measured, where = page["pipeline"]["measured"]["spans"], page["pipeline"]["stages"]
    assert sorted(span[:4] for span in measured) == sorted(span[:4] for span in page["pipeline"]["spans"])
    assert all(where[stage] == rank and start < end for rank, _, stage, _, start, end in measured)
    for rank in (0, 1):
        own = [span for span in measured if span[0] == rank]
        assert all(this[5] <= following[4] for this, following in itertools.pairwise(own))
    busy = sum(end - start for *_, start, end in measured)
    assert summary["bubble"] == pytest.approx(1 - busy / 2 / page["pipeline"]["measured"]["ns"], abs=1e-6)
    ends = {(kind, stage, micro): end for _, kind, stage, micro, _, end in measured}
    for _, kind, stage, micro, start, _ in measured:
        if (kind, stage) in (("forward", 1), ("backward_input", 0)):
            assert start >= ends[kind, 1 - stage, micro] - 2  # ns, of rounding
    assert json.loads((tmp_path / "alone/summary.json").read_text())["bubble"] is None


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "sends"), (("1f1b", "symmetric"), ("dualpipev", "point-to-point")))
def test_resumed_bitwise_and_loaded_on_other_meshes(schedule, sends, corpus, tmp_path):  # noqa: F811
    words = [*RUN, "--data", corpus]
    run_alone(*words, "--out", tmp_path / "alone")
    train_on(2, *words, "--mesh", "pp=2", "--pipeline", schedule, "--stage-sends", sends, "--out", tmp_path / "run")
    for again in ("again", "tensors", "one"):
        shutil.copytree(tmp_path / "run", tmp_path / again)
        shutil.rmtree(tmp_path / again / "checkpoints/step-00000006")
    train_on(2, "--resume", tmp_path / "again")
    check_same_run(tmp_path / "again", tmp_path / "alone")
    # Another mesh goes on from the same numbers, with the rows that the run alone has next.
    without = ["--pipeline", "None", "--stage-sends", "point-to-point"]
    train_on(2, "--resume", tmp_path / "tensors", "--mesh", "tp=2", *without)
    train_on(1, "--resume", tmp_path / "one", "--mesh", "fsdp=1", *without)
    alone, *others = (dict(records(tmp_path / name, "loss")) for name in ("alone", "tensors", "one"))
    for losses in others:
        assert losses.keys() == set(range(1, 7))
        assert losses == pytest.approx(alone, abs=1e-4)
