"""Positions within documents: where rows, epochs, ranks and caches put what a document mask needs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.train.data import ByteTokenizer, MixedLoader, PackedLoader, Part, token_cache, validation_batches
from stepgraph.train.data.token_cache import Rows, TokenCache, positions_in_documents
from tests.train.data.test_data import Documents


class Ambiguous(ByteTokenizer):
    """Its end of text is a byte that texts have too, so that only the boundaries themselves tell where one ends."""

    eos_id = 65


texts = st.lists(st.binary(max_size=30).map(lambda text: text.replace(b"B", b"A")), min_size=2, max_size=10)


def rows_of(source, order, seq_len):
    """Each row of an epoch, spelled out: its T tokens, and each one's place behind the beginning of its document."""
    one_round = [(token, place) for i in order for place, token in enumerate([*source.read(i), 65], 1)]
    one_round = [(token, 0 if place == len(source.read(i)) + 1 else place) for (token, place), i in
                 zip(one_round, [i for i in order for _ in range(len(source.read(i)) + 1)], strict=True)]  # fmt: skip
    endless = [(65, 0), *(one_round * (1 + seq_len))]
    for first in range(0, len(one_round), seq_len):
        row = endless[first : first + seq_len]
        yield [token for token, _ in row], [min(place, at) for at, (_, place) in enumerate(row)]


def pairs(batch):
    return list(zip(batch["tokens"].tolist(), batch["positions"].tolist(), strict=True))


@settings(max_examples=20, deadline=None)
@given(texts, st.integers(1, 3), st.integers(1, 17), st.integers(0, 3))
def test_positions_are_those_of_the_documents(texts, batch_size, seq_len, seed):
    """Over two epochs the same rows; on two ranks those of one."""
    source = Documents(texts)
    options = {"batch_size": batch_size, "seq_len": seq_len, "positions": True}
    order = source.order(source.documents("train"))
    wanted = sorted(rows_of(source, order, seq_len))
    shuffled = PackedLoader(source, Ambiguous(), **options, seed=seed)
    batches = [next(shuffled) for _ in range(2 * len(wanted) + 3)]
    found = [pair for batch in batches for pair in pairs(batch)]
    assert sorted(found[: len(wanted)]) == wanted == sorted(found[len(wanted) : 2 * len(wanted)])

    ranks = [PackedLoader(source, Ambiguous(), **options, seed=seed, rank=r, world_size=2) for r in range(2)]
    assert [pair for rank in ranks for pair in pairs(next(rank))] == found[: 2 * batch_size]
    bare = PackedLoader(source, Ambiguous(), batch_size=batch_size, seq_len=seq_len, seed=seed)
    bare.load_state_dict(ranks[0].state_dict())  # a run may begin or end to mask documents
    ranks[0].load_state_dict(bare.state_dict())
    after = next(ranks[0])
    assert torch.equal(next(bare)["tokens"], after["tokens"]) and pairs(after) == found[2 * batch_size :][:batch_size]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=12), st.integers(2, 10), st.data())
def test_conversations_and_what_fills_their_rows_begin_anew(lengths, seq_len, data):
    """However they are handed over."""
    documents, rows, rest = (
        [np.array([~1, *[number] * (n - 1)], np.int32) for number, n in enumerate(lengths)],
        None,
        [],
    )
    rows, rest = Rows(5, seq_len), list(documents)
    while rest:
        take = data.draw(st.integers(1, len(rest)))
        rows.add(rest[:take])
        rest = rest[take:]
    rows.close()
    wanted, at = [], 0
    for n in [min(n, seq_len) for n in lengths if n > 1]:
        room = -at % seq_len
        if n > room and room:
            wanted.append(at)
            at += room
        wanted.append(at)
        at += n
    assert rows.begins == ([*wanted, at] if wanted else [])


def test_a_killed_writer_leaves_begins_that_the_next_one_goes_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 50)
    source = Documents([b"x" * (i % 11) for i in range(300)])
    whole = TokenCache(source, ByteTokenizer(), source.train)
    count, _ = whole.wait(10**9)
    wanted = whole.begins(0, count)

    class Stops(Documents):
        reads = 0

        def read(self, index):
            self.reads += 1
            if self.reads == 100:
                raise OSError("killed")
            return super().read(index)

    first = TokenCache(Stops(source.held), ByteTokenizer(), source.train, tmp_path)
    with pytest.raises(OSError, match="killed"):
        first.wait(10**9)
    first.close()
    with (first.folder / "begins.bin").open("ab") as file:
        file.write(b"behind the last record")
    second = TokenCache(source, ByteTokenizer(), source.train, tmp_path)
    second.wait(count)
    assert np.array_equal(second.begins(0, count), wanted) and np.array_equal(second.begins(7, 60), wanted[7:60])
    assert np.array_equal(np.flatnonzero(wanted), np.flatnonzero(second.read(0, count) == ByteTokenizer.eos_id))
    (second.folder / "begins.bin").write_bytes(b"")  # the disk lost what was recorded
    third = TokenCache(source, ByteTokenizer(), source.train, tmp_path)
    third.wait(count)
    assert np.array_equal(third.begins(0, count), wanted)


def test_mixtures_and_validation_have_positions_too():
    sources = [Documents([bytes([65 + k]) * (5 + i) for i in range(20)]) for k in (1, 2)]
    mixed = next(MixedLoader([Part(s, str(k), 0.5) for k, s in enumerate(sources)], ByteTokenizer(), batch_size=4,
                             seq_len=30, positions=True))  # fmt: skip
    (fixed,) = validation_batches(sources[0], ByteTokenizer(), n=1, batch_size=1, seq_len=5, positions=True)
    for batch in (mixed, fixed):
        ends = (batch["tokens"] == ByteTokenizer.eos_id).numpy()
        assert np.array_equal(batch["positions"].numpy(), positions_in_documents(ends))
        assert batch["positions"].dtype == torch.int64 and ends.any()
