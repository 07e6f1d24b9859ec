"""Checkpoints that are damaged, or of something else: one line that says so, and nothing in memory has changed."""

import copy
import os
import pickle
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from stepgraph.train.checkpoint import files
from stepgraph.train.checkpoint.checkpointer import Checkpointer, resolve
from tests.train.checkpoint.cases import FILES, Tiny, build, contents, equal, seed_all, train


def test_the_checkpoint_has_exactly_these_files(saved):
    assert sorted(p.name for p in saved[0].latest().iterdir()) == sorted(FILES)


def refused(checkpointer: Checkpointer, path: Path, match: str, **others) -> str:
    """Loading fails with one line, and nothing in memory has changed."""
    state = build(7, **others)
    train(state, 1)
    seed_all(5)
    before = contents(state), torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match=match) as caught:
        checkpointer.load(path, state)
    assert "\n" not in str(caught.value)
    assert equal((contents(state), torch.get_rng_state(), random.getstate()), before)
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_detected(saved, name):
    checkpointer, _ = saved
    newest = checkpointer.latest()
    good = (newest / name).read_bytes()
    places = {0, 1, len(good) // 2, len(good) - 1, *random.Random(name).sample(range(len(good)), 12)}
    for place in places:
        (newest / name).write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        message = refused(checkpointer, newest, "is damaged") if place == 0 else ""
        with pytest.raises(ValueError, match="is damaged") as caught:
            checkpointer.load(newest, {"model": Tiny()}, rng=False)
        message = message or str(caught.value)
        assert name in message and f"the earlier {newest.parent / 'step-00000001'} is intact" in message
    (newest / name).write_bytes(good)
    checkpointer.load(newest, build(3))


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(saved, name):
    checkpointer, _ = saved
    newest = checkpointer.latest()
    (newest / name).unlink()
    os.mkfifo(newest / name)
    assert f"{name} is not a file" in refused(checkpointer, newest, "is damaged")
    with pytest.warns(UserWarning, match=f"is skipped: {name} is not a file"):
        assert checkpointer.latest() != newest


@pytest.mark.parametrize("how", ["truncated", "emptied", "longer", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_truncated_and_missing_files(saved, name, how):
    checkpointer, _ = saved
    newest = checkpointer.latest()
    good = (newest / name).read_bytes()
    (newest / name).unlink()
    if how != "missing":
        (newest / name).write_bytes({"truncated": good[:-1], "emptied": b"", "longer": good + b" "}[how])
    assert name in refused(checkpointer, newest, "is damaged: .*the earlier .*step-00000001 is intact")
    with pytest.warns(UserWarning, match=f"step-00000002 is skipped: {name}"):
        assert checkpointer.latest().name == "step-00000001"
    with pytest.warns(UserWarning, match="is skipped"):
        assert resolve(checkpointer.folder.parent).name == "step-00000001"


def test_advice_skips_earlier_checkpoints_that_are_damaged_too(saved):
    checkpointer, state = saved
    checkpointer.save(3, state)
    for step in (2, 3):
        file = checkpointer.folder / f"step-0000000{step}" / "__0_0.distcp"
        file.write_bytes(b"x" + file.read_bytes()[1:])
    refused(checkpointer, checkpointer.latest(), "step-00000003 is damaged: .*the earlier .*step-00000001 is intact")
    file = checkpointer.folder / "step-00000001" / "state.json"
    file.write_bytes(file.read_bytes()[1:])
    refused(checkpointer, checkpointer.folder / "step-00000003", "no earlier checkpoint is usable, start a new run")


def test_all_damaged_and_newer_format(saved):
    checkpointer, _ = saved
    for path in checkpointer.folder.iterdir():
        (path / "manifest.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpointer.latest() is None
        refused(checkpointer, checkpointer.folder, "every checkpoint in .* is damaged")


def test_newer_format_is_named(saved, monkeypatch):
    checkpointer, state = saved
    monkeypatch.setattr("stepgraph.train.checkpoint.checkpointer.FORMAT", 2)
    checkpointer.save(3, state)
    monkeypatch.undo()
    refused(checkpointer, checkpointer.folder / "step-00000003", "has format 2, this stepgraph reads 1; update")


def test_a_pickle_that_would_run_code_is_refused_even_with_right_checksums(saved, monkeypatch):
    checkpointer, state = saved

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(checkpointer.folder / "owned"),)

    original = dcp.save

    def plant(tensors, storage_writer):
        original(tensors, storage_writer=storage_writer)
        (Path(storage_writer.path) / ".metadata").write_bytes(pickle.dumps(Evil()))

    monkeypatch.setattr(dcp, "save", plant)
    path = checkpointer.save(3, state)
    refused(checkpointer, path, r"not safe to load: \.metadata names posix\.mkdir")
    assert not (checkpointer.folder / "owned").exists()


def test_an_index_that_leads_out_of_the_checkpoint_is_refused(saved, monkeypatch):
    checkpointer, state = saved
    original = dcp.save

    def plant(tensors, storage_writer):
        original(tensors, storage_writer=storage_writer)
        file = Path(storage_writer.path) / ".metadata"
        file.write_bytes(file.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))

    monkeypatch.setattr(dcp, "save", plant)
    path = checkpointer.save(3, state)
    refused(checkpointer, path, r"not safe to load: \.metadata leads to '\.\./_0\.distcp', out of the checkpoint")


# ---- the wrong thing ----


def test_another_model_names_the_first_difference(saved):
    checkpointer, _ = saved
    path = checkpointer.latest()
    refused(checkpointer, path, r"'embed.weight' has shape \(12, 8\) float32 in .* \(12, 4\) float32", hidden=4)
    refused(checkpointer, path, r"float32 in the checkpoint and .* bfloat16 in the model", dtype=torch.bfloat16)
    for change, match in [
        (lambda m: m.register_buffer("extra", torch.zeros(2)), r"'extra' with shape \(2,\) is in the model and not"),
        (lambda m: delattr(m, "unused"), r"'unused' with shape \(3,\) is in the checkpoint and not in the model"),
        (lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(12, 8))), "'head.weight' .* is in the model"),
    ]:
        model = Tiny()
        change(model)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=match):
            checkpointer.load(path, {"model": model})
        assert equal(dict(model.state_dict()), dict(before))


