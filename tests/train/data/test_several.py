"""Several files as one source, packed files, and mixtures: their order, shares and resumption."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.train.data import MixedLoader, PackedLoader, Part, open_data, open_parts, open_validation
from stepgraph.train.data.sources import Source
from stepgraph.train.data.tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_lines(path, texts, field="text"):
    text = "".join(json.dumps({field: text}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix.lower() == ".gz" else text.encode())
    return path


class Letters(Source):
    """Documents of one letter, so that a row tells its part."""

    def __init__(self, letter: str, count: int):
        self.name, self.size, self._text, self._count = letter, 64 * count, letter.encode() * 64, count
        self.train, self.val = np.arange(count - 1), np.array([count - 1])

    def read(self, index: int) -> bytes:
        return self._text


def mixture(shares, **options):
    parts = [Part(Letters(chr(97 + i), 30 + 7 * i), chr(97 + i), share) for i, share in enumerate(shares)]
    return MixedLoader(parts, ByteTokenizer(), seq_len=32, **options)


def letters(batch):
    """The part of each row."""
    return [chr(Counter(row.tolist()).most_common(1)[0][0]) for row in batch["tokens"]]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.integers(1, 7))
def test_after_any_number_of_rows_each_part_has_its_share(weights, batch_size):
    shares = [weight / sum(weights) for weight in weights]
    loader, seen = mixture(shares, batch_size=batch_size), Counter()
    for step in range(1, 12):
        seen.update(letters(next(loader)))
        for i, share in enumerate(shares):
            assert abs(seen[chr(97 + i)] - share * step * batch_size) < len(shares)


def test_the_order_is_that_of_one_process_on_any_number_of_ranks_and_goes_on_at_any_row():
    shares = [0.5, 0.3, 0.2]
    whole = mixture(shares, batch_size=12)
    expected = [next(whole)["tokens"] for _ in range(20)]  # several epochs of the first part
    assert whole.epoch > 1
    ranks = [mixture(shares, batch_size=4, rank=rank, world_size=3) for rank in range(3)]
    for step in range(9):
        assert torch.equal(torch.cat([next(loader)["tokens"] for loader in ranks]), expected[step])
    state = json.loads(json.dumps(ranks[0].state_dict()))
    assert all(loader.state_dict() == state for loader in ranks)
    again = [mixture(shares, batch_size=6, rank=rank, world_size=2) for rank in range(2)]
    for loader in again:
        loader.load_state_dict(state)
        loader.ready()
    for step in range(9, 20):
        assert torch.equal(torch.cat([next(loader)["tokens"] for loader in again]), expected[step])


def test_a_part_gives_the_rows_that_it_would_give_alone():
    loader = mixture([0.25, 0.75], batch_size=4)
    alone = PackedLoader(Letters("b", 37), ByteTokenizer(), batch_size=1, seq_len=32)
    rows = [row for _ in range(12) for row in next(loader)["tokens"] if 98 in row.tolist()]
    assert len(rows) == 36 and all(torch.equal(row, next(alone)["tokens"][0]) for row in rows)


def test_other_weights_or_data_are_not_gone_on_with():
    loader = mixture([0.5, 0.5], batch_size=2)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"mixture of 50\.0%, 50\.0%, this run's is of 25\.0%, 75\.0%: resume with"):
        mixture([0.25, 0.75], batch_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="of one source, and --data is a mixture"):
        loader.load_state_dict({"epoch": 0})
    state["parts"][1]["data"] = "other"
    with pytest.raises(ValueError, match=r"^b: the saved data position belongs to another --data"):
        loader.load_state_dict(state)


def test_files_patterns_and_packed_files_are_one_source(tmp_path):
    for i in range(3):
        write_lines(tmp_path / f"part-{i}.jsonl", [f"{i} {j}" for j in range(40)])
    write_lines(tmp_path / "last.JSONL.GZ", ["packed"] * 5)
    (part,) = open_parts(f"{tmp_path}/part-*.jsonl,{tmp_path}/last.JSONL.GZ")
    source = part.source
    texts = [source.read(i) for i in range(len(source))]
    assert texts == [f"{i} {j}".encode() for i in range(3) for j in range(40)] + [b"packed"] * 5
    assert sorted([*source.train, *source.val]) == list(range(125)) and "4 files, 125 documents" in source.describe()
    before = source.fingerprint, source.stamp()
    write_lines(tmp_path / "part-1.jsonl", [f"{j} 1" for j in range(40)])
    (again,) = open_parts(f"{tmp_path}/part-*.jsonl,{tmp_path}/last.JSONL.GZ")
    assert again.source.fingerprint != before[0] and source.stamp() != before[1]


def test_a_packed_file_is_unpacked_once_and_its_stamp_is_its_own(tmp_path):
    path = write_lines(tmp_path / "a.jsonl.gz", ["one", "two", "three"], field="body")
    first = open_data(str(path), text_field="body").source
    copies = list((tmp_path / "cache").rglob("a.jsonl"))
    open_data(str(path), text_field="body")
    assert first.read(1) == b"two" and list((tmp_path / "cache").rglob("a.jsonl")) == copies and len(copies) == 1
    assert first.name == str(path)
    stamp = first.stamp()
    path.touch()
    assert first.stamp() != stamp
    with pytest.raises(
        ValueError, match=r"a\.jsonl\.gz:1: no field 'text' .*name the one with the text by --text-field"
    ):
        open_data(str(path))
    for name in ("b.jsonl.gz", "b.txt.gz") * 2:  # again with the copy of the first time
        (tmp_path / name).exists() or (tmp_path / name).write_bytes(gzip.compress(b""))
        with pytest.raises(ValueError, match=rf"{name} is empty: use a file with text"):
            open_data(str(tmp_path / name))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is not a readable gzip file .*: copy or download it again"):
        open_data(str(path))


def test_weights_and_names_of_a_mixture(tmp_path, monkeypatch):
    a, b = (
        write_lines(tmp_path / folder / "text.jsonl", ["x", "y"])
        for folder in ("a", "b")
        if not (tmp_path / folder).mkdir()
    )
    parts = open_parts(f"{a}:3e0,{b}:1.")
    assert [(part.name, part.share) for part in parts] == [("text", 0.75), ("text_2", 0.25)]
    assert [len(part.source.val) for part in open_validation(f"{a},{b}")] == [2, 2]
    web = f"{tmp_path}/a/*.jsonl:1,{tmp_path}/b/**/t*.jsonl:1,{tmp_path}/b/**/*.jsonl:1"
    assert [part.name for part in open_parts(web)] == ["a", "t", "b"]
    many = [tmp_path / f"{'many' * 20}{i}.jsonl" for i in range(4)]
    for file in many:
        write_lines(file, ["x", "y"])
    monkeypatch.chdir(tmp_path)  # where their names together are longer than one may be
    (part,) = open_parts(",".join(file.name for file in many))
    assert part.source.describe().startswith(many[0].name) and "4 files" in part.source.describe()
    with pytest.raises(ValueError, match="each set counts the same and has no weight: write "):
        open_validation(f"{a}:0.5,{b}:0.5")
    bundle = open_data(f"{a}:3,{b}:1")
    assert bundle.description.startswith("75.0% ")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{a}:0.5,{a}", "has no weight and others have: write"),
        ("{a}:0,{a}:1", "every weight must be finite, and above 0"),
        ("{a}:-0.5,{a}:1", "every weight must be finite, and above 0"),
        ("{a}:1e999", "every weight must be finite, and above 0"),
        ("{tmp}/*.jsonl.gz", r"no file is called .*\*\.jsonl\.gz"),
        ("{a},{tmp}/none.jsonl", "none.jsonl: No such file"),
        ("{tmp}/b.parquet.gz", "unknown data"),
    ],
)
def test_what_cannot_be_read_is_one_line(data, says, tmp_path):
    a = write_lines(tmp_path / "a.jsonl", ["x", "y"])
    with pytest.raises(ValueError, match=says) as refused:
        open_parts(data.format(a=a, tmp=tmp_path))
    assert "\n" not in str(refused.value)


def test_a_field_of_data_without_fields_is_refused(tmp_path):
    text, rows = tmp_path / "a.TXT", tmp_path / "b.jsonl"
    text.write_text("x<|endoftext|>y")
    rows.write_text('{"body": "x"}\n{"body": "y"}\n')
    for data in ("stdlib", f"{text}:0.5,stdlib:0.5"):
        with pytest.raises(ValueError, match=r"text_field=body names a field and .* has none: drop --text-field"):
            open_parts(data, "body")
    assert len(open_parts(f"{text}:1,{rows}:1", "body")) == 2
