"""Data sets of the ``datasets`` library: read whole before training, or streamed while it runs."""

import hashlib
import os
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from stepgraph.train.data.formats.fields import columns_of, document_of, field_of, optional
from stepgraph.train.data.sources import Corpus, Source, are_validation, mix64


class HuggingFace(Source):
    """A data set of the ``datasets`` library: its "train" split and, when it has one, its "validation" split.

    ``spec`` is ``NAME`` or ``NAME:CONFIG``; NAME is a data set on the Hub or a local folder (of data files, or written
    by ``save_to_disk``). Tables are memory-mapped by the library.
    """

    def __init__(self, spec: str, text_field: str):
        self.name = f"hf:{spec}"
        datasets = optional("datasets", f"reading {self.name}")
        name, config = parts_of(spec)
        try:
            loaded = datasets.load_from_disk(name) if saved_to_disk(name) else datasets.load_dataset(name, config)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise cannot_load(self.name, error, datasets) from error
        if isinstance(loaded, datasets.Dataset):
            loaded = {"train": loaded}
        require_train(self.name, loaded)
        parts = [loaded[split] for split in ("train", "validation") if split in loaded and len(loaded[split])]
        if not len(loaded["train"]):
            raise ValueError(f"{self.name} has no rows in its train split: use a dataset with text")
        for part in parts:
            self.field, self.chat, self.unit = field_of(part.column_names, text_field, self.name)
        self._parts = [part.select_columns(columns_of(part.column_names, self.field, self.chat)) for part in parts]
        self.size = sum(part.data.nbytes for part in self._parts)
        self._train_rows = len(parts[0])
        if len(parts) == 2:
            self.train = np.arange(self._train_rows)
            self.val = np.arange(self._train_rows, self._train_rows + len(parts[1]))
        else:
            self.split_by_index(self._train_rows)

    def stamp(self) -> str:
        """The times of the files that the library maps: it writes others where the data is another."""
        files = [file["filename"] for part in self._parts for file in part.cache_files]
        facts = [f"{file} {os.stat(file).st_mtime_ns}" for file in files]
        return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()

    def read(self, index: int) -> bytes:
        part, row = (0, index) if index < self._train_rows else (1, index - self._train_rows)
        where = f"{self.name}, {('train', 'validation')[part]} row {row}"
        return document_of(self._parts[part][int(row)], where, self.field, self.chat)


def parts_of(spec: str) -> tuple[str, str | None]:
    """The name and the configuration of ``NAME[:CONFIG]``."""
    name, _, config = (spec, "", "") if os.path.isdir(spec) else spec.partition(":")
    return name, config or None


def saved_to_disk(name: str) -> bool:
    """Whether this is a folder that ``save_to_disk`` wrote."""
    return any(os.path.isfile(os.path.join(name, marker)) for marker in ("dataset_dict.json", "state.json"))


def require_train(name: str, splits: object) -> None:
    """Raise ``ValueError`` where ``splits``, a mapping, has none called train."""
    if "train" not in splits:
        raise ValueError(f"{name} has the splits {', '.join(splits)}: a split named train is needed")


def cannot_load(name: str, error: Exception, datasets: ModuleType) -> ValueError:
    """The error line for the library's exception."""
    generating = isinstance(error, datasets.exceptions.DatasetGenerationError)
    told = error.__cause__ if generating and error.__cause__ else error
    reason = (str(told).splitlines() or [type(told).__name__])[0]
    form = name.partition(":")[0]
    return ValueError(f"cannot load {name} ({reason}): use {form}:NAME or {form}:NAME:CONFIG")


_BLOCK = 4096  # rows of which it is found out together which are for validation


