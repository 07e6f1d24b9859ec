"""Checkpoints that a thread writes while the state goes on changing: they hold the state as it was."""

import copy
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepgraph import parallel
from stepgraph.parallel import MeshSpec
from stepgraph.train.checkpoint import background, checkpointer
from stepgraph.train.checkpoint.background import BackgroundSaves
from stepgraph.train.checkpoint.checkpointer import Checkpointer, tensors_of
from stepgraph.train.checkpoint.files import dcp_save
from tests.train.checkpoint.cases import build, contents, equal, script, seed_all, succeed, train


@pytest.fixture
def saves(tmp_path):
    seed_all(0)
    return BackgroundSaves(Checkpointer(tmp_path / "run" / "checkpoints"))


def held(monkeypatch):
    """An event that writing waits for."""
    go, write = threading.Event(), checkpointer.dcp_save

    def waits(*args):
        assert go.wait(30)
        write(*args)

    monkeypatch.setattr(checkpointer, "dcp_save", waits)
    return go


def test_what_is_written_is_the_state_as_it_was(saves, monkeypatch):
    go, state = held(monkeypatch), build(1)
    train(state, 1)
    as_it_was = copy.deepcopy(contents(state))
    assert saves.begin(1, state) < 5
    train(state, 2)  # while it is written
    state["trainer"]["tokens"] = 0
    assert saves.check() == [] and saves.checkpointer.latest() is None
    go.set()
    saves.finish()
    (line,) = saves.check()
    assert re.fullmatch(r"checkpoint of step 1: the run waited \d+\.\d\d s, written in \d+\.\d s", line)
    other = build(5)
    saves.checkpointer.load(saves.checkpointer.folder, other)
    assert equal(contents(other), as_it_was)


def test_writing_does_not_wait_for_a_gpu(tmp_path, monkeypatch):
    """DCP would wait for the GPU's work where there is one, although what it writes is on the CPU."""

    class Waits:
        def __init__(self, *_, **__):
            raise AssertionError("it waits for a stream")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dcp.filesystem, "_OverlappingCpuLoader", Waits)
    (tmp_path / "one").mkdir()
    dcp_save({"a": torch.ones(3)}, tmp_path / "one", None)
    assert (tmp_path / "one" / ".metadata").exists()


def test_one_is_written_at_a_time_into_the_same_copies(saves, monkeypatch):
    state, copies = build(1), {}
    for step in (1, 2, 3):
        train(state, 1)
        saves.begin(step, state)
        copies = copies or {name: tensor.data_ptr() for name, tensor in saves._copies.items()}
    saves.finish()
    assert {name: tensor.data_ptr() for name, tensor in saves._copies.items()} == copies
    assert [path.name for path in sorted(saves.checkpointer.folder.iterdir())] == [
        f"step-0000000{n}" for n in (1, 2, 3)
    ]
    assert len(saves.check()) == 3


def test_memory_is_taken_before_the_first_save(saves):
    state = build(1)
    train(state, 1)  # the optimizer has its state
    saves.prepare(state)
    saves._preparing.join()
    (line,) = saves.check()
    assert re.fullmatch(r"host memory for copies of the state: \d+\.\d\d GiB, ready after \d+\.\d s", line)
    taken = {name: tensor.data_ptr() for name, tensor in saves._copies.items()}
    saves.begin(1, state)
    saves.finish()
    assert taken and {name: tensor.data_ptr() for name, tensor in saves._copies.items()} == taken
    other = build(5)
    saves.checkpointer.load(saves.checkpointer.folder, other)
    assert equal(contents(other), contents(state))
    assert len(saves.check()) == 1
    saves.prepare(state)  # all is there
    saves.finish()
    assert saves.check() == []


def test_memory_for_shards_is_taken_as_plain_tensors(saves, monkeypatch):
    """What operators on DTensors take long for, with Python's lock held, the run's thread would wait for."""
    made, empty_like = [], torch.empty_like
    with parallel.started(MeshSpec.parse("fsdp=1"), "cpu"):
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        one, other = (torch.nn.Linear(5, 3) for _ in range(2))
        for layer in (one, other):
            for name, param in list(layer.named_parameters()):
                shard = distribute_tensor(param.detach(), mesh, [Shard(0)])
                setattr(layer, name, torch.nn.Parameter(shard))
        monkeypatch.setattr(background.torch, "empty_like", lambda x, **how: (made.append(x), empty_like(x, **how))[1])
        saves.prepare({"model": one})
        saves._preparing.join()
        assert len(made) == 2 and not any(isinstance(tensor, DTensor) for tensor in made)
        assert all(isinstance(copy, DTensor) for copy in saves._copies.values())
        saves.begin(1, {"model": one})
        saves.finish()
        assert len(made) == 2
        saves.checkpointer.load(saves.checkpointer.folder, {"model": other}, rng=False)
        for name, param in one.named_parameters():
            assert torch.equal(param.to_local(), other.get_parameter(name).to_local())


