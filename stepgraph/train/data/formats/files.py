"""Text, JSON lines and parquet, all read lazily.

Whatever is wrong with a file raises a one-line ValueError that names the file, the place and a fix.
"""

import array
import codecs
import gzip
import hashlib
import importlib
import itertools
import json
import mmap
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from stepgraph.errors import first_line
from stepgraph.train.data.formats.fields import columns_of, document_of, field_of, no_field, optional
from stepgraph.train.data.sources import FileSource, cut_sections, describe_sections
from stepgraph.train.data.token_cache import default_folder

TEXT_SEPARATOR = b"<|endoftext|>"
#: Bytes that text seldom has, and UTF-16 without a mark in half of its places: the upper halves of small characters.
_CONTROL = bytes(range(9)) + bytes(range(14, 32))


class TextFile(FileSource):
    """A UTF-8 text file. The marker ``<|endoftext|>`` ends a document, as in the files that corpora are published in.

    Without that marker the file is one document (blank lines separate paragraphs, not documents), cut by position
    as in ``Sections``. The file stays on disk; only the document positions are in memory.
    """

    def __init__(self, path: Path, name: str):
        super().__init__(path, name)
        self._file = path.open("rb")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            _check_utf8(name, text)
            spans = _text_spans(text)
            if not spans:
                raise ValueError(f"{name} holds no text, only white space: use a file with text")
            self._one_document = len(spans) == 1
            if self._one_document:
                start, end = spans[0]
                if end - start < 2:
                    raise ValueError(f"{name} holds one document of 1 byte: too little to split; use more text")
                bounds, self.train, self.val = cut_sections(text, start, end)
                self._starts, self._ends = bounds[:-1], bounds[1:]
                self.unit = "sections"
            else:
                self._starts, self._ends = np.array(spans, dtype=np.int64).T
                self.split_by_index(len(spans))

    def read(self, index: int) -> bytes:
        self._file.seek(self._starts[index])
        return self._file.read(self._ends[index] - self._starts[index])

    def identity(self) -> bytes:
        return self._starts.tobytes()

    def describe(self) -> str:
        return describe_sections(self) if self._one_document else super().describe()


class JsonLines(FileSource):
    """A file with a JSON object per line, the document in one field of it; blank lines are passed over.

    Where the first line has the fields of a conversation and no such field, each line is one.

    Only the byte offset and number of each line are in memory. Lines are parsed when they are read, so a bad line far
    into a large file raises only when the run reaches it.
    """

    def __init__(self, path: Path, text_field: str, name: str):
        super().__init__(path, name)
        self.field = text_field
        offsets, numbers, position = array.array("q"), array.array("q"), 0
        self._file = path.open("rb")
        _check_unpacked(name, self._file.read(2))
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.isspace():
                offsets.append(position)
                numbers.append(number)
            position += len(line)
        if not offsets:
            raise ValueError(f"{name} holds no documents, only blank lines: use a JSON object per line")
        self._offsets, self._numbers = np.array(offsets), np.array(numbers)
        first, where = self._record(0)
        self.field, self.chat, self.unit = field_of(first, text_field, where)
        self.split_by_index(len(offsets))

    def read(self, index: int) -> bytes:
        record, where = self._record(index)
        if self.field not in record:
            raise no_field(where, self.field, record)
        return document_of(record, where, self.field, self.chat)

    def _record(self, index: int) -> tuple[dict[str, Any], str]:
        """The object in a line, and where that is."""
        where = f"{self.name}:{self._numbers[index]}"
        self._file.seek(self._offsets[index])
        line = self._file.readline().rstrip()
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 (byte 0x{line[error.start]:02x}): convert it to UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not valid JSON ({error}): use a JSON object per line") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a JSON {type(record).__name__}, not an object with the field {self.field!r}")
        return record, where

    def identity(self) -> bytes:
        return self._offsets.tobytes()


