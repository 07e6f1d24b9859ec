"""Data sets that are read as training goes on: what rows they give, in which order, and from where they go on.

The `datasets` library reads the files of a folder by the code that reads those of the Hub.
"""

import itertools
import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.train.data import (
    ByteTokenizer,
    MixedLoader,
    joined_states,
    lanes,
    open_data,
    open_loader,
    open_parts,
    open_validation,
)
from stepgraph.train.data import streamed_loader as module
from stepgraph.train.data.formats import Streamed
from stepgraph.train.data.lanes import Lane, Reader
from stepgraph.train.data.loader import unigram_entropy, validation_batches

datasets = pytest.importorskip("datasets")
EOS = ByteTokenizer.eos_id


class Texts:
    """``texts`` of each file, in the place of a `Streamed`."""

    name, unit, chat, pairs = "texts", "documents", False, False

    def __init__(self, texts: list[list[bytes]]):
        self.texts, self.files = texts, len(texts)

    def read(self, file, first=0):
        yield from list(enumerate(self.texts[file]))[first:]

    def stamp(self):
        return ""


class Conversations(Texts):
    chat, unit = True, "conversations"


class OddBytesAreTheAssistants(ByteTokenizer):
    def encode_batch(self, documents):
        return [np.where(ids % 2, ids, ~ids) for ids in super().encode_batch(documents)]


def buffers(source, count, *, rows=2, seq_len=5, mark=None):
    tokenizer = OddBytesAreTheAssistants() if source.chat else ByteTokenizer()
    lane = Lane(source, tokenizer, np.arange(source.files), rows, seq_len, 0)
    return list(itertools.islice(lane.buffers(mark, threading.Event()), count))


texts = st.lists(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=5), min_size=1, max_size=3)
sizes = {"rows": st.integers(1, 4), "seq_len": st.integers(1, 9)}


