"""Checkpoints: bitwise round trips, damage of every kind, crashes at every moment.

Run as a script, this file is the process that crashes: ``python test_checkpoint.py NAME FOLDER ...``.
"""

import copy
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepgraph.train.checkpoint import Checkpointer, resolve
from stepgraph.train.checkpoint_state import decode, encode


class Tiny(nn.Module):
    """Tied embedding, a mutated buffer (BatchNorm), dropout, an unused parameter: what a resume can get wrong."""

    def __init__(self, hidden: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 12, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.mix(self.embed(tokens)))
        return self.head(nn.functional.dropout(x, 0.2))


class MasterAdam(torch.optim.Optimizer):
    """An optimizer that owns fp32 master weights and moments, made at its first step, as mixed precision has."""

    def __init__(self, params, lr: float | torch.Tensor) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["master"] = p.detach().float().clone()
                    state["exp_avg"], state["exp_avg_sq"] = (
                        torch.zeros_like(state["master"]),
                        torch.zeros_like(p).float(),
                    )
                    state["note"] = "plain value"
                state["step"] += 1
                grad = p.grad.float()
                state["exp_avg"].lerp_(grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(grad * grad, 1 - group["betas"][1])
                state["master"] -= group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                p.copy_(state["master"])


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict:
        return {"position": self.position, "shards": ("a", "b"), "weights": torch.tensor([0.1, float("nan")])}

    def load_state_dict(self, state: dict) -> None:
        assert state["shards"] == ("a", "b")
        self.position = state["position"]


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw-amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True, foreach=True),
    "adamw-tensor-lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "adamw-groups": lambda ps: torch.optim.AdamW(
        [{"params": ps[:2]}, {"params": ps[2:], "weight_decay": 0.0}], lr=0.01
    ),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "master": lambda ps: MasterAdam(ps, 0.01),
    "master-tensor-lr": lambda ps: MasterAdam(ps, torch.tensor(0.01)),
}


def build(seed: int, optimizer: str = "adamw", hidden: int = 8, dtype: torch.dtype = torch.float32) -> dict:
    torch.manual_seed(seed)
    model = Tiny(hidden, dtype)
    return {
        "model": model,
        "optimizer": OPTIMIZERS[optimizer](list(model.parameters())),
        "loader": Loader(),
        "schedule": {"warmup": 3},
        "trainer": {"tokens": 2**60, "best": 0.1 + 0.2},
    }


def train(state: dict, steps: int) -> None:
    """Uses every RNG stream: data from numpy, dropout from torch, the learning rate from Python."""
    for _ in range(steps):
        tokens = torch.from_numpy(np.random.randint(0, 12, 16))
        for group in state["optimizer"].param_groups:
            lr = 0.01 * random.random()
            group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else group.update(lr=lr)
        nn.functional.cross_entropy(state["model"](tokens).float(), tokens).backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["loader"].position += 16
        state["trainer"]["tokens"] += 16


def contents(state: dict) -> dict:
    """Everything a state holds, by torch's own state_dict: the oracle that the code under test does not use."""
    return copy.deepcopy(
        {
            "model": dict(state["model"].state_dict()),
            "optimizer": state["optimizer"].state_dict(),
            "loader": state["loader"].position,
            "schedule": state["schedule"],
            "trainer": state["trainer"],
        }
    )


