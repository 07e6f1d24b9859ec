"""Files of conversations and text as people have them: read, or refused in one line that names the file."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from stepgraph.train.data import PackedLoader, open_data
from stepgraph.train.data.tokenizer import byte_level

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
N = 40


def chat(i, answer=None, **extra):
    said = f"It is {2 * i}." if answer is None else answer
    return {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": said}], **extra}


def only(*messages):
    return {"messages": [{"role": role, "content": content} | more for role, content, more in messages]}


def lines(make):
    return "".join(json.dumps(make(i), ensure_ascii=False) + "\n" for i in range(N)).encode()


def ask(content, **more):
    return ("user", content, more)


def answer(content, **more):
    return ("assistant", content, more)


PLAIN = lines(chat)
READ = {
    "tool_calls null and empty": lines(lambda i: only(ask("q", tool_calls=None), answer("a", tool_calls=[]))),
    "rows of the system alone": lines(lambda i: only(("system", "Be kind.", {})) if i % 2 else chat(i)),
    "empty answers": lines(lambda i: chat(i, "" if i % 2 else None)),
    "CRLF and blank lines": PLAIN.replace(b"\n", b"\r\n\r\n"),
    "a mark of UTF-8 at the start": b"\xef\xbb\xbf" + PLAIN,
    "NUL and U+2028": lines(lambda i: chat(i, "a\x00b\u2028c\x85d")),
    "NaN beside messages": b"".join(b'{"score": NaN, ' + line[1:] + b"\n" for line in PLAIN.splitlines()),
    "the assistant first": lines(lambda i: only(answer("Hello"), ask("hi"), answer("yo"))),
    "the user last": lines(lambda i: only(ask("hi"), answer("yo"), ask("more?"))),
    "weights of messages": lines(lambda i: only(ask("q"), answer("no", weight=0), ask("q"), answer("a", weight=1))),
    "marks of training": lines(lambda i: only(ask("q"), answer("no", train=False, training=True), answer("a"))),
    "a field of reasoning": lines(lambda i: only(ask("q"), answer("a", reasoning_content="hmm"))),
}
REFUSED = {
    "content null": (
        lines(lambda i: only(ask("x"), answer(None))),
        "'content' of message 2 .* is missing: use a list",
    ),
    "messages null": (lines(lambda i: {"messages": None}), "'messages' is NoneType: use a list of messages"),
    "messages as text": (lines(lambda i: {"messages": "[]"}), "'messages' is str: use a list of messages"),
    "text null": (lines(lambda i: chat(i, text=None)), "'text' is NoneType, not a string"),
    "other fields": (lines(lambda i: {"question": "x", "answer": "y"}), "no field 'text' .it has question, answer"),
    "from and value": (
        lines(lambda i: {"messages": [{"from": "human", "value": "x"}]}),
        "'role' of message 1 .* is missing",
    ),
    "numbers": (lines(lambda i: chat(i, 7)), "'content' of message 2 .* is int, not a string"),
    "a weight of a half": (lines(lambda i: only(ask("x"), answer("y", weight=0.5))), "weight=0.5 of a message"),
    "one array": (json.dumps([chat(i) for i in range(N)]).encode(), "a JSON list, not an object"),
    "pretty-printed": (json.dumps(chat(1), indent=1).encode(), "a.jsonl:1: not valid JSON"),
    "UTF-16": (PLAIN.decode().encode("utf-16"), "a.jsonl:1: not UTF-8"),
    "latin-1": (lines(lambda i: chat(i, "très")).decode().encode("latin-1"), "a.jsonl:1: not UTF-8"),
    "cut off": (PLAIN + b'{"messages": [{"ro', f"a.jsonl:{N + 1}: not valid JSON"),
    "half a pair": (lines(chat) + b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', "is not valid Unicode"),
    "packed": (gzip.compress(PLAIN), "a.jsonl is packed by gzip: call it .*a.jsonl.gz"),
    "empty": (b"", "a.jsonl is empty"),
}


@pytest.fixture
def tokenizer(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return str(tmp_path / "tokenizer.json")


def read_all(data, tokenizer):
    found = open_data(data, tokenizer, row=64)
    loader = PackedLoader(found.source, found.tokenizer, batch_size=2, seq_len=64)
    try:
        loader.tokens.wait(10**9)
        return next(loader), found
    finally:
        loader.tokens.close()


@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore:.*are left out")
def test_files_of_conversations_are_read(name, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(READ[name])
    batch, found = read_all(str(tmp_path / "a.jsonl"), tokenizer)
    learned = found.tokenizer.decode(batch["targets"][batch["targets"] >= 0].numpy())
    assert found.source.chat and learned and "?" not in learned and "no" not in learned and "Be kind" not in learned


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_none_are_one_line(name, tokenizer, tmp_path):
    content, says = REFUSED[name]
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=says) as error:
        read_all(str(tmp_path / "a.jsonl"), tokenizer)
    assert "\n" not in str(error.value)


TEXTS = [f"This is document {i}." * 3 for i in range(N)]
TALKS = [chat(i)["messages"] for i in range(N)]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"text": pyarrow.array(TEXTS, pyarrow.large_string())}, None),
        ({"text": pyarrow.array(TEXTS).dictionary_encode()}, None),
        ({"messages": [[m | {"name": None, "tool_calls": None} for m in talk] for talk in TALKS]}, None),
        ({"messages": TALKS, "tools": pyarrow.array([None] * N, pyarrow.null())}, None),
        ({"text": [None, *TEXTS[1:]]}, "'text' is NoneType, not a string"),
        ({"text": [[text] for text in TEXTS]}, "'text' is list, not a string"),
        ({"text": [text.encode() for text in TEXTS]}, "'text' is bytes, not a string"),
        ({"doc": [{"text": text} for text in TEXTS]}, "no field 'text' .it has doc"),
        ({"messages": [json.dumps(talk) for talk in TALKS]}, "'messages' is str: use a list"),
        ({"text": pyarrow.array([], pyarrow.string())}, "holds no rows"),
    ],
)
def test_parquet_as_people_have_it(columns, says, tokenizer, tmp_path):
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    if says is None:
        batch, found = read_all(str(tmp_path / "a.parquet"), tokenizer)
        assert found.source.chat == ("messages" in columns) and (batch["targets"] >= 0).any()
        return
    with pytest.raises(ValueError, match=says) as error:
        read_all(str(tmp_path / "a.parquet"), tokenizer)
    assert "\n" not in str(error.value)