@given(files=texts, **sizes)
@settings(max_examples=40, deadline=None)
def test_each_epoch_is_the_files_in_some_order_document_by_document(files, rows, seq_len):
    epoch = sum(len(text) + 1 for file in files for text in file)
    found = buffers(Texts(files), 2 + 2 * epoch // (rows * seq_len), rows=rows, seq_len=seq_len)
    assert [buffer.mark.number for buffer in found] == list(range(len(found)))
    assert all(one.tokens[-1] == other.tokens[0] for one, other in itertools.pairwise(found))
    tokens = np.concatenate([buffer.tokens[:-1] for buffer in found])
    assert tokens[0] == EOS and len(tokens) > 2 * epoch
    assert (np.concatenate([buffer.begins[:-1] for buffer in found]) == (tokens == EOS)).all()
    spelled = [
        [token for place in order for text in files[place] for token in (EOS, *text)]
        for order in itertools.permutations(range(len(files)))
    ]
    assert tokens[:epoch].tolist() in spelled and tokens[epoch : 2 * epoch].tolist() in spelled


@pytest.mark.filterwarnings("ignore:texts. conversations longer")
@given(files=texts, chat=st.booleans(), number=st.integers(0, 7), **sizes)
@settings(max_examples=60, deadline=None)
def test_a_buffer_is_made_again_from_its_mark(files, chat, number, rows, seq_len):
    if chat:  # each with something to learn within a row
        files = [[b"\x01" + text for text in file] for file in files]
    source = (Conversations if chat else Texts)(files)
    found = buffers(source, number + 3, rows=rows, seq_len=seq_len)
    again = buffers(source, 3, rows=rows, seq_len=seq_len, mark=found[number].mark)
    for one, other in zip(found[number:], again, strict=True):
        assert one.mark == other.mark and one.digest == other.digest
        assert (one.tokens == other.tokens).all() and (one.begins == other.begins).all()


def test_conversations_are_whole_within_rows():
    chats = [[b"\x01" * length for length in (3, 4, 9, 1)]]  # the third is cut to a row
    with pytest.warns(UserWarning, match=r"^texts: conversations longer than seq_len=5 tokens are cut, and"):
        (buffer,) = buffers(Conversations(chats), 1, rows=3, seq_len=5)
    fill = ~EOS
    rows = [1, 1, 1, fill, fill, 1, 1, 1, 1, fill, 1, 1, 1, 1, 1]
    assert buffer.tokens.tolist() == [*rows, 1] and np.flatnonzero(buffer.begins).tolist() == [0, 3, 5, 9, 10, 15]
    with pytest.raises(ValueError, match="nothing of an epoch is to be learned in files 0"):
        buffers(Conversations([[b"\x02\x02"]]), 1)


def test_a_reader_leaves_out_what_is_not_needed_any_more_and_says_what_is_waited_for(monkeypatch):
    gate, told = threading.Event(), []

    class Gated(Texts):
        def read(self, file, first=0):
            gate.wait()
            return super().read(file, first)

    sources = [Gated([[b"slow" * 9]]), Texts([[b"fast" * 9]])]
    reader = Reader(
        lambda n: Lane(sources[n], ByteTokenizer(), np.arange(1), 1, 5, 0), {}, lambda: told.append(gate.set())
    )
    reader.ask(0, 0)
    reader.ask(1, 1)
    monkeypatch.setattr(lanes, "NEWS_S", 0)
    assert reader.buffer(1, 3).mark.number == 3 and told
    assert reader.buffer(0, 1).mark.number == 1 and reader.buffer(1, 4).mark.number == 4
    reader.close()


# --- data sets

streamed = pytest.mark.usefixtures("offline")


def write(folder, files=6, documents=30):
    folder.mkdir()
    for file in range(files):
        column = [f"file {file} document {i} " * (1 + i % 5) for i in range(documents)]
        pq.write_table(pa.table({"id": list(range(documents)), "text": column}), folder / f"train-{file:02}.parquet")
    return f"hf-stream:{folder}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("streamed") / "set")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(module, "BUFFER_TOKENS", 1024)  # 4 lanes of 16 rows of 16


def loader(data, **options):
    bundle = open_data(data)
    return open_loader(bundle.source, bundle.tokenizer, **({"batch_size": 2, "seq_len": 16} | options))


def rows_of(*batches):
    return sorted(tuple(row) for batch in batches for row in batch["tokens"].tolist())


def refusal(call, *arguments, **options):
    with pytest.raises(ValueError) as refused:
        call(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@streamed
def test_rows_of_a_step_are_those_of_any_number_of_ranks_which_share_the_files(data):
    whole = loader(data, batch_size=8)
    ranks = [loader(data, rank=rank, world_size=4) for rank in range(4)]
    read = [set() for _ in ranks]
    for rank, seen in zip(ranks, read, strict=True):
        inner = rank._source.read
        rank._source.read = lambda file, first=0, inner=inner, seen=seen: seen.add(file) or inner(file, first)
    for _ in range(20):
        assert rows_of(next(whole)) == rows_of(*(next(rank) for rank in ranks))
    assert read == [{0, 4}, {1, 5}, {2}, {3}]
    for one in (whole, *ranks):
        one.close()


@streamed
@pytest.mark.parametrize("buffer, world", [(64, 3), (64, 5), (1024, 3)])  # of 1 row each lane: some are passed over
def test_ranks_that_change_lanes_read_the_rows_of_one(data, monkeypatch, buffer, world):
    monkeypatch.setattr(module, "BUFFER_TOKENS", buffer)
    whole = loader(data, batch_size=world)
    ranks = [loader(data, batch_size=1, rank=rank, world_size=world) for rank in range(world)]
    for one in (whole, *ranks):
        one.start()
    for _ in range(25):
        assert rows_of(next(whole)) == rows_of(*(next(rank) for rank in ranks))
    for one in (whole, *ranks):
        one.close()


@streamed
def test_rows_are_shuffled_and_another_seed_has_another_order(data):
    one, again, other = (loader(data, seed=seed, batch_size=64) for seed in (0, 0, 1))
    first, same, different = next(one), next(again), next(other)
    assert torch.equal(first["tokens"], same["tokens"]) and not torch.equal(first["tokens"], different["tokens"])
    begins = [bytes(t for t in row if t < EOS)[:6] for row in first["tokens"][:16].tolist()]
    assert begins != sorted(begins)


@streamed
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 9, 21])
def test_it_goes_on_at_any_row_on_any_number_of_ranks_and_reads_nothing_again(data, steps, world):
    ranks = [loader(data, batch_size=4, rank=rank, world_size=2, positions=True) for rank in range(2)]
    for _ in range(steps):
        list(map(next, ranks))
    saved = json.loads(json.dumps(joined_states([rank.state_dict() for rank in ranks])))
    others = [loader(data, batch_size=8 // world, rank=rank, world_size=world, positions=True) for rank in range(world)]
    for other in others:
        inner = other._source.read
        other._source.read = lambda file, first=0, inner=inner: seen.append((file, first)) or inner(file, first)
    seen = []
    for other in others:
        other.load_state_dict(saved)
        other.ready()
    marks = {tuple(mark[1:4]) for mark in saved["marks"].values()}  # (epoch, place of a file, row)
    assert steps < 9 or all(row for _, _, row in marks)
    assert {row for _, row in seen} <= {row for *_, row in marks} | {0}
    for _ in range(12):
        expected, found = [next(rank) for rank in ranks], [next(other) for other in others]
        assert rows_of(*expected) == rows_of(*found)
        if world == 2:
            assert all(torch.equal(a[k], b[k]) for a, b in zip(expected, found, strict=True) for k in a)
    for one in (*ranks, *others):
        one.close()


@streamed
def test_what_changed_is_not_gone_on_with(tmp_path):
    data = write(tmp_path / "set", files=1)
    one = loader(data)
    next(one)
    saved = one.state_dict()
    assert not one.rewritten()
    assert "has seq_len=16, this run has seq_len=8" in refusal(loader(data, seq_len=8).load_state_dict, saved)
    assert "lacks 'rows'" in refusal(loader(data).load_state_dict, {"epoch": 0, "row": 0})
    column = ["other text " * 5] * 30
    pq.write_table(pa.table({"id": list(range(30)), "text": column}), tmp_path / "set" / "train-00.parquet")
    assert one.rewritten()
    another = loader(data)
    assert (
        refusal(another.load_state_dict, saved) == "the documents of --data changed since the data position was saved"
    )
    before = next(another)["tokens"]
    assert "other" in bytes(t for t in before.flatten().tolist() if t < EOS).decode()


@streamed
def test_validation_is_held_out_or_the_sets_own(data, tmp_path):
    source = open_data(data).source
    held = list(source.texts("val"))
    trained = [text for file in range(source.files) for _, text in source.read(file)]
    assert len(held) + len(trained) == 180 and 2 <= len(held) <= 20 and not set(held) & set(trained)
    assert sorted(source.texts(None)) == sorted(held + trained)
    write(tmp_path / "own", files=2)
    pq.write_table(pa.table({"id": [0], "text": ["held out " * 20]}), tmp_path / "own" / "validation.parquet")
    own = open_data(f"hf-stream:{tmp_path}/own")
    assert "its own validation split" in own.description and list(own.source.texts("val")) == [b"held out " * 20]
    assert len([text for file in range(2) for _, text in own.source.read(file)]) == 60
    (batch,) = validation_batches(own.source, own.tokenizer, batch_size=1, seq_len=64, n=1)
    assert bytes(batch["tokens"][0, 1:].tolist()).startswith(b"held out held")
    (part,) = open_validation(data)
    assert len(list(part.source.texts("val"))) == 180
    assert 2 < unigram_entropy(source, ByteTokenizer()) < 4


@streamed
def test_messages_are_conversations(tmp_path):
    chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!", "name": None}]
             for i in range(40)]  # fmt: skip
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"messages": chats}), tmp_path / "set" / "train.parquet")
    for form in (f"hf-stream:{tmp_path}/set", f"hf:{tmp_path}/set", f"{tmp_path}/set/train.parquet"):
        (part,) = open_parts(form)
        assert part.source.chat and part.source.unit == "conversations"
        expected = [[{k: v for k, v in message.items() if v} for message in chat] for chat in chats]
        assert sorted(map(json.loads, part.source.texts(None)), key=str) == sorted(expected, key=str)
        assert "bytes have no chat template" in refusal(open_data, form)
    pq.write_table(pa.table({"messages": chats[:1]}), tmp_path / "one.parquet")
    assert "holds one conversation" in refusal(open_parts, f"{tmp_path}/one.parquet")


