"""Tokenizers: documents (bytes) to token ids and back."""

import hashlib
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from stepgraph.errors import first_line, require_file
from stepgraph.models.hf_decoder import CONFIG, read_json, write_json

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
        return [self.encode(document) for document in documents]

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids (N,); end-of-text ids are left out, invalid UTF-8 becomes U+FFFD."""
        ids = _checked_ids(ids, self)
        return ids[ids != self.eos_id].astype(np.uint8).tobytes().decode("utf-8", "replace")


class JsonTokenizer:
    """A ``tokenizer.json`` of the Hugging Face ``tokenizers`` library.

    No special tokens are added, and text that merely spells one (``</s>`` in a document) is encoded as plain text, so
    the end-of-text id appears in a stream only where a document ends. It is the first of `END_OF_TEXT_NAMES` in the
    vocabulary, else ``eos_token`` of ``tokenizer_config.json``. Truncation and padding saved in the file are disabled:
    they would drop tokens, or add some. Raises ``ValueError``: the file is missing, is not a tokenizer, or has no
    end-of-text token.
    """

    def __init__(self, path: str | Path):
        self.name = Path(path).name
        try:
            require_file(Path(path))
            content = Path(path).read_bytes()
        except FileNotFoundError as error:
            folder, fix = str(Path(path).parent), "use another by --tokenizer"
            if Path(folder, CONFIG).is_file():
                make = f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
                fix += f", or let transformers make it: {make}"
            raise ValueError(f"cannot read tokenizer {path}: {error.strerror}; {fix}") from error
        except OSError as error:
            raise ValueError(f"cannot read tokenizer {path}: {error.strerror}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises a plain Exception for every malformed file
            said = f"{path} is not a tokenizer of the `tokenizers` library ({first_line(error)})"
            raise ValueError(f"{said}; use a model's tokenizer.json") from error
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
    """The tokenizer that ``--tokenizer`` names: ``bytes``, or the path of a ``tokenizer.json``. Raises ``ValueError``:
    a different form, or a file that is missing or is not a tokenizer."""
    if name == "bytes":
        return ByteTokenizer()
    if Path(name).is_dir():
        raise ValueError(f"tokenizer {name} is a folder: use the file, {Path(name, 'tokenizer.json')}")
    if not name.endswith(".json"):
        raise ValueError(f"unknown tokenizer {name!r}: use bytes or PATH/tokenizer.json")
    return JsonTokenizer(name)


BEGIN_OF_TEXT_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>")  # noqa: RUF001
GENERATION = "generation_config.json"
#: Tokenizers of transformers whose special tokens are only the ones that the settings name.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
#: Files copied along with tokenizer.json, among them the model's generation config.
_COMPANIONS = (SETTINGS, SPECIAL, "chat_template.jinja", GENERATION)


class TokenizerFiles:
    """The tokenizer that ``--tokenizer`` names, with the files next to it.

    ``bos_id``, ``eos_id``: ids of the tokens that tokenizer_config.json calls ``bos_token`` and ``eos_token``. Where it
    names none: a token by one of the usual names, or None; and the token after each document of the training data.
    ``ends``: ids that end what a model writes, those in generation_config.json and ``eos_id``.

    Raises ``ValueError``, in one line, as `open_tokenizer` does, and for a file next to it that should hold an object.
    """

    def __init__(self, name: str):
        opened = open_tokenizer(name)
        self._path = None if name == "bytes" else Path(name)
        self._tokenizer = byte_level() if self._path is None else tokenizers.Tokenizer.from_file(str(self._path))
        self.settings: dict[str, Any] = {}
        for file in (SETTINGS, SPECIAL):
            if "added_tokens_decoder" not in self.settings:  # otherwise they name all, which older tokenizers do not
                self.settings |= self._beside(file)
        names = [self._named("bos_token"), *BEGIN_OF_TEXT_NAMES]
        ids = [self._tokenizer.token_to_id(token) for token in names if token]
        self.bos_id = next((found for found in ids if found is not None), None)
        eos = self._named("eos_token")
        found = None if eos is None else self._tokenizer.token_to_id(eos)
        self.eos_id = opened.eos_id if found is None else found
        self._generation = self._beside(GENERATION)
        given = self._generation.get("eos_token_id")
        given = [i for i in (given if isinstance(given, list) else [given]) if isinstance(i, int)]
        self.ends = given if self.eos_id in given else [*given, self.eos_id]

    def _beside(self, name: str) -> dict[str, Any]:
        """The content of the file of that name next to the tokenizer; empty where there is none."""
        file = None if self._path is None else self._path.parent / name
        return {} if file is None or not file.exists() else read_json(file)

    def _named(self, key: str) -> str | None:
        """The text of a special token in tokenizer_config.json, where it is a string or an object."""
        value = self.settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of ``bos_token``, ``eos_token``, ``pad_token`` and the like, as a chat template reads them: those
        that the settings name. Where they are of a class of one model, or there are none, the usual ones count too."""
        known = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        if self.settings.get("tokenizer_class") in _PLAIN_CLASSES:
            known = {}
        tokens = {key: self._tokenizer.id_to_token(i) for key, i in known.items() if i is not None}
        tokens = {key: text for key, text in tokens.items() if key not in self.settings}
        named = {key: self._named(key) for key in self.settings if key.endswith("_token")}
        return tokens | {key: text for key, text in named.items() if text is not None}

    @property
    def chat_template(self) -> str | None:
        """The template next to the tokenizer, the one called default where there are several; None if there is none."""
        template = None if self._path is None else self._path.parent / "chat_template.jinja"
        if template is not None and template.is_file():
            return template.read_text(encoding="utf-8")
        given = self.settings.get("chat_template")
        if isinstance(given, list):
            named = [one for one in given if isinstance(one, dict)]
            given = next((one.get("template") for one in named if one.get("name") == "default"), None)
        return given if isinstance(given, str) else None

    def write(self, folder: Path) -> None:
        """Write the files to ``folder``, which is made if needed. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._path is None:
            # Not its save, whose errors are no OSErrors.
            (folder / "tokenizer.json").write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        else:
            shutil.copyfile(self._path, folder / "tokenizer.json")
            for name in _COMPANIONS:
                if (self._path.parent / name).is_file():
                    shutil.copyfile(self._path.parent / name, folder / name)
        if (folder / GENERATION).exists() and self._generation.get("eos_token_id") not in (self.eos_id, self.ends):
            write_json(folder / GENERATION, self._generation | {"eos_token_id": self.ends})  # it wins over config.json
        if not (folder / SETTINGS).exists():
            kinds = {"bos_token": self.bos_id, "eos_token": self.eos_id}
            tokens = {kind: self._tokenizer.id_to_token(i) for kind, i in kinds.items() if i is not None}
            whole = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            write_json(folder / SETTINGS, whole | tokens)


def byte_level() -> tokenizers.Tokenizer:
    """`ByteTokenizer` as one of the ``tokenizers`` library: a byte is the id of its token, 256 ends a document."""
    letters = _letters()
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _letters() -> list[str]:
    """The letter of each byte in GPT-2's vocabulary: itself if it prints, else one from 256 upwards.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2, and its code.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte if byte in plain else 256 + others.index(byte)) for byte in range(256)]
