"""Opens the sources of ``--data``: one source, several files as one, and mixtures of sources with weights."""

import glob
import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepgraph.errors import require_file
from stepgraph.models.loss import PAIR
from stepgraph.train.data.formats.files import JsonLines, Parquet, TextFile, unpacked
from stepgraph.train.data.formats.hub import HuggingFace, Streamed
from stepgraph.train.data.sources import Corpus, Sections, Source, Stdlib, megabytes

FORMS = "stdlib, FILE.jsonl or FILE.txt (or with .gz), FILE.parquet, hf:NAME or hf-stream:NAME"
#: Prefixes of the name of a data set: read whole, or during training.
WHOLE, STREAMED = "hf:", "hf-stream:"
#: Of any sign and size: what is no weight is refused as one, not taken for a part of the name.
_WEIGHTED = r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"


@dataclass(frozen=True)
class Part:
    """A source of a mixture, the name that its losses have, and its share of the rows, in (0, 1]."""

    source: Corpus
    name: str
    share: float


def open_parts(data: str, text_field: str = "text") -> list[Part]:
    """The parts of ``data``: ``NAME:WEIGHT,...`` is a mixture; ``NAME,...`` and patterns such as ``*.jsonl.gz`` are one
    source of several files. NAME: as `open_source` takes it, or such a pattern. Raises ``ValueError``: one line;
    weights that are not above 0 or that some parts lack, a pattern that no file has, and what `open_source` refuses."""
    words = [data] if os.path.exists(data) else data.split(",")
    if text_field != "text" and all(re.fullmatch(r"stdlib|.*\.txt(\.gz)?", _plain(word), re.I) for word in words):
        what = "loss=dpo reads preference pairs" if text_field == PAIR else f"text_field={text_field} names a field"
        fix = "use a jsonl or parquet file of these" if text_field == PAIR else "drop --text-field"
        raise ValueError(f"{what} and {data} has none: {fix}")
    found = [re.fullmatch(_WEIGHTED, word) for word in words]
    if not any(found):
        files = [file for word in words for file in _files(word)]
        return [Part(_with_validation(_joined(data, files, text_field)), "", 1.0)]
    if not all(found):
        missing = next(word for word, match in zip(words, found, strict=True) if match is None)
        raise ValueError(f"data {data}: {missing!r} has no weight and others have: write {missing}:1")
    weights = [float(match[2]) for match in found]
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"data {data}: every weight must be finite, and above 0: leave out what is not wanted")
    sources = [_with_validation(_joined(match[1], _files(match[1]), text_field)) for match in found]
    names = _names([match[1] for match in found])
    return [Part(s, n, w / sum(weights)) for s, n, w in zip(sources, names, weights, strict=True)]


def open_validation(data: str, text_field: str = "text") -> list[Part]:
    """The sets of ``--val-data NAME,NAME,...``, each of equal weight and with all its documents for validation."""
    words = [data] if os.path.exists(data) else data.split(",")
    parts = []
    for word, name in zip(words, _names(words), strict=True):
        if (weighted := re.fullmatch(_WEIGHTED, word)) and not os.path.exists(word):
            raise ValueError(f"val_data {word!r}: each set counts the same and has no weight: write {weighted[1]}")
        source = _joined(word, _files(word), text_field)
        source.only_validation()
        parts.append(Part(source, name, 1 / len(words)))
    return parts


def _plain(word: str) -> str:
    """A part of ``--data`` without its weight."""
    weighted = None if os.path.exists(word) else re.fullmatch(_WEIGHTED, word)
    return weighted[1] if weighted else word


class Joined(Source):
    """The documents of several sources, one by one; each is split separately, except for those of a conversation
    each, which are split together."""

    def __init__(self, name: str, sources: Sequence[Source]):
        require_one_kind(sources)
        self.name, self._sources, self.unit, self.chat = name, sources, sources[0].unit, sources[0].chat
        self.size = sum(source.size for source in sources)
        self.field = ",".join(source.field for source in sources)
        self._starts = np.cumsum([0, *map(len, sources)])
        self.train = np.concatenate([s.train + start for s, start in zip(sources, self._starts, strict=False)])
        self.val = np.concatenate([s.val + start for s, start in zip(sources, self._starts, strict=False)])
        if not len(self.val):
            self.split_by_index(len(self.train))
        if any(source.blocks is not None for source in sources):
            self.blocks = self._joined_blocks()

    def _joined_blocks(self) -> np.ndarray:
        """The block of each document, numbered over all sources. In a source without blocks, each document is one."""
        blocks, next_block = [], 0
        for source in self._sources:
            own = np.arange(len(source)) if source.blocks is None else source.blocks
            blocks.append(own + next_block)
            next_block += int(own.max()) + 1
        return np.concatenate(blocks)

    def read(self, index: int) -> bytes:
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._sources[place].read(int(index - self._starts[place]))

    def identity(self) -> bytes:
        return "\n".join(source.fingerprint for source in self._sources).encode()

    def stamp(self) -> str:
        return hashlib.blake2b("\n".join(s.stamp() for s in self._sources).encode(), digest_size=8).hexdigest()

    def describe(self) -> str:
        return (
            f"{self.name}: {len(self._sources)} files, {len(self):,} {self.unit}, {megabytes(self.size)}; "
            f"{len(self.train):,} train / {len(self.val):,} validation"
        )


