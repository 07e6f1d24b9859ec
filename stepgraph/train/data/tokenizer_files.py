"""The files of a tokenizer in the form that Hugging Face's libraries read, and the tokens that begin and end a text."""

import shutil
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from stepgraph.models.hf_files import read_json, write_json
from stepgraph.train.data.tokenizer import SETTINGS, SPECIAL, open_tokenizer

BEGIN_OF_TEXT_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>")  # noqa: RUF001
GENERATION = "generation_config.json"
#: Tokenizers of transformers whose special tokens are only the ones that the settings name.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
#: Beside a tokenizer.json: what else belongs to it, and how to generate with its model.
BESIDE = (SETTINGS, SPECIAL, "chat_template.jinja", GENERATION)


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
        beside = None if self._path is None else self._path.parent / "chat_template.jinja"
        if beside is not None and beside.is_file():
            return beside.read_text(encoding="utf-8")
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
            for name in BESIDE:
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
    """`ByteTokenizer` as one of the ``tokenizers`` library: a token per byte with the byte as its id, and 256 for the
    end of a document."""
    letters = _letters()
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _letters() -> list[str]:
    """The letter of each byte in GPT-2's vocabulary: itself if it prints, else one from 256 on.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2, and its code.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte if byte in plain else 256 + others.index(byte)) for byte in range(256)]
