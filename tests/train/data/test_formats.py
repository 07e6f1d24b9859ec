"""Each form of ``--data`` and ``--tokenizer``: what is read from a good file, and the line that refuses a bad one."""

import json
import os
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from stepgraph.train.data import ByteTokenizer, JsonTokenizer, PackedLoader, open_data, open_source, open_tokenizer

LINES = [f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * (i % 4) for i in range(60)]


@pytest.fixture
def hf_cache(tmp_path, monkeypatch):
    """Keeps `datasets` off the network and out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def documents(source) -> list[str]:
    return [source.read(i).decode() for i in range(len(source))]


def refusal(data: str, **options) -> str:
    """The one line that refuses ``data``."""
    with pytest.raises(ValueError) as caught:
        open_source(data, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return str(path)


def write_parquet(path, texts, **options):
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, **options)
    return str(path)


# --- jsonl


def test_jsonl_reads_documents_in_any_order(tmp_path):
    bundle = open_data(write_jsonl(tmp_path / "a.jsonl", LINES))
    source = bundle.source
    assert documents(source) == LINES
    assert [source.read(i).decode() for i in (59, 3, 17)] == [LINES[59], LINES[3], LINES[17]]
    assert set(source.train.tolist()) | set(source.val.tolist()) == set(range(60)) and len(source.val)
    assert bundle.description.startswith(f"{source.name}: 60 documents, ")


def test_jsonl_takes_blank_lines_windows_ends_a_byte_order_mark_and_another_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "caf\xc3\xa9"}\r\n\r\n  \n{"body": "two\\n\\u2603"}')
    assert documents(open_source(str(path), "body")) == ["café", "two\n☃"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut off he', "not valid JSON (Unterminated string"),
        (b"[1, 2]", "a JSON list, not an object"),
        (b'{"body": 1, "title": 2}', "no field 'text' (it has body, title)"),
        (b'{"text": null}', "'text' is NoneType, not a string"),
        (b'{"text": "caf\xe9"}', "not UTF-8 (byte 0xe9)"),
        (b'{"text": "\\ud800"}', "'text' is not valid Unicode"),
        (b"[" * 200_000, "not valid JSON"),
    ],
)
def test_jsonl_bad_line_is_refused_with_its_place(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n")
    assert f"{path}:1: {reason}" in refusal(str(path))
    path.write_bytes(b'{"text": "good"}\n\n{"text": "good"}\n' + line)
    source = open_source(str(path))
    assert source.read(1) == b"good"
    with pytest.raises(ValueError, match=r"a\.jsonl:4: "):
        source.read(2)


def test_jsonl_of_one_document_is_split_by_position(tmp_path):
    text = "One long line of text. " * 400
    bundle = open_data(write_jsonl(tmp_path / "a.jsonl", [text]))
    assert "".join(documents(bundle.source)) == text
    assert "one document" in bundle.description and "split by position" in bundle.description
    assert bundle.source.val.tolist() == [len(bundle.source) - 1]
    assert "too little to split" in refusal(write_jsonl(tmp_path / "b.jsonl", ["x"]))


# --- text


def test_text_without_separator_is_one_document_cut_by_position(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(f"Line {i} of a play.\n\n" for i in range(20_000))
    path.write_text("\n" + text)
    bundle = open_data(str(path))
    source = bundle.source
    assert "".join(documents(source)) == text.rstrip()
    assert "one document" in bundle.description and "split by position" in bundle.description
    assert source.train.tolist() + source.val.tolist() == list(range(len(source))) and len(source.train) > 4
    val_bytes = sum(len(source.read(i)) for i in source.val)
    assert 0.03 < val_bytes / len(text) < 0.05


def test_text_separator_ends_documents(tmp_path):
    path = tmp_path / "a.txt"
    stories = ["First story.\n\nStill the first.\n", "\nSecond ☃.\n", "\n \n", "\nThird."]
    path.write_text("<|endoftext|>".join(stories))
    source = open_source(str(path))
    assert documents(source) == ["First story.\n\nStill the first.", "Second ☃.", "Third."]
    assert "3 documents" in source.describe()


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path):
    path = tmp_path / "a.txt"
    snow = "☃".encode()
    good = b"x" * ((1 << 20) - 1) + snow  # a character over the edge of a chunk
    path.write_bytes(good * 2)
    open_source(str(path))
    path.write_bytes(good + b"caf\xe9 au lait")
    assert f"not UTF-8 at byte {len(good) + 3} (0xe9)" in refusal(str(path))
    path.write_bytes(b"x" * ((1 << 20) - 1) + snow[:1] + b"abc")
    assert f"not UTF-8 at byte {(1 << 20) - 1} (0xe2)" in refusal(str(path))
    path.write_bytes(b"text" + snow[:2])
    assert "not UTF-8 at byte 4 (0xe2)" in refusal(str(path))
    path.write_text(" \n\n ")
    assert "holds no text" in refusal(str(path))
    path.write_text("x\n")
    assert "too little to split" in refusal(str(path))


# --- parquet


def test_parquet_reads_row_groups_once_per_epoch(tmp_path, monkeypatch):
    source = open_source(write_parquet(tmp_path / "a.parquet", LINES, row_group_size=7))
    assert documents(source) == LINES
    loaded = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda self, g, **k: loaded.append(g) or read(self, g, **k))
    packed = PackedLoader(source, ByteTokenizer(), batch_size=2, seq_len=16)
    while packed.epoch == 0:
        next(packed)
    loaded = loaded[2:]  # first and last document are of the fingerprint
    assert sorted(loaded) == list(range(9)) != loaded


def test_parquet_bad_files_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, LINES)
    good, column = path.read_bytes(), pq.ParquetFile(path).metadata.row_group(0).column(1)
    for cut in (len(good) // 2, len(good) - 3, 3):
        path.write_bytes(good[:cut])
        assert f"{path} is not a readable parquet file" in refusal(str(path))
    start, size = column.dictionary_page_offset, column.total_compressed_size
    path.write_bytes(good[:start] + bytes(size) + good[start + size :])  # the footer is whole, the text is not
    assert "is not a readable parquet file" in refusal(str(path))
    path.write_bytes(good)
    assert "no field 'body' (it has id, text)" in refusal(str(path), text_field="body")
    assert "row 0: 'id' is int, not a string" in refusal(str(path), text_field="id")
    twice = pa.Table.from_arrays([pa.array(["a", "b"])] * 2, names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    assert refusal(str(tmp_path / "twice.parquet")).endswith("2 columns are called 'text': keep one of them")
    assert "holds no rows" in refusal(write_parquet(path, pa.array([], pa.string())))
    source = open_source(write_parquet(path, ["a", "b", None]))
    with pytest.raises(ValueError, match="row 2: 'text' is NoneType"):
        source.read(2)


# --- Hugging Face datasets


def test_hf_folder_of_files_with_its_own_validation_split(tmp_path, hf_cache):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", LINES[:50])
    write_jsonl(folder / "validation.jsonl", LINES[50:])
    bundle = open_data(f"hf:{folder}")
    source = bundle.source
    assert documents(source) == LINES
    assert source.train.tolist() == list(range(50)) and source.val.tolist() == list(range(50, 60))
    assert "50 train / 10 validation" in bundle.description
    assert open_source(f"hf:{folder}").fingerprint == source.fingerprint
    assert "no field 'body'" in refusal(f"hf:{folder}", text_field="body")


def test_hf_folder_of_parquet_without_validation_is_split_by_index(tmp_path, hf_cache):
    folder = tmp_path / "corpus"
    folder.mkdir()
    parquet = open_source(write_parquet(folder / "part.parquet", LINES))
    source = open_source(f"hf:{folder}")
    assert documents(source) == LINES
    assert source.val.tolist() == parquet.val.tolist()


def test_hf_folder_written_by_save_to_disk(tmp_path, hf_cache):
    dataset = datasets.Dataset.from_dict({"text": LINES})
    dataset.save_to_disk(tmp_path / "one")
    assert documents(open_source(f"hf:{tmp_path / 'one'}")) == LINES
    datasets.DatasetDict({"train": dataset, "validation": dataset.select([4])}).save_to_disk(tmp_path / "two")
    assert documents(open_source(f"hf:{tmp_path / 'two'}")) == [*LINES, LINES[4]]
    datasets.DatasetDict({"test": dataset}).save_to_disk(tmp_path / "three")
    assert "has the splits test: a split named train is needed" in refusal(f"hf:{tmp_path / 'three'}")


def test_hf_what_cannot_be_loaded_is_refused(tmp_path, hf_cache):
    (tmp_path / "empty").mkdir()
    assert "cannot load hf:" in refusal(f"hf:{tmp_path / 'empty'}")
    assert "cannot load hf:./no/such/folder" in refusal("hf:./no/such/folder")
    assert "cannot load hf:nobody/has-this:config" in refusal("hf:nobody/has-this:config")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.jsonl").write_text('{"text": "a"}\n{"text": ')
    assert "JSON parse error" in refusal(f"hf:{broken}")


# --- all forms


@pytest.mark.parametrize("data", ["stdlb", "corpus.csv", "hf:", "hf-stream:", "", "folder/"])
def test_unknown_form_is_refused_with_the_allowed_ones(data):
    assert "use stdlib, FILE.jsonl or FILE.txt (or with .gz), FILE.parquet, hf:NAME or hf-stream:NAME" in refusal(data)


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "parquet"])
def test_missing_empty_and_folder_are_refused(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    assert refusal(str(path)) == f"cannot read data {path}: No such file or directory; use the path of a readable file"
    path.touch()
    assert refusal(str(path)) == f"{path} is empty: use a file with text"
    path.unlink()
    path.mkdir()
    assert refusal(str(path)) == f"{path} is a folder: use a file"
    os.mkfifo(tmp_path / f"pipe.{suffix}")  # to open it would wait for a writer
    assert refusal(str(tmp_path / f"pipe.{suffix}")).endswith("which cannot be read again: use a file")


def test_jsonl_of_blank_lines_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n \n")
    assert "holds no documents, only blank lines" in refusal(str(path))


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_missing_optional_package_names_the_extra(tmp_path, monkeypatch, package):
    path = write_parquet(tmp_path / "a.parquet", LINES)
    monkeypatch.setitem(sys.modules, package, None)
    message = refusal(path if package == "pyarrow" else f"hf:{tmp_path}")
    assert f"needs the package {package}: pip install 'stepgraph[data]'" in message


@pytest.mark.parametrize("form", ["jsonl", "parquet", "txt"])
def test_fingerprint_follows_content_not_place(tmp_path, form):
    def write(name, texts):
        path = tmp_path / f"{name}.{form}"
        if form == "txt":
            path.write_text("<|endoftext|>".join(texts))
            return open_source(str(path)).fingerprint
        return open_source({"jsonl": write_jsonl, "parquet": write_parquet}[form](path, texts)).fingerprint

    assert write("a", LINES) == write("b", LINES)
    assert write("c", [*LINES[:-1], LINES[-1] + "!"]) != write("a", LINES)
    assert write("d", LINES[:-1]) != write("a", LINES)
    if form != "parquet":  # the same bytes in all, cut into documents elsewhere in the middle
        moved = [*LINES[:20], LINES[20][:-1], "x" + LINES[21], *LINES[22:]]
        assert write("e", moved) != write("a", LINES)


# --- tokenizers


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """A byte-level BPE tokenizer trained on a few lines, saved with truncation and padding switched on."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=512)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_byte_tokenizer_round_trip():
    tokenizer = open_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    ids = tokenizer.encode("naïve ☃")
    assert ids.dtype == np.int32 and ids.tolist() == list("naïve ☃".encode())
    assert tokenizer.decode([*ids, 256]) == "naïve ☃"
    assert tokenizer.encode(bytes(range(256))).tolist() == list(range(256))
    assert tokenizer.decode([0xE2, 0x98]) == "\ufffd"
    assert tokenizer.encode(b"").tolist() == [] and tokenizer.decode([]) == ""
    with pytest.raises(ValueError, match="token id 257 is outside tokenizer bytes"):
        tokenizer.decode([65, 257])


