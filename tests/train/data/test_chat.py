"""Conversations as tokens: next to transformers' own rendering, and rows of generated ones."""

import json
import shutil

import numpy as np
import pyarrow
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import models, pre_tokenizers, trainers

from stepgraph.train.data import PackedLoader, open_data, open_validation, token_cache, validation_batches
from stepgraph.train.data.chat import ChatTemplate, ChatTokenizer
from stepgraph.train.data.token_cache import Rows, inputs_and_targets
from stepgraph.train.data.tokenizer import byte_level

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}[A]{% generation %}{{ message.content }}"
    "{{ eos_token }}{% endgeneration %}{%- else -%}[{{ message.role }}]{{ message.content }}{%- endif -%}{%- endfor -%}"
)
#: As templates of reasoning models do, it drops what stands before the answer, of all messages but the last.
REWRITING = (
    "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else m.content.split('|')[-1] }};{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes with special tokens, to which tests put a template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"})
    )
    return folder


def tokenizer_of(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder / "tokenizer.json"), transformers.AutoTokenizer.from_pretrained(folder)


says = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=12)
turns = st.lists(st.tuples(says, says), min_size=1, max_size=3)


def conversation(turns):
    pairs = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
    return [message for pair in pairs for message in pair]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_tokens_and_masks_are_those_of_transformers(folder, template):
    ours, theirs = tokenizer_of(folder, template)

    @settings(max_examples=40, deadline=None)
    @given(turns)
    def check(turns):
        messages = conversation(turns)
        marked = ours.encode(json.dumps(messages).encode())
        expected = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=template is MARKED, return_tensors="np"
        )
        assert np.where(marked < 0, ~marked, marked).tolist() == expected["input_ids"].reshape(-1).tolist()
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        if template is MARKED and all(answer.strip() for answer in answers):  # an empty answer is no target here
            assert (marked >= 0).tolist() == expected["assistant_masks"].reshape(-1).astype(bool).tolist()
        elif template is not MARKED:  # its template marks nothing: the answers are spelled out
            said = "".join(f"{answer.strip()}<|im_end|>\n" for answer in answers if answer.strip())
            assert theirs.decode(marked[marked >= 0]) == said

    check()


@pytest.mark.parametrize(
    "part",
    [
        "{% if tools is not none %}tools{% endif %}{% if documents is none %}no documents{% endif %}",
        "{{ {'b': 'ä', 'a': 1} | tojson(True, 1, separators=(',', ':'), sort_keys=True) }}{{ 'ä' | tojson }}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}",
    ],
)
@pytest.mark.parametrize("named", ["settings", "map", "nothing"])
def test_whatever_a_template_reads_is_what_transformers_gives_it(part, named, folder, tmp_path):
    shutil.copy(folder / "tokenizer.json", tmp_path)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | (names if named == "settings" else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if named == "map":
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    ours, theirs = tokenizer_of(tmp_path, part + CHATML.removeprefix("{{ bos_token }}"))
    chats = [
        conversation([("Hi", "Hö")]),
        [{"role": "system", "content": "x"}, *conversation([("a", "b"), ("c", "d")])],
    ]
    for messages in [*chats, [{"role": "assistant", "content": "first"}, *chats[0]]]:
        marked = ours.encode(json.dumps(messages))
        expected = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert np.where(marked < 0, ~marked, marked).tolist() == expected
        said = "".join(f"{m['content']}<|im_end|>\n" for m in messages if m["role"] == "assistant")
        assert theirs.decode(marked[marked >= 0]) == said


def test_a_template_that_rewrites_earlier_messages_is_refused():
    template = ChatTemplate(REWRITING, {})
    template.spans(conversation([("1+1?", "two")]))
    with pytest.raises(ValueError, match=r"rewrites earlier messages.*put \{% generation %\}"):
        template.spans(conversation([("1+1?", "hm|two"), ("and 2?", "four")]))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for %}", "the chat template cannot be read"),
        ("{{ raise_exception('no system') }}", r"refuses a conversation \(no system\): 'Hi / Ho'"),
        ("{{ messages + 1 }}", "refuses a conversation"),
        ("{{ messages.append(1) }}", "refuses a conversation"),  # the sandbox's word
        ("{{ 1 / 0 }}", r"refuses a conversation \(ZeroDivisionError: division by zero\)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"refuses a conversation \(RecursionError"),
    ],
)
def test_a_bad_template_is_one_line(template, says):
    with pytest.raises(ValueError, match=says):
        ChatTemplate(template, {}).spans(conversation([("Hi", "Ho")]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(-9, 8), min_size=1, max_size=14), max_size=12), st.integers(1, 10), st.data())
