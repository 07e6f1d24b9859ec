"""Conversations by their fields: messages, ShareGPT's, Alpaca's, prompts with completions; and preference pairs."""

import json

import pytest

from stepgraph.train.data.formats import open_source

ASKED, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}
TURNS = (("system", "Be kind"), ("human", "Hi"), ("gpt", "Hello"))
FORMS = {
    "messages": ({"messages": [ASKED, SAID]}, [ASKED, SAID]),
    "sharegpt": (
        {"conversations": [{"from": f, "value": v} for f, v in TURNS]},
        [SYSTEM, ASKED, SAID],
    ),
    "sharegpt by roles": ({"conversations": [ASKED, SAID], "id": 1}, [ASKED, SAID]),
    "alpaca": ({"instruction": "Hi", "input": "", "output": "Hello"}, [ASKED, SAID]),
    "alpaca with input": (
        {"instruction": "Hi", "input": "you", "output": "Hello"},
        [{"role": "user", "content": "Hi\n\nyou"}, SAID],
    ),
    "completion": ({"prompt": "Hi", "completion": "Hello"}, [ASKED, SAID]),
    "completion of messages": ({"prompt": [SYSTEM, ASKED], "completion": [SAID]}, [SYSTEM, ASKED, SAID]),
}  # fmt: skip


def written(path, rows):
    if path.suffix == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_known_by_its_fields(tmp_path, form, suffix):
    row, messages = FORMS[form]
    source = written(tmp_path / f"data{suffix}", [row, row])
    assert source.chat and source.unit == "conversations"
    assert json.loads(source.read(0)) == messages


def test_a_text_field_comes_first(tmp_path):
    assert not written(tmp_path / "data.jsonl", [{"text": "a", "prompt": "b", "completion": "c"}] * 2).chat


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, "preference pairs .* TRL's DPOTrainer"),
        ({"instruction": "Hi", "output": None}, "'content' of message 2 of 'instruction' is missing"),
        ({"conversations": [{"from": "human", "value": 3}]}, "'content' of message 1 of 'conversations' is int"),
        ({"conversations": ["Hi"]}, "'role' of message 1 of 'conversations' is missing"),
        ({"question": "Hi"}, "no field 'text'"),
    ],
)
def test_others_are_refused_in_one_line(tmp_path, row, said):
    with pytest.raises(ValueError, match=rf"data\.jsonl:1: .*{said}"):
        written(tmp_path / "data.jsonl", [row, row])