def test_json_tokenizer_matches_the_library_and_round_trips(tokenizer_json):
    tokenizer = open_tokenizer(str(tokenizer_json))
    library = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    assert tokenizer.vocab_size == library.get_vocab_size() and tokenizer.eos_id == 1
    library.no_truncation()
    library.no_padding()
    for text in [*LINES, "naïve ☃", ""]:
        ids = tokenizer.encode(text.encode())
        assert ids.dtype == np.int32 and ids.tolist() == library.encode(text).ids
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert len(tokenizer.encode(LINES[3])) < len(LINES[3]) / 2  # it learned something
    assert "\ufffd" in tokenizer.decode(tokenizer.encode(b"caf\xe9"))


def test_text_that_spells_a_special_token_stays_text(tokenizer_json):
    tokenizer = JsonTokenizer(tokenizer_json)
    text = "a document about <|endoftext|> and <pad>"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == text


def test_packing_with_a_real_tokenizer(tmp_path, tokenizer_json):
    bundle = open_data(write_jsonl(tmp_path / "a.jsonl", LINES), str(tokenizer_json))
    packed = PackedLoader(bundle.source, bundle.tokenizer, batch_size=3, seq_len=32, seed=5)
    next(packed)
    count, _ = packed.tokens.wait(10**9)
    stream = packed.tokens.read(1, count)
    *pieces, last = np.split(stream, np.flatnonzero(stream == bundle.tokenizer.eos_id) + 1)
    order = bundle.source.order(bundle.source.train)
    assert [bundle.tokenizer.decode(piece) for piece in pieces] == [LINES[i] for i in order] and not len(last)
    bytes_loader = PackedLoader(bundle.source, ByteTokenizer(), batch_size=3, seq_len=32, seed=5)
    with pytest.raises(ValueError, match="belongs to another --tokenizer"):
        packed.load_state_dict(bytes_loader.state_dict())


