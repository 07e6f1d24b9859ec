"""Files and templates that never end, or are nested without end: one line, within limits of time and memory."""

import gzip
import json
import os
import re

import pytest

from stepgraph.config.files import read_config
from stepgraph.errors import read_json
from stepgraph.train.data import chat, open_data
from stepgraph.train.data.chat import ChatTemplate
from stepgraph.train.data.tokenizer import JsonTokenizer
from stepgraph.train.records.files import read_metrics, status_of

DEEP = "[" * 100_000 + "]" * 100_000
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "no", "weight": 0},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "yes", "weight": 1},
]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}.{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501
MARKED = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"  # noqa: E501


def test_json_that_is_nested_without_end_is_one_line(tmp_path):
    for name, text in (("a.json", DEEP), ("a.toml", f"x = {DEEP}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="nested too deeply"):
            read_config(tmp_path / name, None)
    (tmp_path / "metrics.jsonl").write_text(f"{DEEP}\n{{}}\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "summary.json").write_text(DEEP)
    assert status_of(tmp_path) is None


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "summary.json")
    with pytest.raises(ValueError, match="a pipe or a device"):
        read_json(tmp_path / "summary.json")
    assert status_of(tmp_path) is None


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "its loops run more than"),
        ("{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "characters"),
        ("{{ 'a' * 10 ** 10 }}", "characters"),
        ("{{ 9 ** (9 ** 9) }}", "characters"),
    ],
)
def test_a_template_without_end_is_one_line(template, says, monkeypatch):
    monkeypatch.setattr(chat, "_MOST_LOOPS", 10_000)
    monkeypatch.setattr(chat, "_LARGEST", 1 << 20)
    with pytest.raises(ValueError, match=f"the chat template refuses .*{says}"):
        ChatTemplate(template, {}).render(TALK)


def test_a_normalizer_that_multiplies_characters_is_refused(tmp_path):
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    file = {"normalizer": {"type": "Sequence", "normalizers": [grow] * 5}, "model": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=re.escape("may make 10,000,000,000 characters of one")):
        JsonTokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_messages_of_weight_0_and_without_content_are_no_targets(template):
    text, spans = ChatTemplate(template, {}).spans(TALK)
    assert [text[start:end] for start, end in spans] == ["yes."]


def test_another_weight_is_refused():
    with pytest.raises(ValueError, match=r"weight=0\.5 of a message is not allowed"):
        ChatTemplate(PLAIN, {}).spans([{"role": "assistant", "content": "x", "weight": 0.5}])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"text " * 99), "a.txt is packed by gzip"),
        ("text".encode("utf-16-le") * 99, "UTF-16"),
        ("текст без знака ".encode("utf-16-le") * 99, "UTF-16"),
        ("текст".encode("utf-16-be") * 99, "UTF-16"),
        ("中文".encode("utf-16-le") * 99, "not UTF-8"),
    ],
    ids=["gzip", "utf-16", "russian", "big-endian", "chinese"],
)
def test_text_of_another_form_is_named(content, says, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=says):
        open_data(str(tmp_path / "a.txt"), "bytes", "text")


def test_a_mark_at_the_start_of_text_is_not_learned(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"some text\n" * 99)
    assert open_data(str(tmp_path / "a.txt"), "bytes", "text").source.read(0).startswith(b"some")
