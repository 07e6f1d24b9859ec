"""Packing, resuming and splits: the properties of the stream that a training run reads."""

import json
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.train.data import (
    ByteTokenizer,
    PackedLoader,
    Source,
    open_data,
    open_source,
    token_cache,
    validation_batches,
)
from stepgraph.train.data import loader as data_loader
from stepgraph.train.data.sources import SECTION_BYTES, Sections, Stdlib, cut_sections, mix64, shuffled, split_by_hash

EOS = ByteTokenizer.eos_id


class Documents(Source):
    """Documents in memory."""

    name = "documents"

    def __init__(self, texts: list[bytes]):
        self.held, self.size = texts, sum(map(len, texts))
        self.split_by_index(len(texts))

    def read(self, index: int) -> bytes:
        return self.held[index]


texts = st.lists(st.binary(max_size=40), min_size=2, max_size=12)
sizes = {"batch_size": st.integers(1, 4), "seq_len": st.integers(1, 17)}


def loader(source: Source, **options) -> PackedLoader:
    return PackedLoader(source, ByteTokenizer(), **({"batch_size": 2, "seq_len": 8} | options))


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() == {"tokens", "targets"}
    assert all(torch.equal(a[key], b[key]) for key in a)


def stream_of(source: Source, order: np.ndarray) -> list[int]:
    """The stream spelled out one token at a time, as the definition says."""
    return [token for index in order for token in [*source.read(index), EOS]]


def rows_of(source: Source, order: np.ndarray, seq_len: int) -> list[tuple[int, ...]]:
    """Every row of an epoch (T + 1 tokens), unshuffled, the last filled up from the start."""
    stream = stream_of(source, order)
    count = -(-len(stream) // seq_len)
    endless = [EOS, *(stream * (1 + seq_len))]
    return [tuple(endless[i * seq_len : (i + 1) * seq_len + 1]) for i in range(count)]


def epochs_of(packed: PackedLoader, rows: int) -> list[tuple[int, ...]]:
    """The next ``rows`` rows, or some more."""
    read = []
    while len(read) < rows:
        batch = next(packed)
        for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
            assert tokens[1:] == targets[:-1]
            read.append((*tokens, targets[-1]))
    return read


@settings(deadline=None, max_examples=50)
@given(texts=texts, seed=st.integers(-3, 2**70), **sizes)
def test_every_row_comes_once_an_epoch(texts, seed, batch_size, seq_len):
    source = Documents(texts)
    packed = loader(source, seed=seed, batch_size=batch_size, seq_len=seq_len)
    expected = rows_of(source, source.order(source.train), seq_len)
    assert packed.rows_of_an_epoch() == len(expected)
    read = epochs_of(packed, 3 * len(expected))
    for epoch in range(3):
        rows = read[epoch * len(expected) : (epoch + 1) * len(expected)]
        assert Counter(rows) == Counter(expected)


def test_rows_of_one_document_are_spread_over_the_epoch():
    """One long document among others, whose rows would otherwise fill batch after batch."""
    source = Documents([b"a" * 4096, *(b"b" * 64 for _ in range(192))])
    source.train, source.val = np.arange(192), np.array([192])
    orders = []
    packed = loader(source, batch_size=4, seq_len=16)
    for _ in range(3):
        rows = epochs_of(packed, 1024)[:1024]
        places = np.flatnonzero([max(Counter(row).items(), key=lambda item: item[1])[0] == ord("a") for row in rows])
        assert 250 < len(places) < 262
        halves = (places < 512).mean()
        assert 0.4 < halves < 0.6 and np.diff(places).max() < 60
        orders.append(tuple(places))
    assert len(set(orders)) == 3  # each epoch has an order of its own


def test_the_first_epoch_begins_while_later_documents_are_not_tokenized(monkeypatch):
    """Rows are shuffled within buffers then, and the order is the same where the tokens are all there."""
    monkeypatch.setattr(data_loader, "BUFFER_TOKENS", 256)
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 100)
    go_on = threading.Event()

    class Slow(Documents):
        reads = 0

        def read(self, index):
            self.reads += 1
            assert self.reads < 12 or go_on.wait(60)
            return super().read(index)

    texts = [bytes([i]) * 50 for i in range(40)]
    slow, plain = Slow(texts), Documents(texts)
    one, other = loader(slow, batch_size=2, seq_len=8), loader(plain, batch_size=2, seq_len=8)
    other.tokens.start()
    other.tokens.wait(10**9)
    early = [next(one) for _ in range(4)]
    assert not one.tokens._progress()["whole"] and "in the background" in one.tokens.describe()
    go_on.set()
    for batch in early:
        assert_equal(batch, next(other))
    for _ in range(300):
        assert_equal(next(one), next(other))
    assert one.state_dict()["last_row"] == other.state_dict()["last_row"] and one.epoch >= 2