class Streamed(Corpus):
    """The "train" split of a data set on the Hub, or of a local folder of data files, by its files.

    Validation is its "validation" split, else about 5% of each file's rows, by a hash of their numbers.

    Attributes:
        files: how many files, or other shards, the train split has.
    """

    def __init__(self, spec: str, text_field: str):
        self.name = f"hf-stream:{spec}"
        datasets = optional("datasets", f"reading {self.name}")
        name, config = parts_of(spec)
        if saved_to_disk(name):
            raise ValueError(f"{self.name} was written by save_to_disk and is here already: use hf:{spec}")
        try:
            builder = datasets.load_dataset_builder(name, config)
            splits = builder.as_streaming_dataset()
            first = next(iter(splits["train"]), None) if "train" in splits else None
        except Exception as error:  # of the network, of each format, and the library's own
            raise cannot_load(self.name, error, datasets) from error
        require_train(self.name, splits)
        if first is None:
            raise ValueError(f"{self.name} has no rows in its train split: use a dataset with text")
        self.field, self.chat, self.unit = field_of(first, text_field, self.name)
        self._decode(first, 0, 0)
        self._columns = columns_of(first, self.field, self.chat)
        self._train = splits["train"].select_columns(self._columns)
        self._validation = splits.get("validation")
        self.files: int = self._train.num_shards
        self._paths = [str(path) for path in (builder.config.data_files or {}).get("train", [])]
        self._only_validation = False
        self._known: tuple[tuple[int, int], np.ndarray] = ((-1, -1), np.empty(0))

    def documents(self, split: str) -> np.ndarray:
        return np.arange(self.files)

    def following(self, documents: np.ndarray, first: int, row: int) -> Iterator[tuple[bytes, int, int]]:
        for place in range(first, len(documents)):
            file = int(documents[place])
            for number, document in self._rows(file, row):
                if not self._is_validation(file, number):
                    yield document, place, number + 1
            row = 0

    def texts(self, split: str) -> Iterator[bytes]:
        if split == "val" and self._validation is not None:
            for number, row in enumerate(self._checked(self._validation.select_columns(self._columns), "validation")):
                yield self._decode(row, "validation", number)
            return
        for file in self.order(self.documents("val")).tolist():
            for number, document in self._rows(file, 0):
                if self._is_validation(file, number) == (split == "val"):
                    yield document

    def only_validation(self) -> None:
        self._only_validation = True

    def stamp(self) -> str:
        """The names of the Hub's files, with their commit, and the times of local ones."""
        facts = [path if "://" in path else f"{path} {os.stat(path).st_mtime_ns}" for path in self._paths]
        return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()

    def describe(self) -> str:
        own = "its own validation split" if self._validation is not None else "5% of rows for validation"
        return f"{self.name}: {self.files:,} files, read during the run; {own}"

    @property
    def fingerprint(self) -> str:
        """Equal for files of the same names, wherever they are and from whichever commit."""
        folders = {os.path.dirname(path) for path in self._paths if "://" not in path}
        root = os.path.commonpath(folders) if folders else ""
        names = [os.path.relpath(p, root) if "://" not in p else re.sub(r"@[0-9a-f]{7,}", "", p) for p in self._paths]
        facts = [type(self).__name__, self.field, str(self.files), *names]
        return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()

    def _is_validation(self, file: int, number: int) -> bool:
        if self._only_validation or self._validation is not None:
            return self._only_validation
        block, place = divmod(number, _BLOCK)
        if self._known[0] != (file, block):
            self._known = (file, block), are_validation(mix64((file << 40) + block * _BLOCK + np.arange(_BLOCK)))
        return bool(self._known[1][place])

    def _rows(self, file: int, first: int) -> Iterator[tuple[int, bytes]]:
        part = self._train.shard(num_shards=self.files, index=file)
        part = part.skip(first) if first else part
        for number, row in enumerate(self._checked(part, f"file {file}"), first):
            yield number, self._decode(row, file, number)

    def _checked(self, rows: Any, where: str) -> Iterator[dict[str, Any]]:
        """``rows``, whose errors are one line each."""
        try:
            yield from rows
        except Exception as error:  # of the network, of each format, and the library's own
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.name}, {where} can no longer be read ({reason}): resume when it can") from error

    def _decode(self, row: dict[str, Any], file: int | str, number: int) -> bytes:
        where = f"{self.name}, {file if isinstance(file, str) else f'file {file}'} row {number}"
        return document_of(row, where, self.field, self.chat)