@streamed
def test_in_a_mixture_it_gives_its_share(data, tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>".join("plain " * 20 for _ in range(30)))
    bundle = open_data(f"{data}:3,{tmp_path}/a.txt:1")
    assert bundle.description.startswith("75.0% hf-stream:")
    sizes = {"batch_size": 4, "seq_len": 16, "cache": tmp_path / "tokens"}
    mixed = MixedLoader(list(bundle.parts), bundle.tokenizer, **sizes)
    rows = [next(mixed) for _ in range(6)]
    plain = sum(b"plain" in bytes(t for t in row if t < EOS) for b in rows for row in b["tokens"].tolist())
    assert plain == 6
    again = MixedLoader(list(bundle.parts), bundle.tokenizer, **sizes)
    again.load_state_dict(json.loads(json.dumps(joined_states([mixed.state_dict()]))))
    for _ in range(4):
        assert torch.equal(next(mixed)["tokens"], next(again)["tokens"])
    for one in (mixed, again):
        one.tokens.close()


@streamed
def test_what_cannot_be_read_is_one_line(data, tmp_path):
    folder = data.removeprefix("hf-stream:")
    assert "no field 'body' (it has id, text): name the one" in refusal(open_parts, data, "body")
    assert "joins no others, as its end is far: give weights" in refusal(
        open_parts, f"{data},{folder}/train-00.parquet"
    )
    assert "cannot load hf-stream:./no/such" in refusal(open_parts, "hf-stream:./no/such")
    assert "give hf-stream:NAME or hf-stream:NAME:CONFIG" in refusal(open_parts, "hf-stream:nobody/has-this:config")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "disk")
    assert f"give hf:{tmp_path}/disk" in refusal(open_parts, f"hf-stream:{tmp_path}/disk")
    (tmp_path / "test.jsonl").write_text('{"text": "a"}\n')
    assert "has the splits test: a split named train is needed" in refusal(open_parts, f"hf-stream:{tmp_path}")

    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "train-0.jsonl").write_text('{"text": "a"}\n' * 9)
    (bad / "train-1.jsonl").write_text('{"text": \n')
    broken = loader(f"hf-stream:{bad}")
    assert "file 1 cannot be read on (" in refusal(lambda: next(broken))
    assert "row 1: 'text' is NoneType" in refusal(lambda: list(Streamed(str(nulls(tmp_path)), "text").texts(None)))


def nulls(folder):
    (folder / "nulls").mkdir()
    pq.write_table(pa.table({"text": ["a", None]}), folder / "nulls" / "train.parquet")
    return folder / "nulls"