class Parquet(FileSource):
    """A column of a parquet file, text or conversations; a row group at a time is in memory, as shuffling respects."""

    def __init__(self, path: Path, text_field: str):
        super().__init__(path, str(path))
        self._pa = optional("pyarrow", f"reading {path}")
        parquet = importlib.import_module("pyarrow.parquet")
        try:
            self._file = parquet.ParquetFile(path)
        except (self._pa.ArrowException, OSError) as error:
            raise self._corrupt(error) from error
        names = self._file.schema_arrow.names
        self.field, self.chat, self.unit = field_of(names, text_field, str(path))
        self._columns = columns_of(names, self.field, self.chat)
        metadata = self._file.metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if not sum(rows):
            raise ValueError(f"{path} holds no rows: use a file with text in the column {text_field!r}")
        self.blocks = np.repeat(np.arange(len(rows)), rows)
        self._first_row = np.concatenate(([0], np.cumsum(rows)))
        self._group: tuple[int, Any] = (-1, None)  # the row group in memory: its number, its columns
        self.split_by_index(sum(rows))

    def read(self, index: int) -> bytes:
        group = int(self.blocks[index])
        if self._group[0] != group:
            try:
                self._group = (group, self._file.read_row_group(group, columns=self._columns))
            except (self._pa.ArrowException, OSError) as error:
                raise self._corrupt(error) from error
        place = int(index - self._first_row[group])
        row = {name: self._group[1].column(name)[place].as_py() for name in self._columns}
        return document_of(row, f"{self._path}, row {index}", self.field, self.chat)

    def _corrupt(self, error: Exception) -> ValueError:
        found = f"{self._path} is not a readable parquet file ({first_line(error)})"
        return ValueError(f"{found}: copy or download it again")


def _check_unpacked(name: str, start: bytes) -> None:
    if start == b"\x1f\x8b":
        raise ValueError(f"{name} is packed by gzip: call it {name}.gz")


def _check_utf8(name: str, text: mmap.mmap) -> None:
    _check_unpacked(name, text[:2])
    decoder = codecs.getincrementaldecoder("utf-8")()
    step = 1 << 20
    for start in range(0, len(text), step):
        held = len(decoder.getstate()[0])  # bytes of a character that began in the chunk before
        chunk = text[start : start + step]
        if len(chunk.translate(None, _CONTROL)) < 0.75 * len(chunk):
            raise ValueError(f"{name} looks like UTF-16 or a binary file: convert it to UTF-8")
        try:
            decoder.decode(chunk, final=start + step >= len(text))
        except UnicodeDecodeError as error:
            at = start - held + error.start
            raise ValueError(f"{name}: not UTF-8 at byte {at} (0x{text[at]:02x}): convert the file to UTF-8") from error


def _text_spans(text: mmap.mmap) -> list[tuple[int, int]]:
    """(start, end) of each document, without the white space around it; documents of white space only are dropped."""
    start = len(codecs.BOM_UTF8) * (text[:3] == codecs.BOM_UTF8)
    edges = [(0, start), *(match.span() for match in re.finditer(re.escape(TEXT_SEPARATOR), text)), (len(text), 0)]
    spans = []
    for (_, start), (end, _) in itertools.pairwise(edges):
        first = re.compile(rb"\S").search(text, start, end)
        if first:
            while text[end - 1] in b" \t\r\n\f\v":
                end -= 1
            spans.append((first.start(), end))
    return spans


def unpacked(path: Path) -> Path:
    """A copy of ``path`` without its ``.gz``, kept next to the token caches and made again when ``path`` is written to.
    Raises ``ValueError``: one line; it is no such file, or there is no room for the copy."""
    facts = path.stat()
    key = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    folder = default_folder().with_name("unpacked") / hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    target = folder / path.stem
    if not target.exists():
        _unpack(path, target)
    if not target.stat().st_size:
        raise ValueError(f"{path} is empty: use a file with text")
    return target


def _unpack(path: Path, target: Path) -> None:
    folder = target.parent
    aside = folder / f".{path.stem}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with gzip.open(path) as source, aside.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        aside.replace(target)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a readable gzip file ({error}): copy or download it again") from error
    except OSError as error:
        raise ValueError(f"cannot unpack {path} into {folder}: {error.strerror}; make room there") from error
    finally:
        aside.unlink(missing_ok=True)