def slow_memory(monkeypatch):
    """(an event that is set once memory is taken, one that taking more than one tensor's waits for)."""
    taking, go, empty_like = threading.Event(), threading.Event(), torch.empty_like

    def waits(*args, **kwargs):
        if taking.is_set():
            assert go.wait(30)
        taking.set()
        return empty_like(*args, **kwargs)

    monkeypatch.setattr(background.torch, "empty_like", waits)
    return taking, go


def test_a_save_waits_for_the_memory_that_is_being_taken(saves, monkeypatch):
    taking, go = slow_memory(monkeypatch)
    state = build(1)
    train(state, 1)
    saves.prepare(state)
    assert taking.wait(30)
    threading.Timer(0.3, go.set).start()
    assert saves.begin(1, state) > 0.2
    saves.finish()
    assert saves.checkpointer.latest().name == "step-00000001"


def test_the_end_of_a_run_does_not_wait_for_all_the_memory(saves, monkeypatch):
    taking, go = slow_memory(monkeypatch)
    state = build(1)
    train(state, 1)
    saves.prepare(state)
    assert taking.wait(30)
    saves._enough.set()  # what `finish` sets first; here before the second tensor
    go.set()
    saves.finish()
    assert len(saves._copies) <= 2 < len(tensors_of(state)) and saves.check() == []
    saves.begin(1, state)  # takes what is missing
    saves.finish()
    assert saves.checkpointer.latest().name == "step-00000001"


def test_what_goes_wrong_reaches_the_run(saves, monkeypatch):
    state = build(1)
    train(state, 1)
    saves.begin(1, state)
    saves.finish()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointer, "dcp_save", full)
    saves.begin(2, state)
    saves._thread.join()
    with pytest.raises(OSError, match=r"cannot write .*step-00000002: .*No space.*; earlier checkpoints are"):
        saves.check()
    assert saves.checkpointer.latest().name == "step-00000001"
    saves.finish()  # told once


def test_a_host_without_room_is_told(saves, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       0 kB\n")
    monkeypatch.setattr(background, "_MEMORY", tmp_path / "meminfo")
    with pytest.raises(
        MemoryError, match=r"a copy of the state takes 0\.00 GiB of host memory per rank, 0\.00 are free"
    ):
        saves.begin(1, build(1))


def test_memory_that_cannot_be_taken_ahead_is_told_at_the_save(saves, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("CUDA error: out of memory\nmore of it")

    monkeypatch.setattr(background.torch, "empty_like", refused)
    state = build(1)
    saves.prepare(state)
    saves._preparing.join()
    assert saves.check() == []
    with pytest.raises(MemoryError, match=r"^no host memory for a copy of the state: CUDA error: out of memory$"):
        saves.begin(1, state)


def save_again_and_again(folder, said):
    """Train, and save behind it, for ever; write the step of each save that was begun to ``said``."""
    seed_all(0)
    state, saves = build(1), BackgroundSaves(Checkpointer(folder, keep=2))
    for step in range(1, 10_000):
        train(state, 1)
        saves.begin(step, state)
        os.write(said, step.to_bytes(4, "little"))
        time.sleep(0.01)


def kills(folder, count):
    """Kill -9 a process that saves behind its training: what is there loads, and is what training gives."""
    moments = random.Random(0)
    for number in range(int(count)):
        run, (read, said) = Path(folder) / f"{number}", os.pipe()
        if (child := os.fork()) == 0:
            save_again_and_again(run, said)
        os.close(said)
        for _ in range(3):
            begun = int.from_bytes(os.read(read, 4), "little")
        time.sleep(moments.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while word := os.read(read, 4):
            begun = int.from_bytes(word, "little")
        os.close(read)
        newest = Checkpointer(run).latest()
        step = int(newest.name[5:])
        assert begun - 2 <= step <= begun + 1, (step, begun)
        seed_all(0)
        expected = build(1)
        train(expected, step)
        loaded = build(3)
        Checkpointer(run).load(newest, loaded)
        assert equal(contents(loaded), contents(expected)), step


def test_kill_9_leaves_the_previous_one_whole(tmp_path):
    succeed(script(__file__, "kills", tmp_path, 5))


@pytest.mark.long
def test_kill_9_at_fifty_random_moments_leaves_the_previous_one_whole(tmp_path):
    succeed(script(__file__, "kills", tmp_path, 50))


if __name__ == "__main__":
    {"kills": kills}[sys.argv[1]](*sys.argv[2:])