def equal(a: object, b: object) -> bool:
    """Bitwise equality, of the types too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return same and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b or (a != a and b != b)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)


@pytest.fixture
def saved(tmp_path):
    """A run folder with steps 1 and 2 and the state as it was at step 2."""
    seed_all(0)
    state = build(1)
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
    train(state, 1)
    checkpointer.save(1, state)
    train(state, 1)
    checkpointer.save(2, state)
    return checkpointer, state


# ---- round trips ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_is_bitwise_equal_to_never_stopping(tmp_path, optimizer, dtype):
    seed_all(0)
    state = build(1, optimizer, dtype=dtype)
    train(state, 3)
    path = Checkpointer(tmp_path).save(3, state)
    at_save = contents(state)
    train(state, 3)
    streams = [torch.rand(3), torch.from_numpy(np.random.rand(3)), random.random(), random.gauss(0, 1)]

    seed_all(99)
    fresh = build(2, optimizer, dtype=dtype)
    fresh["trainer"], fresh["schedule"] = {"junk": 1}, {}
    Checkpointer(tmp_path).load(path, fresh)
    assert equal(contents(fresh), at_save)
    assert fresh["model"].head.weight is fresh["model"].embed.weight
    train(fresh, 3)
    assert equal(contents(fresh), contents(state))
    assert equal([torch.rand(3), torch.from_numpy(np.random.rand(3)), random.random(), random.gauss(0, 1)], streams)


def test_a_save_disturbs_nothing(tmp_path):
    runs = []
    for saves in (False, True):
        seed_all(0)
        state = build(1)
        for step in range(3):
            train(state, 1)
            if saves:
                Checkpointer(tmp_path).save(step, state)
        runs.append((contents(state), torch.rand(2), random.random()))
    assert equal(*runs)


def test_existing_tensors_are_filled_in_place(tmp_path):
    state = build(1, "master-tensor-lr")
    train(state, 2)
    path = Checkpointer(tmp_path).save(2, state)
    before = contents(state)

    def addresses() -> list:
        slots = [v for s in state["optimizer"].state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        tensors = [*state["model"].state_dict(keep_vars=True).values(), *slots]
        return [t.data_ptr() for t in tensors] + [id(state["optimizer"].param_groups[0]["lr"])]

    where = addresses()
    train(state, 1)
    Checkpointer(tmp_path).load(path, state)
    assert addresses() == where
    assert equal(contents(state), before)


@pytest.mark.parametrize("optimizer", ["adamw", "master"])
def test_never_stepped_checkpoint_clears_a_stepped_optimizer(tmp_path, optimizer):
    state = build(1, optimizer)
    path = Checkpointer(tmp_path).save(0, state)
    before = contents(state)
    assert before["optimizer"]["state"] == {}
    train(state, 2)
    Checkpointer(tmp_path).load(path, state)
    assert equal(contents(state), before)


def test_tensors_are_what_plain_dcp_reads_under_parameter_names(saved):
    checkpointer, state = saved
    names = dcp.FileSystemReader(checkpointer.latest()).read_metadata().state_dict_metadata
    assert {n for n in names if n.startswith("model.")} == {
        *("model." + n for n, _ in state["model"].named_parameters()),
        *("model." + n for n, _ in state["model"].named_buffers()),
    }
    target = {"model.mix.weight": torch.zeros(8, 8), "optimizer.mix.weight.exp_avg": torch.zeros(8, 8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=checkpointer.latest())
    weight = state["model"].mix.weight
    assert torch.equal(target["model.mix.weight"], weight)
    assert torch.equal(target["optimizer.mix.weight.exp_avg"], state["optimizer"].state[weight]["exp_avg"])


def test_weights_alone_leave_the_random_streams(saved):
    checkpointer, state = saved
    model, before = Tiny(), torch.get_rng_state()
    checkpointer.load(checkpointer.folder.parent, {"model": model}, rng=False)
    assert equal(dict(model.state_dict()), dict(state["model"].state_dict()))
    assert torch.equal(torch.get_rng_state(), before)


def test_compiled_model_shares_checkpoints_with_the_plain_one(saved):
    checkpointer, state = saved
    model = Tiny()
    checkpointer.load(checkpointer.latest(), {"model": torch.compile(model)})
    assert equal(dict(model.state_dict()), dict(state["model"].state_dict()))


def test_odd_tensors(tmp_path):
    def odd() -> nn.Module:
        model = nn.Module()
        model.register_buffer("empty", torch.empty(0, 3))
        model.register_buffer("flag", torch.rand(()) > 0.5)
        model.register_buffer("strided", torch.randn(4, 6).t()[::2])
        model.register_buffer("special", torch.tensor([math.nan, -0.0, math.inf, 1e-45]))
        model.register_buffer("small", torch.randn(5).to(torch.float8_e4m3fn))
        model.register_buffer("not_saved", torch.randn(2), persistent=False)
        return model

    first, second = odd(), odd()
    keep = second.not_saved.clone()
    Checkpointer(tmp_path).load(Checkpointer(tmp_path).save(0, {"model": first}), {"model": second})
    assert equal(dict(first.state_dict()), dict(second.state_dict()))
    assert torch.equal(second.not_saved, keep)


def test_no_warning_in_one_process(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = build(1)
        Checkpointer(tmp_path).load(Checkpointer(tmp_path).save(1, state), state)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5).filter(lambda k: not k.startswith("$")), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(plain)
def test_json_values_come_back_exactly(value):
    assert equal(decode(json.loads(json.dumps(encode(value, "value")))), value)


@pytest.mark.parametrize("value", [{1: 2}, {"$tuple": 3}, {1, 2}, np.zeros(2), object(), b"bytes"])
def test_values_json_would_change_are_refused(tmp_path, value):
    state = build(1) | {"trainer": {"deep": [{"inner": value}]}}
    with pytest.raises(ValueError, match=r"^trainer\.deep\[0\]\.inner has type .*convert it") as caught:
        Checkpointer(tmp_path).save(1, state)
    assert "\n" not in str(caught.value)
    assert Checkpointer(tmp_path).latest() is None


# ---- damage ----

FILES = [".metadata", "__0_0.distcp", "state.json", "rank-00000.json", "manifest.json"]


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
    monkeypatch.setattr("stepgraph.train.checkpoint.FORMAT", 2)
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


def test_parts(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ValueError, match=r"unknown part of a checkpoint 'optimiser': did you mean 'optimizer'\?"):
        checkpointer.save(1, {"model": Tiny(), "optimiser": None})
    with pytest.raises(ValueError, match="no model"):
        checkpointer.save(1, {"trainer": {}})
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step=-1"):
        checkpointer.save(-1, {"model": Tiny()})
    path = checkpointer.save(1, {"model": Tiny()})
    with pytest.raises(ValueError, match="was saved without 'optimizer'"):
        checkpointer.load(path, build(1))


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
    for path, match in [
        (tmp_path / "nowhere", "nowhere is not there; give a run folder"),
        (other / "a", "a is a file"),
        (empty, "empty holds no checkpoint yet"),
        (run, "checkpoints holds no checkpoint yet"),
        (run / "checkpoints", "checkpoints holds no checkpoint yet"),
        (other, r"other is not a checkpoint: it holds a, b, c, d, e and 2 more; give a run folder .* manifest\.json"),
    ]:
        with pytest.raises(ValueError, match=match) as caught:
            resolve(path)
        assert "\n" not in str(caught.value)
    assert Checkpointer(tmp_path / "nowhere").latest() is None


# ---- keeping and crashing ----


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_keep_and_stale_folders(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (100, 5, 200, 1000):
        if step == 200:
            (tmp_path / ".tmp-step-00000150").mkdir()
            (tmp_path / ".tmp-step-00000150" / "__0_0.distcp").write_bytes(b"half")
        checkpointer.save(step, {"model": Tiny()})
    assert names(tmp_path) == ["step-00000200", "step-00001000"]
    checkpointer.save(
        3, {"model": Tiny()}
    )  # a run continued from an earlier step: its checkpoint is never the one deleted
    assert names(tmp_path) == ["step-00000003", "step-00001000"]


def test_saving_a_step_again_replaces_it(tmp_path):
    first, second = build(1), build(2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, first)
    path = checkpointer.save(5, second)
    assert names(tmp_path) == ["step-00000005"]
    checkpointer.load(path, first)
    assert equal(contents(first), contents(second))


def test_everything_is_on_disk_before_the_rename(tmp_path, monkeypatch):
    """What a power cut needs: each file and the folder are synced, then renamed, then the parent is synced."""
    events: list = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        fsync(descriptor)
        info = os.fstat(descriptor)
        events.append(("sync", info.st_ino, info.st_size))

    def record_rename(self, target):
        if target.name.startswith("step-"):
            events.append(("rename", *[(f.stat().st_ino, f.stat().st_size) for f in self.iterdir()]))
        rename(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    path = Checkpointer(tmp_path).save(1, build(1))
    at = next(i for i, e in enumerate(events) if e[0] == "rename")
    synced = {e[1:] for e in events[:at]}
    assert len(events[at][1:]) == len(FILES) and set(events[at][1:]) <= synced
    assert path.stat().st_ino in {inode for inode, _ in synced}
    assert tmp_path.stat().st_ino in {e[1] for e in events[at + 1 :]}


@pytest.mark.parametrize("place", ["tensors", "json", "manifest", "rename"])
def test_a_full_disk_leaves_the_previous_one(saved, monkeypatch, place):
    checkpointer, state = saved
    before = {p: p.read_bytes() for p in checkpointer.folder.rglob("*") if p.is_file()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if place == "tensors":
        real = torch.save
        count = iter(range(100))
        monkeypatch.setattr(torch, "save", lambda *a, **k: full() if next(count) > 3 else real(*a, **k))
    elif place == "rename":
        rename = Path.rename  # DCP renames its `.metadata` too: that one works
        monkeypatch.setattr(Path, "rename", lambda f, to: full() if to.name[:4] == "step" else rename(f, to))
    else:
        real, word = Path.write_bytes, {"json": "state.json", "manifest": "manifest.json"}[place]
        monkeypatch.setattr(Path, "write_bytes", lambda f, data: full() if f.name == word else real(f, data))
    with pytest.raises(
        OSError, match=r"^cannot write checkpoint .*step-00000003: .*No space left.*are intact$"
    ) as caught:
        checkpointer.save(3, state)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert {p: p.read_bytes() for p in checkpointer.folder.rglob("*") if p.is_file()} == before
    assert names(checkpointer.folder) == ["step-00000001", "step-00000002"]
    checkpointer.save(3, state)


def test_ctrl_c_in_the_middle_of_a_save_stays_ctrl_c(saved, monkeypatch):
    checkpointer, state = saved

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(3, state)
    assert names(checkpointer.folder) == ["step-00000001", "step-00000002"]


def script(*args: object) -> subprocess.Popen:
    """Start a function of this file in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def succeed(*processes: subprocess.Popen) -> None:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)


