"""Which checkpoints are kept, and that a crash at any moment leaves the previous one whole.

Run as a script, this file is the process that crashes: ``python test_checkpoint_crashes.py crashes FOLDER``.
"""

import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from stepgraph.train.checkpoint.checkpointer import Checkpointer
from tests.train.checkpoint.cases import FILES, Loader, Tiny, build, contents, equal, script, succeed


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


def test_those_of_keep_every_stay_and_damaged_ones_take_no_place(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2, keep_every=10)
    for step in (5, 10, 12, 15):
        checkpointer.save(step, {"model": Tiny()})
    assert names(tmp_path) == ["step-00000010", "step-00000012", "step-00000015"]
    os.truncate(tmp_path / "step-00000015/__0_0.distcp", 10)
    checkpointer.save(20, {"model": Tiny()})
    assert names(tmp_path) == ["step-00000010", *(f"step-000000{step}" for step in (12, 15, 20))]
    (tmp_path / "step-00000099").touch()  # which is no checkpoint
    checkpointer.rewind(12, lambda: None)
    assert len(names(tmp_path)) == 5
    checkpointer.settle()
    assert names(tmp_path) == ["step-00000010", "step-00000012", "step-00000099"]


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


def small(step: int) -> dict:
    """The state that a checkpoint of ``step`` must hold, built from the step alone."""
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "loader": Loader(), "trainer": {"step": step}}


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
            checked = {visible: check(visible) for visible in run.glob("step-*")}  # none half written or half deleted
            found = checked.get(Checkpointer(run).latest())
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
        if found == last:
            one_save *= 1.5  # the machine has become slower since
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
    succeed(script(__file__, "crashes", tmp_path))


if __name__ == "__main__":
    {"crashes": crashes}[sys.argv[1]](*sys.argv[2:])
