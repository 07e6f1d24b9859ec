"""The token cache: written once, whoever writes it and however often that one is killed."""

import errno
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import time

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepgraph.train.data import ByteTokenizer, open_data, open_source, token_cache
from stepgraph.train.data.token_cache import TokenCache

LINES = [f"document {i}: " + "text " * (i % 7) for i in range(400)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return open_source(str(path))


def opened(source, folder):
    return TokenCache(source, ByteTokenizer(), source.train, folder)


def expected(source):
    stream = [token for i in source.train for token in [*source.read(int(i)), ByteTokenizer.eos_id]]
    return [ByteTokenizer.eos_id, *stream]


def everything(cache):
    count, whole = cache.wait(10**9)
    assert whole
    return cache.read(0, count).tolist()


def test_a_second_cache_reads_what_the_first_wrote(source, tmp_path, monkeypatch):
    wanted = expected(source)
    assert everything(opened(source, tmp_path / "c")) == wanted
    monkeypatch.setattr(type(source), "read", lambda *_: pytest.fail("it was tokenized again"))
    again = opened(source, tmp_path / "c")
    assert everything(again) == wanted
    monkeypatch.undo()
    os.truncate(again.folder / "tokens.bin", 99)  # the disk lost what was recorded, as at a power cut
    assert everything(opened(source, tmp_path / "c")) == wanted
    (again.folder / "tokens.bin").unlink()
    assert everything(opened(source, tmp_path / "c")) == wanted
    assert again.describe() == f"{len(wanted):,} tokens in {again.folder}"


def write_anew(path, form, middle):
    """A file or folder at ``path`` whose size, first and last document do not depend on ``middle``, one letter."""
    texts = ["first", *(f"{middle * 10} {i}" for i in range(40)), "last"]
    lone = "a" * 200_000 + middle * 200_000 + "z" * 200_000
    if form == "saved to disk":
        shutil.rmtree(path, ignore_errors=True)
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(path)
        return f"hf:{path}"
    file = path.with_suffix(".parquet" if form == "lone parquet" else ".jsonl")
    if form == "lone parquet":
        pq.write_table(pa.table({"text": [lone]}), file, compression="none")
    else:
        file.write_text("".join(json.dumps({"text": t}) + "\n" for t in ([lone] if form == "lone jsonl" else texts)))
    os.utime(file, ns=(1, ord(middle)))  # clocks of file systems are coarse
    return f"{file},{file}" if form == "twice" else str(file)


@pytest.mark.parametrize("form", ["jsonl", "lone jsonl", "lone parquet", "twice", "saved to disk"])
def test_data_written_anew_is_tokenized_anew(tmp_path, form):
    for middle in "xy":
        source = open_data(write_anew(tmp_path / "data", form, middle)).source
        cache = opened(source, tmp_path / "c")
        assert everything(cache) == expected(source)


def test_another_field_has_tokens_of_its_own(tmp_path):
    rows = [("same", "same"), *((f"text {i}", f"more {i}") for i in range(40)), ("end", "end")]
    table = pa.table({"text": [text for text, _ in rows], "more": [more for _, more in rows]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    for data in ("a.parquet", "a.jsonl", "a.*"):
        for field in ("text", "more"):
            source = open_data(str(tmp_path / data), text_field=field).source
            assert everything(opened(source, tmp_path / "c")) == expected(source)


def test_it_is_told_now_and_then_how_far_it_is(source, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 4000)
    quiet, told = opened(source, tmp_path / "quiet"), []
    quiet.start(told.append)
    everything(quiet)
    quiet.close()
    assert told == []  # 30 s have not gone by
    monkeypatch.setattr(token_cache, "NEWS_S", 0)
    cache = opened(source, tmp_path / "c")
    cache.start(told.append)
    count = len(everything(cache))
    cache.close()
    assert re.fullmatch(rf"data tokenizing in the background, [1-9]\d% done, into {cache.folder}", told[0])
    assert told[-1] == f"data {count:,} tokens in {cache.folder}"
    opened(source, tmp_path / "c").start(lambda _: pytest.fail("it is there"))


def test_data_or_tokens_that_differ_have_caches_of_their_own(source, tmp_path):
    other = ByteTokenizer()
    other.fingerprint = "other"
    folders = {opened(source, tmp_path).folder, TokenCache(source, other, source.train, tmp_path).folder}
    folders.add(TokenCache(source, ByteTokenizer(), source.val, tmp_path).folder)
    os.utime(source.name, ns=(0, 10**18))  # written again in place, with as many bytes
    folders.add(opened(source, tmp_path).folder)
    assert len(folders) == 4


def test_data_written_to_while_they_are_tokenized_are_refused(source, tmp_path):
    cache = opened(source, tmp_path / "c")
    os.utime(source.name, ns=(0, 10**18))
    with pytest.raises(ValueError, match=r"a\.jsonl was written to while it was tokenized: start the run again"):
        cache.wait(1)
    assert everything(opened(source, tmp_path / "c")) == expected(source)


def _write_slowly(path, folder, at_most=None):
    """``at_most``: documents that it reads before it waits to be killed."""
    token_cache.CHUNK_BYTES = 64
    source = open_source(path)
    read, documents = source.read, itertools.count()
    source.read = lambda index: time.sleep(1000 if next(documents) == at_most else 0.002) or read(index)
    everything(opened(source, folder))


def test_killed_at_any_moment_another_writer_goes_on(source, tmp_path, monkeypatch):
    """Two processes want the tokens; the one that writes is killed, again and again, and the other takes over."""
    context, folder = multiprocessing.get_context("fork"), tmp_path / "c"
    wanted, reader = expected(source), opened(source, folder)
    for more in (0, 1, 50, 20):
        aim = reader._progress()["documents"] + more
        writer = context.Process(target=_write_slowly, args=(source.name, folder, 60))
        writer.start()
        while reader._progress()["documents"] < aim:
            assert writer.is_alive()
            time.sleep(0.005)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    documents = reader._progress()["documents"]
    assert 0 < documents < len(source.train)
    with (reader.folder / "tokens.bin").open("ab") as file:  # what a kill left behind the last record
        file.write(b"half of a document")
    seen = []
    read = source.read
    monkeypatch.setattr(source, "read", lambda index: seen.append(index) or read(index))
    assert everything(reader) == wanted
    assert len(seen) == len(source.train) - documents


def test_one_writes_and_the_others_wait_for_it(source, tmp_path):
    folder = tmp_path / "c"
    writer = multiprocessing.get_context("fork").Process(target=_write_slowly, args=(source.name, folder))
    writer.start()
    reader = opened(source, folder)
    while not reader._progress()["tokens"]:
        assert writer.exitcode in (None, 0)
        time.sleep(0.005)
    source.read = lambda index: pytest.fail("two wrote at once")
    assert len(everything(reader)) > 8000
    writer.join()
    assert writer.exitcode == 0 and reader._failure is None


def test_what_goes_wrong_in_the_thread_is_raised_where_tokens_are_needed(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x"} if i != 17 else {"txt": "x"}) + "\n" for i in range(40)))
    source = open_source(str(path))
    with pytest.raises(ValueError, match=r"a\.jsonl:18: no field 'text'"):
        TokenCache(source, ByteTokenizer(), np.arange(40), None).wait(10**9)

    class FullDisk(token_cache.TokenCache):
        def _record(self, *_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full = r"^cannot write the token cache .*: No space left on device; choose another folder by --data-cache$"
    with pytest.raises(OSError, match=full):
        FullDisk(source, ByteTokenizer(), np.arange(10), tmp_path / "full").wait(10**9)
    assert everything(TokenCache(source, ByteTokenizer(), np.arange(10), tmp_path / "full"))  # once there is room
    path.write_text('{"text": "x"}\n' * 100)
    lines = open_source(str(path))  # of which where they begin takes more than their tokens
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # the kernel refuses what lies beyond
    try:
        with pytest.raises(OSError, match=full.replace("No space left on device", "File too large")):
            opened(lines, tmp_path / "full").wait(10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write the token cache .*: Not a directory; choose another folder by"):
        opened(source, tmp_path / "file")