def small(step: int) -> dict:
    """The state that a checkpoint of ``step`` must hold, built from the step alone."""
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "loader": Loader(), "schedule": {}, "trainer": {"step": step}}


def check(path: Path) -> int:
    """Load ``path`` and compare every bit with what its step must hold; the step."""
    step = int(path.name.split("-")[1].removesuffix(".replaced"))
    state = small(0)
    Checkpointer(path.parent).load(path, state)
    assert equal(contents(state), contents(small(step))), path
    return step


def fork(work) -> int:
    if (child := os.fork()) == 0:
        work()
        os._exit(0)
    return child


def save_and_die(run: Path, state: dict, step: int, moment: int) -> None:
    """Save, with kill -9 right before the file operation of that number."""
    count = 0

    def kill(event: str, args: tuple) -> None:
        nonlocal count
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    Checkpointer(run, keep=2).save(step, state)


def crash_everywhere(folder: Path) -> None:
    for scene, earlier, step in [("first", [], 10), ("prune", [10, 20], 30), ("replace", [10, 20], 20)]:
        origin = folder / scene
        for s in earlier:
            Checkpointer(origin, keep=2).save(s, small(s))
        state, moment, ended = small(step), 0, False
        while not ended:
            moment += 1
            run = folder / f"{scene}-{moment}"
            if earlier:
                shutil.copytree(origin, run)
            child = fork(lambda at=(run, state, step, moment): save_and_die(*at))
            status = os.waitpid(child, 0)[1]
            assert status in (0, signal.SIGKILL), status
            ended = status == 0
            for visible in run.glob("step-*"):  # none is half written, none half deleted
                check(visible)
            latest = Checkpointer(run).latest()
            found = check(latest) if latest else None
            assert found in ([step] if ended else [step, max(earlier, default=None)]), (scene, moment, found)
            Checkpointer(run, keep=2).save(40, small(40))
            assert len(names(run)) <= 2 and all(len(n) == len("step-00000040") for n in names(run)), names(run)
            shutil.rmtree(run)
        assert moment > 20, f"{scene}: only {moment} moments were tried"