def test_bad_tokenizers_are_refused(tmp_path, tokenizer_json):
    def message(name):
        with pytest.raises(ValueError) as caught:
            open_tokenizer(str(name))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert message("byte") == "unknown tokenizer 'byte': use bytes or PATH/tokenizer.json"
    missing = message(tmp_path / "tokenizer.json")
    assert "No such file" in missing and "transformers" not in missing
    (tmp_path / "config.json").write_text("{}")
    assert "let transformers make it" in message(tmp_path / "tokenizer.json")
    assert "is a folder: use the file" in message(tokenizer_json.parent)
    content = tokenizer_json.read_text()
    path = tmp_path / "tokenizer.json"
    for bad, reason in [
        (content[: len(content) // 2], "is not a tokenizer of the `tokenizers` library (EOF"),
        ("", "is not a tokenizer of the `tokenizers` library (EOF"),
        ('{"model": {"type": "None"}}', "is not a tokenizer of the `tokenizers` library"),
        ("[]", "is not a tokenizer of the `tokenizers` library"),
        (content.replace("<|endoftext|>", "<other>"), "has no end-of-text token: name one of its tokens eos_token in"),
    ]:
        path.write_text(bad)
        assert reason in message(path)
    path.write_bytes(content.encode("utf-16"))
    assert "is not a tokenizer of the `tokenizers` library ('utf-8' codec" in message(path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_of_text_is_what_the_settings_name_where_no_usual_name_is_there(file, tmp_path, tokenizer_json):
    content, path = tokenizer_json.read_text(), tmp_path / "tokenizer.json"
    path.write_text(content.replace("<|endoftext|>", "<other>"))
    for named in ("<other>", {"content": "<other>", "special": True}):
        (tmp_path / file).write_text(json.dumps({"eos_token": named}))
        found = open_tokenizer(str(path))
        assert found.eos_id == open_tokenizer(str(tokenizer_json)).eos_id
    (tmp_path / file).write_text(json.dumps({"eos_token": "a"}))  # an ordinary token, which is another end
    assert open_tokenizer(str(path)).fingerprint != found.fingerprint
    path.write_text(content)
    assert open_tokenizer(str(path)).fingerprint == open_tokenizer(str(tokenizer_json)).fingerprint
    (tmp_path / file).write_text("[]")
    path.write_text(content.replace("<|endoftext|>", "<other>"))
    with pytest.raises(ValueError, match=f"{file} holds a list, not a JSON object"):
        open_tokenizer(str(path))
