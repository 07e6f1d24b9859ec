"""The formats of ``--data``: text, JSON lines, parquet and Hugging Face datasets, all read lazily.

Whatever is wrong with a file raises a one-line ValueError that names the file, the place and a fix.
"""

import array
import codecs
import importlib
import itertools
import json
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from stepgraph.train.data.packed import unpacked
from stepgraph.train.data.sources import Sections, Source, Stdlib, describe_sections
from stepgraph.train.data.split import cut_sections

MESSAGES = "messages"  # the field of a conversation
FORMS = "stdlib, FILE.jsonl or FILE.txt (or with .gz), FILE.parquet or hf:NAME"
TEXT_SEPARATOR = b"<|endoftext|>"


class TextFile(Source):
    """A UTF-8 text file. The marker ``<|endoftext|>`` ends a document, as in the files that corpora are published in.

    Without that marker the file is one document (blank lines separate paragraphs, not documents), cut by position
    as in ``Sections``. The file stays on disk; only the document positions are in memory.
    """

    def __init__(self, path: Path):
        self.name, self.size, self._path = str(path), path.stat().st_size, path
        self._file = path.open("rb")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            _check_utf8(path, text)
            spans = _text_spans(text)
            if not spans:
                raise ValueError(f"{path} holds no text, only white space: give a file with text")
            self._one_document = len(spans) == 1
            if self._one_document:
                start, end = spans[0]
                if end - start < 2:
                    raise ValueError(f"{path} holds one document of 1 byte: too little to split; give more text")
                bounds, self.train, self.val = cut_sections(text, start, end)
                self._starts, self._ends = bounds[:-1], bounds[1:]
                self.unit = "sections"
            else:
                self._starts, self._ends = np.array(spans, dtype=np.int64).T
                self.split_by_index(len(spans))

    def stamp(self) -> str:
        return str(self._path.stat().st_mtime_ns)

    def read(self, index: int) -> bytes:
        self._file.seek(self._starts[index])
        return self._file.read(self._ends[index] - self._starts[index])

    def identity(self) -> bytes:
        return self._starts.tobytes()

    def describe(self) -> str:
        return describe_sections(self) if self._one_document else super().describe()


class JsonLines(Source):
    """A file with a JSON object per line, the document in one field of it; blank lines are passed over.

    Where the first line has ``messages`` and no such field, each line is a conversation.

    Only the byte offset and number of each line are in memory. Lines are parsed when they are read, so a bad line far
    into a large file raises only when the run reaches it.
    """

    def __init__(self, path: Path, text_field: str):
        self.name, self.size, self._path, self._field = str(path), path.stat().st_size, path, text_field
        offsets, numbers, position = array.array("q"), array.array("q"), 0
        self._file = path.open("rb")
        for number, line in enumerate(self._file, 1):
            if not line.isspace():
                offsets.append(position)
                numbers.append(number)
            position += len(line)
        if not offsets:
            raise ValueError(f"{path} holds no documents, only blank lines: give a JSON object per line")
        self._offsets, self._numbers = np.array(offsets), np.array(numbers)
        first, _ = self._record(0)
        self.chat = self._field not in first and MESSAGES in first
        if self.chat:
            self._field, self.unit = MESSAGES, "conversations"
            if len(offsets) == 1:
                raise ValueError(f"{path} holds one conversation: give two or more, of which one is for validation")
        self.split_by_index(len(offsets))

    def stamp(self) -> str:
        return str(self._path.stat().st_mtime_ns)

    def read(self, index: int) -> bytes:
        record, where = self._record(index)
        if self._field not in record:
            raise _no_field(where, self._field, record)
        return (_conversation if self.chat else _encoded)(record[self._field], where, self._field)

    def _record(self, index: int) -> tuple[dict[str, Any], str]:
        """The object in a line, and where that is."""
        where = f"{self._path}:{self._numbers[index]}"
        self._file.seek(self._offsets[index])
        line = self._file.readline().rstrip()
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}: not UTF-8 (byte 0x{line[error.start]:02x}): convert the file to UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not valid JSON ({error}): give a JSON object per line") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a JSON {type(record).__name__}, not an object with the field {self._field!r}")
        return record, where

    def identity(self) -> bytes:
        return self._offsets.tobytes()