def test_another_optimizer(saved):
    checkpointer, _ = saved
    path = checkpointer.latest()
    refused(checkpointer, path, "optimizer is AdamW and this run's is SGD; use AdamW", optimizer="sgd-momentum")
    refused(checkpointer, path, "1 parameter groups in the checkpoint and 2 here", optimizer="adamw-groups")
    state = build(1)
    model = state["model"]
    state["optimizer"] = torch.optim.AdamW([model.mix.weight])
    with pytest.raises(ValueError, match=r"group 0 holds other parameters .*first difference: embed.weight"):
        checkpointer.load(path, state)
    state["optimizer"] = torch.optim.AdamW([torch.zeros(5, requires_grad=True)])
    with pytest.raises(ValueError, match=r"parameter 0 of optimizer group 0, shape \(5,\), is not in the model"):
        checkpointer.save(3, state)


def test_loader_that_refuses_changes_nothing(saved):
    checkpointer, _ = saved

    def refuse(state):
        raise ValueError("other data")

    state = build(7)
    state["loader"].load_state_dict = refuse
    before = contents(state)
    with pytest.raises(ValueError, match="other data"):
        checkpointer.load(checkpointer.latest(), state)
    assert equal(contents(state), before)


def test_resolve(saved, tmp_path):
    checkpointer, _ = saved
    newest = checkpointer.folder / "step-00000002"
    for path in (checkpointer.folder.parent, checkpointer.folder, newest, str(newest)):
        assert resolve(path) == newest
    best = shutil.copytree(newest, tmp_path / "best")
    assert resolve(best) == best
    checkpointer.load(best, build(3))


def test_resolve_says_what_is_there(tmp_path):
    empty, run, other = tmp_path / "empty", tmp_path / "run", tmp_path / "other"
    for folder in (empty, run / "checkpoints" / ".tmp-step-00000001", other):
        folder.mkdir(parents=True)
    for name in "abcdefg":
        (other / name).touch()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.json").touch()
    (tmp_path / "whole" / "checkpoints" / "step-00000050").mkdir(parents=True)
    for path, match in [
        (tmp_path / "nowhere", "nowhere is not there; use a run folder"),
        (
            tmp_path / "whole" / "checkpoints" / "step-50",
            "is not there; .*checkpoints has step-00000050: use one of them",
        ),
        (other / "a", "a is a file"),
        (empty, "empty holds no checkpoint yet"),
        (tmp_path / "killed", "the run .*killed has no checkpoint, and one is written every --checkpoint-every"),
        (run, "checkpoints holds no checkpoint yet"),
        (run / "checkpoints", "checkpoints holds no checkpoint yet"),
        (other, r"other is not a checkpoint: it holds a, b, c, d, e and 2 more; use a run folder .* manifest\.json"),
    ]:
        with pytest.raises(ValueError, match=match) as caught:
            resolve(path)
        assert "\n" not in str(caught.value)
    assert Checkpointer(tmp_path / "nowhere").latest() is None


def test_a_checkpoint_that_its_run_deletes_while_it_is_looked_for_is_passed_over(saved, monkeypatch):
    checkpointer, state = saved
    newest, seen = checkpointer.latest(), []

    def pruned(path, **options):
        if not seen:
            seen.append(path)
            checkpointer.save(3, state)
            shutil.rmtree(path)
        return verify(path, **options)

    verify = files.verify
    monkeypatch.setattr(files, "verify", pruned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(checkpointer.folder).name == "step-00000003" and seen == [newest]
