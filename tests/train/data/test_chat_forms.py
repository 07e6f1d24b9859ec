"""Conversations by their fields: messages, ShareGPT's, Alpaca's, prompts with completions; and preference pairs."""

import json

import pytest

from stepgraph.train.data.several import open_source

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
    "alpaca with a system prompt and earlier turns": (
        {"instruction": "Hi", "input": None, "output": "Hello", "system": "Be kind", "history": [["Hi", "Hello"]]},
        [SYSTEM, ASKED, SAID, ASKED, SAID],
    ),
    "sharegpt with a system prompt": (
        {"conversations": [{"from": f, "value": v} for f, v in (("user", "Hi"), ("bing", "Hello"))]}
        | {"system_prompt": "Be kind"},
        [SYSTEM, ASKED, SAID],
    ),
    "messages that have it": ({"messages": [SYSTEM, ASKED, SAID], "system": "Be kind"}, [SYSTEM, ASKED, SAID]),
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
        ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, "preference pairs .* --loss dpo"),
        ({"instruction": "Hi", "output": None}, "'content' of message 2 of 'instruction' is missing"),
        ({"conversations": [{"from": "human", "value": 3}]}, "'content' of message 1 of 'conversations' is int"),
        ({"conversations": ["Hi"]}, "'role' of message 1 of 'conversations' is missing"),
        ({"question": "Hi"}, "no field 'text'"),
        ({"instruction": "Hi", "input": 3, "output": "a"}, "'content' of message 1 of 'instruction' is int"),
        ({"instruction": "Hi", "output": "a", "history": ["Hi"]}, "'content' of message 1 of 'instruction' is dict"),
        (
            {"messages": [SYSTEM, ASKED], "system": "Be cruel"},
            "'system' is not a string, or differs from the conversation's own",
        ),
        ({"messages": [ASKED, SAID], "system": ["Be kind"]}, "'system' is not a string"),
        ({"messages": [ASKED, SAID], "functions": [{"name": "f"}]}, "conversations with tools are not trained on"),
        ({"messages": [SAID | {"function_call": {"name": "f"}}]}, "conversations with tools are not trained on"),
    ],
)
def test_others_are_refused_in_one_line(tmp_path, row, said):
    with pytest.raises(ValueError, match=rf"data\.jsonl:1: .*{said}"):
        written(tmp_path / "data.jsonl", [row, row])


PAIR = "chosen,rejected"
HEARD = [ASKED | {"weight": 0}, SAID]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_pair_is_two_conversations_and_the_prompt_is_not_learned(tmp_path, suffix):
    other, early = {"role": "assistant", "content": "Go"}, {"role": "assistant", "content": "Yes"}
    rows = [
        {"prompt": [SYSTEM, ASKED], "chosen": [SAID], "rejected": [other]},
        {"prompt": [], "chosen": [ASKED, early, ASKED, SAID], "rejected": [ASKED, early, ASKED, other, ASKED, SAID]},
        {"prompt": [ASKED], "chosen": [ASKED, SAID], "rejected": [ASKED, other]},
    ]
    written(tmp_path / f"data{suffix}", [{"text": "-", **row} for row in rows])
    source = open_source(str(tmp_path / f"data{suffix}"), PAIR)
    assert source.pairs and source.chat and source.unit == "preference pairs"
    found = [json.loads(source.read(i)) for i in range(3)]
    heard = [m | {"weight": 0} for m in (ASKED, early, ASKED)]
    assert found[0] == [[SYSTEM | {"weight": 0}, ASKED | {"weight": 0}, said] for said in (SAID, other)]
    assert found[1] == [[*heard, SAID], [*heard, other, ASKED, SAID]]
    assert found[2] == [HEARD, [HEARD[0], other]]
    written(tmp_path / f"more{suffix}", [row | {"system": "Be kind", "text": "-"} for row in rows])
    more = open_source(str(tmp_path / f"more{suffix}"), PAIR)
    assert json.loads(more.read(0)) == found[0]
    assert json.loads(more.read(2)) == [[SYSTEM, *side] for side in found[2]]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "a", "rejected": "b"}, "answers without a prompt: add the field 'prompt'"),
        ({"prompt": "Hi", "chosen": "a", "rejected": 3}, "'rejected' is int: use a list of messages"),
        ({"prompt": "Hi", "chosen": ["a"], "rejected": ["b"]}, "message 2 of 'chosen' is str"),
        ({"prompt": "Hi", "chosen": "a"}, "no field 'rejected' .it has prompt, chosen"),
    ],
)
def test_a_wrong_pair_is_one_line(tmp_path, row, said):
    (tmp_path / "data.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    with pytest.raises(ValueError, match=rf"data\.jsonl:1: .*{said}"):
        open_source(str(tmp_path / "data.jsonl"), PAIR)
