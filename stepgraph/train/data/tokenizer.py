"""Tokenizers: documents (bytes) to token ids and back."""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from stepgraph.errors import first_line, require_file
from stepgraph.models.hf_files import read_json

#: Files next to tokenizer.json that name its special tokens.
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
END_OF_TEXT_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")  # noqa: RUF001


class Tokenizer(Protocol):
    """What the loader needs of a tokenizer."""

    name: str
    eos_id: int  # written after each document; `encode` never adds it
    vocab_size: int  # ids are below this: the rows of the embedding
    fingerprint: str  # equal for tokenizers that encode alike

    def encode(self, document: bytes | str) -> np.ndarray:
        """Token ids, int32 (N,)."""

    def encode_batch(self, documents: list[bytes]) -> list[np.ndarray]:
        """``encode`` of each document."""

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids (N,), without end-of-text tokens."""


class ByteTokenizer:
    """A token per byte: ids 0 to 255, and 256 for the end of a document."""

    name = "bytes"
    eos_id = 256
    vocab_size = 257
    fingerprint = "bytes"

    def encode(self, document: bytes | str) -> np.ndarray:
        """The bytes of ``document`` (UTF-8 where it is a str) as int32 (N,); any bytes are taken as they are."""
        data = document.encode() if isinstance(document, str) else document
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def encode_batch(self, documents: list[bytes]) -> list[np.ndarray]:
        """``encode`` of each document."""
        return [self.encode(document) for document in documents]

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids (N,); end-of-text ids are left out, invalid UTF-8 becomes U+FFFD."""
        ids = _checked_ids(ids, self)
        return ids[ids != self.eos_id].astype(np.uint8).tobytes().decode("utf-8", "replace")


class JsonTokenizer:
    """A ``tokenizer.json`` of the Hugging Face ``tokenizers`` library.

    No special tokens are added, and text that merely spells one (``</s>`` in a document) is encoded as plain text, so
    the end-of-text id appears in a stream only where a document ends. It is the first of `END_OF_TEXT_NAMES`
    in the vocabulary, else ``eos_token`` of ``tokenizer_config.json``. Truncation and padding saved in the file are
    disabled: they would drop tokens, or add some.

    Raises:
        ValueError: the file is missing, is not a tokenizer, or has no end-of-text token.
    """

    def __init__(self, path: str | Path):
        self.name = Path(path).name
        try:
            require_file(Path(path))
            content = Path(path).read_bytes()
        except FileNotFoundError as error:
            folder = str(Path(path).parent)
            make = f"let transformers make it: AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
            said = f"cannot read tokenizer {path}: {error.strerror}; give another by --tokenizer, or {make}"
            raise ValueError(said) from error
        except OSError as error:
            raise ValueError(f"cannot read tokenizer {path}: {error.strerror}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises a plain Exception for every malformed file
            raise ValueError(f"{path} is not a tokenizer of the `tokenizers` library ({first_line(error)})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        names = (*END_OF_TEXT_NAMES, _eos_token(Path(path)))
        eos = next((name for name in names if name in vocabulary), None)
        if eos is None:
            usual = ", ".join(END_OF_TEXT_NAMES)
            raise ValueError(
                f"tokenizer {path} has no end-of-text token: name one of its tokens eos_token in {SETTINGS} next to "
                f"it, or add one of {usual}"
            )
        self.eos_id = vocabulary[eos]
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        own = content if eos in END_OF_TEXT_NAMES else content + eos.encode()
        self.fingerprint = hashlib.blake2b(own, digest_size=8).hexdigest()

    def encode(self, document: bytes | str) -> np.ndarray:
        """Token ids, int32 (N,); bytes that are not UTF-8 are read as U+FFFD."""
        text = document if isinstance(document, str) else document.decode("utf-8", "replace")
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_batch(self, documents: list[bytes]) -> list[np.ndarray]:
        """``encode`` of each document, on as many threads as the library takes."""
        texts = [document.decode("utf-8", "replace") for document in documents]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in encoded]

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids (N,), without special tokens."""
        return self._tokenizer.decode(_checked_ids(ids, self).tolist(), skip_special_tokens=True)


def _eos_token(path: Path) -> str | None:
    """``eos_token`` as the files next to a tokenizer give it to transformers."""
    for name in (SETTINGS, SPECIAL):
        value = read_json(path.parent / name).get("eos_token") if (path.parent / name).exists() else None
        if isinstance(text := value.get("content") if isinstance(value, dict) else value, str):
            return text
    return None


def _checked_ids(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(wrong):
        raise ValueError(f"token id {wrong[0]} is outside tokenizer {tokenizer.name} (0 to {tokenizer.vocab_size - 1})")
    return ids


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that ``--tokenizer`` names: ``bytes``, or the path of a ``tokenizer.json``.

    Raises:
        ValueError: another form, or a file that is missing or is not a tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if Path(name).is_dir():
        raise ValueError(f"tokenizer {name} is a folder: give the file, {Path(name, 'tokenizer.json')}")
    if not name.endswith(".json"):
        raise ValueError(f"unknown tokenizer {name!r}: give bytes or PATH/tokenizer.json")
    return JsonTokenizer(name)