class Parquet(Source):
    """One text column of a parquet file; one row group at a time is in memory, and shuffling respects row groups."""

    def __init__(self, path: Path, text_field: str):
        self.name, self.size, self._path, self._field = str(path), path.stat().st_size, path, text_field
        self._pa = _optional("pyarrow", f"reading {path}")
        parquet = importlib.import_module("pyarrow.parquet")
        try:
            self._file = parquet.ParquetFile(path)
        except (self._pa.ArrowException, OSError) as error:
            raise self._corrupt(error) from error
        if text_field not in self._file.schema_arrow.names:
            raise _no_field(str(path), text_field, self._file.schema_arrow.names)
        metadata = self._file.metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if not sum(rows):
            raise ValueError(f"{path} holds no rows: give a file with text in the column {text_field!r}")
        self.blocks = np.repeat(np.arange(len(rows)), rows)
        self._first_row = np.concatenate(([0], np.cumsum(rows)))
        self._group: tuple[int, Any] = (-1, None)  # the row group in memory: its number, its column
        self.split_by_index(sum(rows))

    def stamp(self) -> str:
        return str(self._path.stat().st_mtime_ns)

    def read(self, index: int) -> bytes:
        group = int(self.blocks[index])
        if self._group[0] != group:
            try:
                self._group = (group, self._file.read_row_group(group, columns=[self._field]).column(self._field))
            except (self._pa.ArrowException, OSError) as error:
                raise self._corrupt(error) from error
        value = self._group[1][int(index - self._first_row[group])].as_py()
        return _encoded(value, f"{self._path}, row {index}", self._field)

    def _corrupt(self, error: Exception) -> ValueError:
        reason = str(error).splitlines()[0]
        return ValueError(f"{self._path} is not a readable parquet file ({reason}): copy or download it again")


class HuggingFace(Source):
    """A dataset of the ``datasets`` library: its "train" split and, when it has one, its "validation" split.

    ``spec`` is ``NAME`` or ``NAME:CONFIG``; NAME is a dataset on the Hub or a local folder (of data files, or written
    by ``save_to_disk``). Tables are memory-mapped by the library.
    """

    def __init__(self, spec: str, text_field: str):
        self.name, self._field = f"hf:{spec}", text_field
        datasets = _optional("datasets", f"reading {self.name}")
        name, config = (spec, None) if os.path.isdir(spec) else (spec.split(":", 1) + [None])[:2]
        try:
            if any(os.path.isfile(os.path.join(name, marker)) for marker in ("dataset_dict.json", "state.json")):
                loaded = datasets.load_from_disk(name)
            else:
                loaded = datasets.load_dataset(name, config)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            generating = isinstance(error, datasets.exceptions.DatasetGenerationError)
            told = error.__cause__ if generating and error.__cause__ else error
            reason = (str(told).splitlines() or [type(told).__name__])[0]
            raise ValueError(f"cannot load {self.name} ({reason}): give hf:NAME or hf:NAME:CONFIG") from error
        if isinstance(loaded, datasets.Dataset):
            loaded = {"train": loaded}
        if "train" not in loaded:
            raise ValueError(f"{self.name} has the splits {', '.join(loaded)}: a split named train is needed")
        parts = [loaded[split] for split in ("train", "validation") if split in loaded and len(loaded[split])]
        if not len(loaded["train"]):
            raise ValueError(f"{self.name} has no rows in its train split: give a dataset with text")
        for part in parts:
            if text_field not in part.column_names:
                raise _no_field(self.name, text_field, part.column_names)
        self._parts = [part.select_columns([text_field]) for part in parts]
        self.size = sum(part.data.nbytes for part in self._parts)
        self._train_rows = len(parts[0])
        if len(parts) == 2:
            self.train = np.arange(self._train_rows)
            self.val = np.arange(self._train_rows, self._train_rows + len(parts[1]))
        else:
            self.split_by_index(self._train_rows)

    def read(self, index: int) -> bytes:
        part, row = (0, index) if index < self._train_rows else (1, index - self._train_rows)
        value = self._parts[part][int(row)][self._field]
        return _encoded(value, f"{self.name}, {('train', 'validation')[part]} row {row}", self._field)