@settings(deadline=None, max_examples=20)
@given(
    texts=texts,
    cut=st.integers(0, 12),
    worlds=st.permutations([1, 2, 3, 4, 6]),
    seq_len=st.integers(1, 9),
)
def test_the_order_is_that_of_any_number_of_ranks_and_resumes_at_any_row(texts, cut, worlds, seq_len):
    source = Documents(texts * 3)
    before, after = worlds[:2]

    def ranks(world):
        options = dict(batch_size=12 // world, seq_len=seq_len, world_size=world)
        return [loader(source, rank=rank, **options) for rank in range(world)]

    def step(loaders):
        parts = [next(one) for one in loaders]
        return {key: torch.cat([part[key] for part in parts]) for key in ("tokens", "targets")}

    (alone,), first, second = ranks(1), ranks(before), ranks(after)
    for _ in range(cut):
        assert_equal(next(alone), step(first))
    states = [json.loads(json.dumps(one.state_dict())) for one in first]
    assert states == [states[0]] * before
    step(second)  # resuming loaders that were used already
    for one in second:
        one.load_state_dict(states[-1])
        assert one.state_dict() == states[0]
    for _ in range(4):
        assert_equal(next(alone), step(second))
    assert alone.state_dict() == second[0].state_dict()


def test_state_of_another_stream_is_refused_and_changes_nothing():
    source = Documents([b"one two", b"three", b"four five", b"six"])
    packed = loader(source)
    next(packed)
    before = packed.state_dict()
    same_shape = Documents([b"one two", b"three", b"FOUR FIVE", b"seven"])
    for other, key in [
        (loader(source, seq_len=9), "seq_len"),
        (loader(source, seed=1), "seed"),
    ]:
        with pytest.raises(ValueError, match=rf"^the saved data position has {key}=.*this run has {key}=.*$"):
            packed.load_state_dict(other.state_dict())
    for state, message in [
        (loader(same_shape).state_dict(), "belongs to another --data, or its content has changed"),
        (before | {"tokenizer": "other"}, "belongs to another --tokenizer"),
        ({"epoch": 0}, "lacks 'row': it belongs to another kind of --data; resume with that kind"),
    ]:
        with pytest.raises(ValueError, match=message):
            packed.load_state_dict(state)
    assert packed.state_dict() == before and len(json.dumps(before)) < 400


def test_documents_changed_under_a_saved_position_are_noticed():
    source = Documents([b"first document"] * 6)  # in the middle, where the fingerprint does not look
    packed = loader(source, batch_size=1, seq_len=40)
    next(packed)
    state = packed.state_dict()
    source.held[1:5] = [b"FIRST DOCUMENT"] * 4
    with pytest.raises(ValueError, match="changed since the data position was saved"):
        loader(source, batch_size=1, seq_len=40).load_state_dict(state)


@settings(deadline=None)
@given(length=st.integers(1, 200), n=st.integers(1, 6), world_size=st.integers(1, 3), **sizes)
def test_validation_batches_are_the_fixed_start_of_the_split_shared_out_to_ranks(
    length, n, world_size, batch_size, seq_len
):
    source = Documents([b"train", bytes(i % 251 for i in range(length))])
    source.train, source.val = np.array([0]), np.array([1])
    stream = stream_of(source, source.val)
    size = batch_size * seq_len
    rounds = min(n, len(stream) // (size * world_size))

    def batches(rank):
        sizes = dict(batch_size=batch_size, seq_len=seq_len)
        return validation_batches(source, ByteTokenizer(), **sizes, n=n, rank=rank, world_size=world_size)

    if not rounds:
        with pytest.raises(ValueError, match=rf"^the validation split of documents has {len(stream)} tokens, .*$"):
            batches(0)
        return
    ranks = [batches(rank) for rank in range(world_size)]
    assert [len(rank) for rank in ranks] == [rounds] * world_size
    joined = [token for round in zip(*ranks, strict=True) for batch in round for token in batch["targets"].flatten()]
    assert joined == stream[: rounds * world_size * size]
    assert ranks[0][0]["tokens"][0, 0] == EOS
    for first, second in zip(ranks[0], batches(0), strict=True):
        assert_equal(first, second)


@settings(deadline=None)
@given(length=st.integers(0, 40), world_size=st.integers(1, 4), **sizes)
def test_the_sizes_that_a_too_small_validation_split_is_offered_do_fit(length, world_size, batch_size, seq_len):
    source = Documents([b"train", b"v" * length])
    source.train, source.val = np.array([0]), np.array([1])
    options = dict(n=1, world_size=world_size)
    try:
        validation_batches(source, ByteTokenizer(), batch_size=batch_size, seq_len=seq_len, **options)
    except ValueError as error:
        offer = str(error).rsplit(": ", 1)[1]
        if length + 1 < world_size:
            assert offer == "use fewer ranks or more text"
            return
        fits = dict(pair.split("=") for pair in offer.removesuffix(" would fit").split(", "))
        sizes = {name: int(value) for name, value in fits.items()}
        assert len(validation_batches(source, ByteTokenizer(), **sizes, **options)) == 1


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=200))
def test_hash_split_is_disjoint_complete_and_never_empty(hashes):
    train, val = split_by_hash(np.array(hashes, dtype=np.uint64))
    assert sorted([*train, *val]) == list(range(len(hashes)))
    assert len(train) and len(val)


