"""Entries of a folder: whole or not used, from trusted hands or not read, and never a reason to end a run."""

import errno
import functools
import os
import shutil
import threading

import pytest
import torch

from stepgraph.run.saved.folder import MOST_ENTRIES, DamagedEntry, Folder, UnsafeFolder, cache_folder
from stepgraph.train.data.token_cache import default_folder
from tests.run.saved.test_programs import Small, run, same
from tests.run.saved.test_programs import start as start_of

FILES = {"program.json": b'{"a": 1}', "piece": bytes(range(256))}
PARTS = {"graph": {"text": "abc"}, "mesh": {"ranks": 1}}


def start(saved, **options):
    return start_of(saved, model=Small, **options)


@pytest.fixture
def folder(tmp_path):
    """A folder with one entry."""
    folder = Folder(tmp_path / "steps", given=False)
    folder.write("step-1", PARTS, FILES)
    return folder


def test_an_entry_comes_back_as_it_was_written(folder):
    entry = folder.read("step-1")
    assert (entry.parts, entry.files) == (PARTS, FILES)
    assert folder.read("step-2") is None and folder.names() == ["step-1"]


@pytest.mark.parametrize("file", ["manifest.json", *FILES])
def test_one_flipped_bit_anywhere_is_refused(folder, file):
    path = folder.path / "step-1" / file
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(DamagedEntry, match=file):
            folder.read("step-1")
    path.write_bytes(whole)
    assert folder.read("step-1").files == FILES


@pytest.mark.parametrize("file", ["manifest.json", *FILES])
def test_a_file_that_is_cut_or_gone_is_refused(folder, file):
    path = folder.path / "step-1" / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedEntry):
        folder.read("step-1")
    path.unlink()
    with pytest.raises(DamagedEntry, match="No such file"):
        folder.read("step-1")


def test_a_named_folder_is_shared_as_the_umask_says(tmp_path):
    umask = os.umask(0o022)
    try:
        for given, mode in ((True, 0o755), (False, 0o700)):
            folder = Folder(tmp_path / str(given), given)
            folder.write("step-1", PARTS, FILES)
            for path in (folder.path, folder.path / "step-1"):
                assert path.stat().st_mode & 0o777 == mode, path
    finally:
        os.umask(umask)


@pytest.mark.parametrize("where", ["", "step-1"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_what_others_may_write_is_read_only_if_the_folder_is_named(folder, where, mode):
    os.chmod(folder.path / where, mode)
    with pytest.raises(UnsafeFolder, match="may have been written by others"):
        folder.read("step-1")
    assert Folder(folder.path, given=True).read("step-1").files == FILES


def test_a_link_in_the_place_of_the_folder_is_refused(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(UnsafeFolder):
        Folder(tmp_path / "link", given=False).read("step-1")


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeFolder):
        folder.read("step-1")


def test_of_two_writers_one_is_kept_whole(tmp_path):
    """Each writes the same key with bytes of its own: whoever is kept, no entry mixes the two."""
    folder, n = Folder(tmp_path, given=False), 8

    def write(i):
        for k in range(10):
            folder.write(f"step-{k}", PARTS, {name: bytes([i]) * 500 for name in FILES})

    writers = [threading.Thread(target=write, args=(i,)) for i in range(n)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(os.listdir(tmp_path)) == sorted(f"step-{k}" for k in range(10))
    for k in range(10):
        assert len(set(folder.read(f"step-{k}").files.values())) == 1


def test_a_writer_that_was_killed_leaves_nothing_that_is_read(folder):
    aside = folder.path / ".writing-gone"
    aside.mkdir()
    (aside / "program.json").write_bytes(b"half")
    assert folder.names() == ["step-1"]
    os.utime(aside, (0, 0))
    folder.write("step-2", PARTS, FILES)
    assert not aside.exists()


def test_the_automatic_folder_is_bounded_and_forgets_what_was_not_used(folder):
    for i in range(2, MOST_ENTRIES + 3):
        (folder.path / f"step-{i}").mkdir()
        os.utime(folder.path / f"step-{i}", (i, i))
    folder.read("step-1")
    folder.write("step-0", PARTS, FILES)
    names = os.listdir(folder.path)
    assert len(names) == MOST_ENTRIES and {"step-0", "step-1"} < set(names) and "step-2" not in names


def test_the_automatic_folder_is_named_by_the_environment(monkeypatch, tmp_path):
    assert cache_folder() is None  # as all tests have it
    monkeypatch.setenv("STEPGRAPH_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("STEPGRAPH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "stepgraph" / "steps"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, tmp_path):
    """As in a container that runs as a number."""

    def nobody(_):
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for variable in ("HOME", "STEPGRAPH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for folder in (cache_folder, default_folder):
        with pytest.raises(ValueError, match="no home folder; set HOME, or XDG_CACHE_HOME to"):
            folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (cache_folder(), default_folder()) == tuple(tmp_path / "stepgraph" / name for name in ("steps", "tokens"))


def test_a_damaged_step_is_told_made_again_and_replaced(tmp_path):
    start(tmp_path)
    for entry in tmp_path.glob("step-*"):
        file = entry / "program"
        file.write_bytes(file.read_bytes().replace(b"aten.mul", b"aten.add", 1))
    step, model = start(tmp_path)
    assert step.saved.loaded is False and "not used: " in step.saved.notes[0]
    assert same(run(*start(None)), run(step, model))
    assert len(step.saved.notes) == 1
    loaded = start(tmp_path)[0].saved
    assert loaded.loaded, loaded.notes


def test_an_entry_under_another_name_is_told_and_replaced(tmp_path):
    """Each byte is what was written, but of a step with another eps."""
    start(tmp_path, optimizer=functools.partial(torch.optim.AdamW, eps=0.1))
    (other,) = tmp_path.iterdir()
    start(tmp_path)
    (own,) = set(tmp_path.iterdir()) - {other}
    shutil.rmtree(own)
    shutil.copytree(other, own)
    step, model = start(tmp_path)
    assert not step.saved.loaded and all("holds another step" in note for note in step.saved.notes)
    assert same(run(*start(None)), run(step, model))
    assert start(tmp_path)[0].saved.loaded


def test_a_miss_in_a_named_folder_says_in_what_the_nearest_step_differs(tmp_path, monkeypatch):
    """The automatic folder holds the steps of all models, where a miss is no news."""
    monkeypatch.setenv("STEPGRAPH_CACHE", str(tmp_path / "cache"))
    for saved in ("auto", tmp_path / "named"):
        notes = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            notes += start(saved)[0].saved.notes
        torch.set_num_threads(1)
        assert notes == ([] if saved == "auto" else ["no saved step fits; the nearest differs in device (threads)"])


def test_a_place_that_is_no_folder_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPGRAPH_CACHE", "~/file")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "file"
    for place in (tmp_path / "file", tmp_path / "file" / "steps"):
        for given in (True, False):
            folder = Folder(place, given)
            assert folder.names() == [] and folder.read("step-1") is None
            with pytest.raises(OSError):
                folder.write("step-1", PARTS, FILES)
    with pytest.warns(UserWarning, match="the step is not saved in .*file"):
        step, model = start(tmp_path / "file")
    assert same(run(*start(None)), run(step, model))


def test_a_full_disk_costs_a_warning(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="not saved in .*: No space left on device"):
        patch.setattr(os, "fsync", full)
        step, model = start(tmp_path)
    assert step.saved.kept is None and os.listdir(tmp_path) == []
    assert same(run(*start(None)), run(step, model))
    assert start(tmp_path)[0].saved.loaded is False and start(tmp_path)[0].saved.loaded