def open_source(data: str, text_field: str = "text") -> Source:
    """The source that ``--data`` names: ``stdlib``, ``FILE.jsonl``, ``FILE.txt``, ``FILE.parquet`` or ``hf:NAME``.

    ``text_field`` is the field or column with the text, in jsonl and parquet files and in datasets. The first document
    is read here, so that a wrong field or kind of file raises at once.

    Raises:
        ValueError: one line, for a missing, empty or corrupt file, a missing package, and any other form.
    """
    if data == "stdlib":
        return Stdlib()
    if data.startswith("hf:") and len(data) > 3:
        source = HuggingFace(data[3:], text_field)
    else:
        source = _open_file(data, text_field)
    first = source.read(0)
    return source if len(source) > 1 else Sections(source.name, source.size, first)


def _open_file(data: str, text_field: str) -> Source:
    path = Path(data)
    packed = path.suffix.lower() == ".gz"
    suffix = path.with_suffix("").suffix.lower() if packed else path.suffix.lower()
    if suffix not in (".jsonl", ".txt", ".parquet") or (packed and suffix == ".parquet"):
        raise ValueError(f"unknown data {data!r}: give {FORMS}")
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise ValueError(f"{path} is empty: give a file with text")
        with path.open("rb"):  # a missing file, a folder, a file that may not be read
            pass
    except OSError as error:
        raise ValueError(f"cannot read data {path}: {error.strerror}") from error
    there = unpacked(path) if packed else path
    if suffix == ".txt":
        source = TextFile(there)
    else:
        source = (JsonLines if suffix == ".jsonl" else Parquet)(there, text_field)
    if packed:
        source.name = str(path)
        source.stamp = lambda: str(path.stat().st_mtime_ns)  # not that of the copy
    return source


def _optional(package: str, purpose: str) -> ModuleType:
    """An optional package, or a ValueError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ValueError(f"{purpose} needs the package {package}: pip install 'stepgraph[data]'") from error


def _encoded(value: object, where: str, field: str) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field!r} is {type(value).__name__}, not a string: put each document's text there")
    try:
        return value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise ValueError(f"{where}: {field!r} is not valid Unicode ({error.reason}): fix the text") from error


def _conversation(value: object, where: str, field: str) -> bytes:
    """The messages of a conversation as JSON. ``ValueError`` for anything but a list of roles with what they say."""
    messages = value if isinstance(value, list) else []
    for message in messages or [None]:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(
                f'{where}: {field!r} must be a list of messages such as {{"role": "user", "content": "Hello"}}'
            )
    return _encoded(json.dumps(messages, ensure_ascii=False), where, field)


def _no_field(where: str, field: str, names: Iterable[str]) -> ValueError:
    has = ", ".join(list(names)[:8]) or "none"
    return ValueError(f"{where}: no field {field!r} (it has {has}): name the one with the text by --text-field")


def _check_utf8(path: Path, text: mmap.mmap) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    step = 1 << 20
    for start in range(0, len(text), step):
        held = len(decoder.getstate()[0])  # bytes of a character that began in the chunk before
        try:
            decoder.decode(text[start : start + step], final=start + step >= len(text))
        except UnicodeDecodeError as error:
            at = start - held + error.start
            raise ValueError(f"{path}: not UTF-8 at byte {at} (0x{text[at]:02x}): convert the file to UTF-8") from error


def _text_spans(text: mmap.mmap) -> list[tuple[int, int]]:
    """(start, end) of each document, without the white space around it; documents of white space only are dropped."""
    edges = [(0, 0), *(match.span() for match in re.finditer(re.escape(TEXT_SEPARATOR), text)), (len(text), 0)]
    spans = []
    for (_, start), (end, _) in itertools.pairwise(edges):
        first = re.compile(rb"\S").search(text, start, end)
        if first:
            while text[end - 1] in b" \t\r\n\f\v":
                end -= 1
            spans.append((first.start(), end))
    return spans
