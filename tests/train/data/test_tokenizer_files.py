"""A tokenizer's files next to exported weights, read by transformers."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from stepgraph.train.data.tokenizer import ByteTokenizer, TokenizerFiles, byte_level, open_tokenizer

VOCABULARY = ["<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>", "hello", "world"]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of words with three special tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, "hello"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(VOCABULARY[:3])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_the_byte_tokenizer_of_the_library_gives_the_bytes(text):
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    assert ids == ByteTokenizer().encode(text).tolist() and tokenizer.decode(ids) == text


def test_ids_are_those_of_training_where_no_settings_name_others(folder, tmp_path):
    name = str(folder / "tokenizer.json")
    files = TokenizerFiles(name)
    assert (files.bos_id, files.eos_id) == (1, 0) and open_tokenizer(name).eos_id == 0
    files.write(tmp_path / "out")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (read.bos_token_id, read.eos_token_id) == (1, 0) and read("world hello")["input_ids"] == [4, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        TokenizerFiles("bytes").write(tmp_path)


def test_settings_beside_the_tokenizer_are_kept(folder, tmp_path):
    settings = {"eos_token": {"content": "<|eot_id|>"}, "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    files = TokenizerFiles(str(folder / "tokenizer.json"))
    assert (files.bos_id, files.eos_id) == (1, 2)
    files.write(tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    for odd in ({"eos_token": 5}, {"eos_token": ["<|eot_id|>"]}, {"eos_token": {"content": 2}}, {"bos_token": 7}):
        templates = [{"name": "default"}, "default", {"name": "other", "template": "x"}]
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        (folder / "tokenizer_config.json").write_text(json.dumps(odd | {"chat_template": templates}))
        files = TokenizerFiles(str(folder / "tokenizer.json"))
        assert (files.bos_id, files.eos_id, files.chat_template) == (1, 0, None)
    (folder / "tokenizer_config.json").write_text("{}")
    for stop, ends in ((0, [0]), (2, [2, 0]), ([2, 1], [2, 1, 0]), ([1, 0], [1, 0]), (None, [0]), ("x", [0])):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop, "top_k": 5}))
        files = TokenizerFiles(str(folder / "tokenizer.json"))
        files.write(tmp_path / "out")
        assert files.ends == ends
        read = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
        assert (read.eos_token_id, read.top_k) == (stop if stop in (0, [1, 0]) else ends, 5)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not valid JSON"):
        TokenizerFiles(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer of"):
        TokenizerFiles(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"cannot read tokenizer .*: No such file or directory"):
        TokenizerFiles(str(folder / "none.json"))