def test_rows_hold_whole_conversations(documents, seq_len, data):
    """However they are handed over: each lies in one row, cut to it; every row has a target."""
    documents = [np.array([~abs(ids[0]), *ids[1:]], np.int32) for ids in documents]
    rows, pieces, rest = Rows(5, seq_len), [], list(documents)
    pieces.append(rows.open())
    while rest:
        take = data.draw(st.integers(1, len(rest)))
        pieces.append(rows.add(rest[:take]))
        rest = rest[take:]
    stream = np.concatenate([*pieces, rows.close()]).astype(np.int64)
    assert rows.there == len(stream)
    kept = [ids[:seq_len].tolist() for ids in documents if (ids[:seq_len] >= 0).any()]
    assert rows.counts["cut out"] + rows.counts["silent"] == len(documents) - len(kept)
    assert rows.counts["silent"] == sum(not (ids >= 0).any() for ids in documents)
    assert rows.counts["cut"] == sum(len(ids) > seq_len and (ids[:seq_len] >= 0).any() for ids in documents)
    if not kept:
        assert not len(stream)
        return
    assert len(stream) % seq_len == 1 % seq_len
    found = np.stack([stream[at : at + seq_len + 1] for at in range(0, len(stream) - 1, seq_len)])
    for row in found[:, :-1].tolist():
        here = []
        while kept and len(here) + len(kept[0]) <= seq_len:
            here += kept.pop(0)
        assert row == here + [~5] * (seq_len - len(here))
    assert not kept
    tokens, targets = inputs_and_targets(found)
    assert (tokens >= 0).all() and tokens.shape == targets.shape
    assert (targets >= 0).any(axis=1).all() and (targets[:, -1] == -100).all()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_is_told_counts_all_that_earlier_writers_left_out(folder, tmp_path, monkeypatch):
    tokenizer_of(folder, CHATML)
    chats = [conversation([("q" * (10 * (i % 3)), "a" * 30)]) for i in range(40)]
    data = open_data(write(tmp_path / "a.jsonl", [{"messages": c} for c in chats]), str(folder / "tokenizer.json"))
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 500)
    monkeypatch.setattr(token_cache.warnings, "warn", lambda *_, **__: None)
    read, left = data.source.read, iter(range(25))

    def some(index):
        if next(left, None) is None:
            raise ValueError("killed")
        return read(index)

    def told(cache):
        loader = PackedLoader(data.source, data.tokenizer, batch_size=2, seq_len=44, cache=cache)
        loader.tokens.wait(10**9)
        return loader.tokens.describe().partition("; ")[2]

    monkeypatch.setattr(data.source, "read", some)
    with pytest.raises(ValueError, match="killed"):
        told(tmp_path / "one")
    monkeypatch.setattr(data.source, "read", read)
    assert told(tmp_path / "one") == told(tmp_path / "two") != ""


def test_long_conversations_are_told(folder, tmp_path):
    tokenizer_of(folder, CHATML)
    chats = [conversation([("q" * (10 * (i % 3)), "a" * 30)]) for i in range(40)]
    data = open_data(write(tmp_path / "a.jsonl", [{"messages": c} for c in chats]), str(folder / "tokenizer.json"))
    options = {"batch_size": 2, "seq_len": 44}
    with pytest.warns(UserWarning, match=r"conversations are cut to seq_len=44 tokens, and \d+ dropped"):
        loader = PackedLoader(data.source, data.tokenizer, cache=tmp_path, **options)
        loader.tokens.wait(10**9)
        loader.tokens.close()
    assert (
        "are cut to seq_len=44"
        in PackedLoader(data.source, data.tokenizer, cache=tmp_path, **options).tokens.describe()
    )
    rows = [{"messages": conversation([("hi", "")])[:1]}] * 20
    silent = open_data(write(tmp_path / "b.jsonl", rows), str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="no assistant message is in the first 44 tokens: use"):
        validation_batches(silent.source, silent.tokenizer, n=1, **options)
    with pytest.warns(
        UserWarning,
        match=r"b.jsonl: 1\d conversations are left out, in which no assistant message has content$",
    ):
        loader = PackedLoader(silent.source, silent.tokenizer, **options)
        loader.tokens.wait(10**9)
        loader.tokens.close()
    with pytest.raises(ValueError, match=r"b.jsonl has nothing to train on: no assistant message is in"):
        loader.ready()  # and not for ever
    (batch,) = validation_batches(data.source, data.tokenizer, n=1, batch_size=1, seq_len=44)
    assert (batch["targets"] >= 0).any() and (batch["targets"] == -100).any()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"messages": "hello"}], r"a.jsonl:1: 'messages' is str: use a list of messages such as"),
        ([{"messages": [{"role": "user"}]}], r"a.jsonl:1: 'content' of message 1 of 'messages' is missing: use"),
        ([{"messages": []}], r"a.jsonl:1: 'messages' is empty: use a list of messages such as"),
        ([{"messages": ["hello"]}], r"a.jsonl:1: message 1 of 'messages' is str: use a list of messages such as"),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
            r"a.jsonl:1: 'content' of message 1 of 'messages' is list, not a string: use a list of messages such as",
        ),
        (
            [{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}],
            "a.jsonl:1: conversations with tools",
        ),
        ([{"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}], "with tools are not trained on"),
    ],
)
def test_bad_conversations_are_one_line(rows, says, folder, tmp_path):
    tokenizer_of(folder, CHATML)
    with pytest.raises(ValueError, match=says):
        open_data(write(tmp_path / "a.jsonl", rows * 2), str(folder / "tokenizer.json"))


def test_conversations_need_a_template_and_more_than_one(folder, tmp_path):
    good = {"messages": conversation([("Hi", "Ho")])}
    data = write(tmp_path / "a.jsonl", [good, good])
    with pytest.raises(ValueError, match="bytes have no chat template: use --tokenizer"):
        open_data(data)
    plain = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "Hi": 1}, "Hi"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no chat template next to it"):
        open_data(data, str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="holds one conversation: use two or more"):
        open_data(write(tmp_path / "b.jsonl", [good]), str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"c.jsonl:2: no field 'messages' \(it has text\)"):
        open_data(write(tmp_path / "c.jsonl", [good, {"text": "x"}]), str(folder / "tokenizer.json")).source.read(1)