def require_one_kind(sources: Sequence[Corpus]) -> None:
    """Raise ``ValueError`` where some of ``sources`` are conversations and others text."""
    for source in sources:
        if source.chat != sources[0].chat:
            one, other = (source, sources[0]) if source.chat else (sources[0], source)
            raise ValueError(f"{one.name} holds conversations and {other.name} text: train on one kind at a time")


def _joined(name: str, files: list[str], text_field: str) -> Corpus:
    sources = [open_source(file, text_field) for file in files]
    if len(sources) == 1:
        return sources[0]
    if streamed := next((one for one in sources if isinstance(one, Streamed)), None):
        raise ValueError(
            f"data {name}: {streamed.name} cannot be joined with others, as it is streamed: use weights, as in A:1,B:1"
        )
    return Joined(name, sources)


def _with_validation(source: Corpus) -> Corpus:
    """``source``; ``ValueError`` where it has no document to spare for validation."""
    if isinstance(source, Source) and not len(source.val):
        raise ValueError(f"{source.name} holds one conversation: use two or more, because one is used for validation")
    return source


def _files(word: str) -> list[str]:
    """``word``, or the files that it is a pattern of, by name."""
    if os.path.exists(word) or not glob.has_magic(word) or word.startswith((WHOLE, STREAMED)):
        return [word]
    if not (files := sorted(glob.glob(word, recursive=True))):
        raise ValueError(f"no file is called {word}: check the pattern of --data")
    return files


def _names(words: list[str]) -> list[str]:
    """Short, different names for metrics: ``code`` for ``data/code.jsonl.gz``, ``web`` for ``data/web/*.parquet``."""
    names: list[str] = []
    for word in words:
        path = Path(word.removeprefix(WHOLE).removeprefix(STREAMED))
        plain = (re.sub(r"\W+", "_", part).strip("_") for part in (path.name.split(".")[0], *path.parts[-2::-1]))
        stem = next(filter(None, plain), "part")
        number = 2
        name = stem
        while name in names:
            name, number = f"{stem}_{number}", number + 1
        names.append(name)
    return names


def open_source(data: str, text_field: str = "text") -> Corpus:
    """What one name of ``--data`` means: ``stdlib``, ``FILE.jsonl``, ``FILE.txt``, ``FILE.parquet``, ``hf:NAME`` or
    ``hf-stream:NAME``.

    ``text_field`` is the field or column with the text, in jsonl and parquet files and in data sets. The first document
    is read here, so that a wrong field or kind of file raises at once. Raises ``ValueError``: one line, for a missing,
    empty or corrupt file, a missing package, and any other form.
    """
    if data == "stdlib":
        return Stdlib()
    if data.startswith(STREAMED) and data != STREAMED:
        return Streamed(data.removeprefix(STREAMED), text_field)
    if data.startswith(WHOLE) and data != WHOLE:
        source = HuggingFace(data.removeprefix(WHOLE), text_field)
    else:
        source = _open_file(data, text_field)
    first = source.read(0)
    # A conversation that is alone cannot be cut: it is for training, unless all are for validation.
    return source if source.chat or len(source) > 1 else Sections(source, first)


def _open_file(data: str, text_field: str) -> Source:
    path = Path(data)
    packed = path.suffix.lower() == ".gz"
    suffix = path.with_suffix("").suffix.lower() if packed else path.suffix.lower()
    if suffix not in (".jsonl", ".txt", ".parquet") or (packed and suffix == ".parquet"):
        raise ValueError(f"unknown data {data!r}: use {FORMS}")
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise ValueError(f"{path} is empty: use a file with text")
        require_file(path)
        with path.open("rb"):  # a missing file, a file that may not be read
            pass
    except OSError as error:
        raise ValueError(f"cannot read data {path}: {error.strerror}; use the path of a readable file") from error
    there = unpacked(path) if packed else path
    if suffix == ".txt":
        source = TextFile(there, str(path))
    elif suffix == ".jsonl":
        source = JsonLines(there, text_field, str(path))
    else:
        source = Parquet(path, text_field)
    if packed:
        source.stamp = lambda: str(path.stat().st_mtime_ns)  # not that of the copy
    return source