def test_index_split_is_about_five_percent_and_stable():
    _, val = split_by_hash(mix64(np.arange(100_000)))
    assert 0.045 < len(val) / 100_000 < 0.055
    assert val[:6].tolist() == [10, 21, 48, 68, 83, 120]  # a change here would move everybody's split
    # More documents do not move the ones that were there.
    _, more = split_by_hash(mix64(np.arange(200_000)))
    assert more[more < 100_000].tolist() == val.tolist()


def test_mix64_is_splitmix64():
    # The first outputs of the reference generator seeded with 0 and with 1234567.
    assert int(mix64(np.array([0]))[0]) == 0xE220A8397B1DCDAF
    assert int(mix64(np.array([1234567]))[0]) == 6457827717110365317


def test_shuffles_differ_by_key_and_keep_blocks_together():
    documents = np.arange(1000)
    a, b = shuffled(documents, 1), shuffled(documents, 2)
    assert sorted(a) == sorted(b) == documents.tolist()
    assert (a == b).mean() < 0.02 and (a == documents).mean() < 0.02
    assert abs(np.corrcoef(a, documents)[0, 1]) < 0.1 and abs(np.corrcoef(a, b)[0, 1]) < 0.1
    blocks = np.repeat(np.arange(10), 100)
    order = shuffled(documents, 3, blocks)
    assert sorted(order) == documents.tolist()
    assert (np.diff(blocks[order]) != 0).sum() == 9  # each block is entered once
    assert blocks[order][::100].tolist() != list(range(10))


@settings(deadline=None)
@given(st.text(min_size=2, max_size=300).map(str.encode).filter(lambda t: len(t) > 1), st.integers(1, 900))
def test_sections_partition_one_document_by_position(text, times):
    text = text * times
    bounds, train, val = cut_sections(text, 0, len(text))
    assert bounds[0] == 0 and bounds[-1] == len(text) and (np.diff(bounds) > 0).all()
    assert [*train, *val] == list(range(len(bounds) - 1))
    assert np.diff(bounds).max() <= 2 * SECTION_BYTES
    val_bytes = len(text) - bounds[val[0]]
    assert 1 <= val_bytes <= 0.05 * len(text) + 2
    if len(text) > 200:
        assert val_bytes >= 0.02 * len(text)
        for at in bounds[1:-1]:
            assert text[at] & 0xC0 != 0x80  # no character is cut


def test_sections_read_back_to_the_document(tmp_path):
    text = b"".join(b"line %d\n" % i for i in range(60_000))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text.decode()}))
    source = open_source(str(tmp_path / "a.jsonl"))
    assert isinstance(source, Sections)
    parts = [source.read(i) for i in range(len(source))]
    assert b"".join(parts) == text and len(parts) > 5
    assert all(part.endswith(b"\n") for part in parts)


def test_stdlib_is_real_text_split_by_file_without_tests_or_packages():
    bundle = open_data("stdlib", "bytes")
    source = bundle.source
    names = [path.as_posix() for path in source._paths]
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert names == sorted(names)
    assert not [name for name in names if "site-packages" in name or "test" in name.split("/")]
    assert set(source.train) | set(source.val) == set(range(len(source))) and not set(source.train) & set(source.val)
    assert 0.02 < len(source.val) / len(source) < 0.1
    with open(json.decoder.__file__, "rb") as file:
        assert source.read(names.index("json/decoder.py")) == file.read()
    expected = f"stdlib: {len(names):,} files, {source.size / 1e6:.1f} MB; {len(source.train)} train / "
    assert bundle.description == expected + f"{len(source.val)} validation"
    assert source.fingerprint == Stdlib().fingerprint


def test_stdlib_split_depends_on_names_only_and_broken_files_are_read_as_bytes(tmp_path):
    for name in ("a.py", "b/c.py", "b/d.py", "e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x = '\xff\xfe'\n")
    for name in ("test/t.py", "b/tests/t.py", "site-packages/p.py", "idlelib/i.py", "config-3.11/c.py", "n.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("left out")
    for name in ("empty.py", "_sysconfigdata__linux_.py"):
        (tmp_path / name).touch()
    source = Stdlib(tmp_path)
    assert [path.as_posix() for path in source._paths] == ["a.py", "b/c.py", "b/d.py", "e.py"]
    assert source.read(1) == b"x = '\xff\xfe'\n"
    next(loader(source))
    before = source.fingerprint
    (tmp_path / "e.py").write_text("longer than it was before\n")
    assert Stdlib(tmp_path).fingerprint != before
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"holds no \*\.py files: use --data FILE\.txt"):
        Stdlib(empty)


def test_loading_is_no_bottleneck():
    bundle = open_data("stdlib", "bytes")
    packed = loader(bundle.source, batch_size=8, seq_len=256)
    rates = []
    for _ in range(3):
        start = time.process_time()  # others may use the processors too
        for _ in range(300):
            next(packed)
        rates.append(300 * 2048 / (time.process_time() - start))
    assert max(rates) > 2e6  # tokens/s; about 1e7 on an idle core, a Python loop over tokens gives 1e6
