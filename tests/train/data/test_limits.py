"""Files of another form than their name says, in one line, and messages that are no targets."""

import gzip
import os

import pytest

from stepgraph.errors import read_json
from stepgraph.train.data import open_data
from stepgraph.train.data.chat import ChatTemplate
from stepgraph.train.records.folder import status_of

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "no", "weight": 0},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "yes", "weight": 1},
]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}.{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501
MARKED = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"  # noqa: E501


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "summary.json")
    with pytest.raises(ValueError, match="a pipe or a device"):
        read_json(tmp_path / "summary.json")
    assert status_of(tmp_path) is None


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
