"""Data sets that are read as training goes on: what rows they give, in which order, and from where they go on.

The `datasets` library reads the files of a folder by the code that reads those of the Hub.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from stepgraph.train.data import (
    ByteTokenizer,
    MixedLoader,
    PackedLoader,
    loader,
    open_data,
    open_parts,
    open_validation,
    token_cache,
)
from stepgraph.train.data.formats.hub import Streamed
from stepgraph.train.data.loader import validation_batches

datasets = pytest.importorskip("datasets")
EOS = ByteTokenizer.eos_id
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
    monkeypatch.setattr(loader, "BUFFER_TOKENS", 1024)
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 200)


def opened(data, **options):
    bundle = open_data(data)
    return PackedLoader(bundle.source, bundle.tokenizer, **({"batch_size": 2, "seq_len": 16} | options))


def text_of(batches):
    return "".join(bytes(t for t in row if t < EOS).decode() for b in batches for row in b["tokens"].tolist())


def refusal(call, *arguments, **options):
    with pytest.raises(ValueError) as refused:
        call(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@streamed
def test_an_epoch_has_each_training_document_once_and_files_in_an_order_of_their_own(data):
    one, source = opened(data, batch_size=1), open_data(data).source
    trained = sorted(set(source.texts("train")))
    assert one.rows_of_an_epoch() == -(-sum(len(text) + 1 for text in trained) // 16)
    tokens = one.tokens.read(0, one.tokens.wait(10**9)[0]).tolist()
    found = bytes(0 if token == EOS else token for token in tokens).strip(b"\0").split(b"\0")
    assert sorted(found) == trained
    files = [text.split()[1] for text in found]
    assert len(set(files)) == 6 and files != sorted(files)
    assert [file for file, before in zip(files, [None, *files], strict=False) if file != before] == list(
        dict.fromkeys(files)
    )
    one.tokens.close()


@streamed
def test_what_a_killed_run_tokenized_is_not_read_again(data, tmp_path, monkeypatch):
    seen, inner = [], Streamed._rows
    monkeypatch.setattr(Streamed, "_rows", lambda self, file, row: seen.append((file, row)) or inner(self, file, row))
    first = opened(data, cache=tmp_path / "tokens")
    record = first.tokens._record
    monkeypatch.setattr(first.tokens, "_record", lambda *state: record(*state) or first.tokens._stop.set())
    first.tokens.wait(1)
    first.tokens.close()
    found = first.tokens._progress()
    assert not found["whole"] and (found["documents"], found["row"]) != (0, 0)
    seen.clear()
    again = opened(data, cache=tmp_path / "tokens")
    again.rows_of_an_epoch()
    files = again._source.order(again._source.documents("train")).tolist()
    starts = [(file, 0) for file in files[found["documents"] + 1 :]]
    assert seen == [(files[found["documents"]], found["row"]), *starts]
    whole = opened(data)
    assert torch.equal(next(again)["tokens"], next(whole)["tokens"])
    for one in (again, whole):
        one.tokens.close()


@streamed
@pytest.mark.parametrize("world", [1, 2, 4])
def test_it_goes_on_at_any_row_on_any_number_of_ranks(data, tmp_path, world):
    sizes = {"positions": True, "cache": tmp_path / "tokens"}
    ranks = [opened(data, batch_size=4, rank=rank, world_size=2, **sizes) for rank in range(2)]
    for _ in range(9):
        list(map(next, ranks))
    states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
    assert states[0] == states[1]
    others = [opened(data, batch_size=8 // world, rank=rank, world_size=world, **sizes) for rank in range(world)]
    for other in others:
        other.load_state_dict(states[0])
    for _ in range(12):
        expected, found = [next(rank) for rank in ranks], [next(other) for other in others]
        for name in ("tokens", "targets", "positions"):
            assert torch.equal(*(torch.cat([batch[name] for batch in some]) for some in (expected, found)))
    for one in (*ranks, *others):
        one.tokens.close()


@streamed
def test_what_changed_is_not_gone_on_with(tmp_path):
    data = write(tmp_path / "set", files=1)
    one = opened(data, cache=tmp_path / "tokens")
    next(one)
    saved = one.state_dict()
    assert "has seq_len=16, this run has seq_len=8" in refusal(opened(data, seq_len=8).load_state_dict, saved)
    column = ["other text " * 5] * 30
    pq.write_table(pa.table({"id": list(range(30)), "text": column}), tmp_path / "set" / "train-00.parquet")
    another = opened(data, cache=tmp_path / "tokens")
    changed = "the documents of --data changed since the data position was saved"
    assert refusal(another.load_state_dict, saved) == changed
    assert "other" in text_of([next(another)])
    for each in (one, another):
        each.tokens.close()


@streamed
def test_validation_is_held_out_or_the_sets_own(data, tmp_path):
    source = open_data(data).source
    held = list(source.texts("val"))
    trained = [text for text, *_ in source.following(source.documents("train"), 0, 0)]
    assert len(held) + len(trained) == 180 and 2 <= len(held) <= 20 and not set(held) & set(trained)
    assert sorted(source.texts("train")) == sorted(trained)
    write(tmp_path / "own", files=2)
    pq.write_table(pa.table({"id": [0], "text": ["held out " * 20]}), tmp_path / "own" / "validation.parquet")
    own = open_data(f"hf-stream:{tmp_path}/own")
    assert "its own validation split" in own.description and list(own.source.texts("val")) == [b"held out " * 20]
    assert len(list(own.source.following(own.source.documents("train"), 0, 0))) == 60
    (batch,) = validation_batches(own.source, own.tokenizer, batch_size=1, seq_len=64, n=1)
    assert bytes(batch["tokens"][0, 1:].tolist()).startswith(b"held out held")
    (part,) = open_validation(data)
    assert len(list(part.source.texts("val"))) == 180


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
        texts = [*part.source.texts("train"), *part.source.texts("val")]
        assert sorted(map(json.loads, texts), key=str) == sorted(expected, key=str)
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
    again.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    for _ in range(4):
        assert torch.equal(next(mixed)["tokens"], next(again)["tokens"])
    for one in (mixed, again):
        for cache in one.caches:
            cache.close()


@streamed
def test_what_cannot_be_read_is_one_line(data, tmp_path):
    folder = data.removeprefix("hf-stream:")
    assert "no field 'body' (it has id, text): name the one" in refusal(open_parts, data, "body")
    assert "cannot be joined with others, as it is streamed: use weights" in refusal(
        open_parts, f"{data},{folder}/train-00.parquet"
    )
    assert "cannot load hf-stream:./no/such" in refusal(open_parts, "hf-stream:./no/such")
    assert "use hf-stream:NAME or hf-stream:NAME:CONFIG" in refusal(open_parts, "hf-stream:nobody/has-this:config")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "disk")
    assert f"use hf:{tmp_path}/disk" in refusal(open_parts, f"hf-stream:{tmp_path}/disk")
    (tmp_path / "test.jsonl").write_text('{"text": "a"}\n')
    assert "has the splits test: a split named train is needed" in refusal(open_parts, f"hf-stream:{tmp_path}")

    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "train-0.jsonl").write_text('{"text": "a"}\n' * 9)
    (bad / "train-1.jsonl").write_text('{"text": \n')
    broken = opened(f"hf-stream:{bad}")
    assert "file 1 can no longer be read (" in refusal(lambda: next(broken))
    assert "row 1: 'text' is NoneType" in refusal(lambda: list(Streamed(str(nulls(tmp_path)), "text").texts("train")))


def nulls(folder):
    (folder / "nulls").mkdir()
    pq.write_table(pa.table({"text": ["a", None]}), folder / "nulls" / "train.parquet")
    return folder / "nulls"