def test_files_of_a_conversation_each_are_split_together(folder, tmp_path):
    tokenizer_of(folder, CHATML)
    for i in range(30):
        write(tmp_path / f"chat-{i:02}.jsonl", [{"messages": conversation([(f"What is {i}?", f"It is {i}.")])}])
    source = open_data(f"{tmp_path}/chat-*.jsonl", str(folder / "tokenizer.json")).source
    assert sorted([*source.train, *source.val]) == list(range(30)) and 0 < len(source.val) < 5
    assert json.loads(source.read(7))[1]["content"] == "It is 7."
    (one,) = open_validation(str(tmp_path / "chat-00.jsonl"))  # has no need for a second
    assert len(one.source.val) == 1


def test_several_files_are_all_conversations_or_none(folder, tmp_path):
    tokenizer_of(folder, CHATML)
    name = str(folder / "tokenizer.json")
    chats = [{"messages": conversation([(f"What is {i}?", f"It is {i}.")])} for i in range(20)]
    one, two = write(tmp_path / "one.jsonl", chats[:9]), write(tmp_path / "two.jsonl", chats[9:])
    text = write(tmp_path / "text.jsonl", [{"text": "x"}, {"text": "y"}])
    for data in (f"{one},{two}", f"{one}:1,{two}:3"):
        opened = open_data(data, name)
        assert opened.source.chat and isinstance(opened.tokenizer, ChatTokenizer)
    for data in (f"{one},{text}", f"{text}:1,{one}:3"):
        with pytest.raises(ValueError, match=r"one.jsonl holds conversations and .*text.jsonl text: train on one kind"):
            open_data(data, name)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
@pytest.mark.parametrize("pieces", ["words", "one word", "spaces"])
def test_of_a_long_conversation_no_more_is_tokenized_than_fits(pieces, template, folder, tmp_path, monkeypatch):
    """What is kept, and whether the rest has a target, is as if all of it was."""
    shutil.copytree(folder, tmp_path / "there")
    merges = tokenizers.Tokenizer(models.BPE())
    merges.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    merges.train_from_iterator(["hello world, the quick brown aa aaaa" + " " * 64] * 50, learned)
    merges.save(str(tmp_path / "there/tokenizer.json"))
    (tmp_path / "there/chat_template.jinja").write_text(template)
    whole = ChatTokenizer(tmp_path / "there/tokenizer.json")
    text = {"words": "hello world ", "one word": "a", "spaces": " " * 200 + "x"}[pieces]
    for row in (5, 64):
        cut = ChatTokenizer(tmp_path / "there/tokenizer.json", row)
        for size in (1, 200, 5000, 50_000):
            long = (text * size)[: 10 * size]
            for turns in ([("q", long)], [(long, "a")], [("q", "a"), (long, "")], [(long, "")]):
                document = json.dumps(conversation(turns)).encode()
                expected, given = whole.encode(document), cut.encode(document)
                assert given[:row].tolist() == expected[:row].tolist()
                assert ((given >= 0).any(), len(given) > row) == ((expected >= 0).any(), len(expected) > row)
                assert size < 50_000 or len(given) == row + 1
    sizes, encode = [], cut._tokenizer.encode_batch

    class Spy:
        def encode_batch(self, texts, **options):
            sizes.extend(map(len, texts))
            return encode(texts, **options)

    monkeypatch.setattr(cut, "_tokenizer", Spy())
    if pieces != "spaces":
        cut.encode(json.dumps(conversation([("q", "hello " * 100_000)])).encode())
        assert sizes == [65 * 64]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("tools", [None, [], "[]", "null", "", [{"type": "function"}], '[{"type": "function"}]'])
def test_a_column_of_tools_that_names_none_is_no_reason_to_refuse(tools, form, folder, tmp_path):
    tokenizer_of(folder, CHATML)
    rows = [{"messages": conversation([(f"{i}?", f"{i}.")]), "tools": tools} for i in range(40)]
    if form == "jsonl":
        name = write(tmp_path / "a.jsonl", rows)
    else:
        name = str(tmp_path / "a.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    if tools and "function" in str(tools):
        with pytest.raises(ValueError, match="conversations with tools are not trained on"):
            open_data(name, str(folder / "tokenizer.json"))
    else:
        assert json.loads(open_data(name, str(folder / "tokenizer.json")).source.read(3))[1]["content"] == "3."