def random_kills(folder: Path) -> None:
    run, chance, last = folder / "run", random.Random(0), 0
    states = [small(step) for step in range(1, 41)]

    def save_on(start: int) -> None:
        for step in range(start, 41):
            Checkpointer(run, keep=2).save(step, states[step - 1])

    start = time.perf_counter()  # how long a save takes depends on the machine and on what else it does
    Checkpointer(folder / "timed").save(1, states[0])
    one_save = time.perf_counter() - start
    for _ in range(15):
        child = fork(lambda start=last + 1: save_on(start))
        time.sleep(chance.uniform(0, 4 * one_save))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        latest = Checkpointer(run).latest()
        found = check(latest) if latest else 0
        assert found >= last, (found, last)
        last = found
    assert last > 0


def file_size_limit(folder: Path) -> None:
    run = folder / "limited"
    first = Checkpointer(run).save(1, small(1))
    for limit in [100, *(file.stat().st_size - 1 for file in first.iterdir())]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            Checkpointer(run).save(2, small(2))
        except OSError as error:
            assert "File too large" in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(f"a limit of {limit} bytes went unnoticed")
        assert names(run) == ["step-00000001"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert check(first) == 1


def crashes(folder: str) -> None:
    warnings.simplefilter("error")  # latest() warns about a half-written checkpoint
    for function in (crash_everywhere, random_kills, file_size_limit):
        function(Path(folder))


def test_kill_9_at_every_file_operation_and_at_random_moments_and_a_file_size_limit(tmp_path):
    """In one process of its own, which forks those that die: importing torch for each would take minutes."""
    succeed(script("crashes", tmp_path))


# ---- several ranks ----


def sharded(placement, mesh, seed: int) -> dict:
    """A model of DTensors over two ranks and its stepped AdamW; every rank builds the same full values."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 4)
    for name, param in list(model.named_parameters()):
        place = placement if param.dim() == 2 else Replicate()
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [place])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for param in model.parameters():
        param.grad = distribute_tensor(torch.randn(param.shape), mesh, param.placements)
    return {"model": model, "optimizer": optimizer, "loader": Loader()}


def two_ranks(folder: str, rank: str) -> None:
    rank = int(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = sharded(Shard(0), mesh, 1)
    state["optimizer"].step()
    state["loader"].position = 10 + rank
    torch.manual_seed(100 + rank)
    checkpointer = Checkpointer(Path(folder) / "run")
    checkpointer.save(1, state)
    path = checkpointer.save(2, state)
    stream = torch.rand(2)

    other = sharded(Shard(1), mesh, 2)  # other placements, a never-stepped optimizer
    checkpointer.load(path, other)
    assert torch.equal(torch.rand(2), stream) and other["loader"].position == 10 + rank
    for a, b in zip(state["model"].parameters(), other["model"].parameters(), strict=True):
        assert b.placements == ((Shard(1),) if b.dim() == 2 else (Replicate(),))
        assert torch.equal(a.full_tensor(), b.full_tensor())
        slots = state["optimizer"].state[a], other["optimizer"].state[b]
        assert torch.equal(slots[0]["step"], slots[1]["step"])
        assert slots[1]["exp_avg"].placements == b.placements
        assert torch.equal(slots[0]["exp_avg"].full_tensor(), slots[1]["exp_avg"].full_tensor())

    if rank == 1:
        file = path / "__1_0.distcp"
        file.write_bytes(b"x" + file.read_bytes()[1:])
    dist.barrier()
    for broken in (path, Path(folder) / "nowhere"):
        with pytest.raises(ValueError, match=r"__1_0\.distcp does not match .*step-00000001 is intact|is not there"):
            checkpointer.load(broken, other)
    state["loader"].position = object() if rank == 1 else 0  # an error on one rank reaches both
    with pytest.raises(ValueError, match=r"loader\.position has type object"):
        checkpointer.save(3, state)
    if rank == 0:
        torch.save([p.full_tensor() for p in state["model"].parameters()], Path(folder) / "full.pt")
    else:
        [p.full_tensor() for p in state["model"].parameters()]
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_with_dtensors(tmp_path):
    succeed(*[script("two_ranks", tmp_path, rank) for rank in range(2)])
    # One process reads what two ranks wrote: the weights, but not streams and positions that it has no ranks for.
    path, model = tmp_path / "run" / "step-00000001", nn.Linear(6, 4)
    Checkpointer(path.parent).load(path, {"model": model}, rng=False)
    assert equal([p.detach() for p in model.parameters()], torch.load(tmp_path / "full.pt"))
    with pytest.raises(ValueError, match="of 2 ranks and this run has 1; run with 2"):
        Checkpointer(path.parent).load(path, {"model": model})


if __name__ == "__main__":
    {"crashes": crashes, "two_ranks": two_ranks}[sys.argv[1]](*sys.argv[2:])
