"""Sources of documents, each split once into train and validation.

A document is ``bytes``: UTF-8 for text formats, and the raw content for source files (a byte tokenizer needs no
decoding). Access is random: ``read(i)`` gives document i, so a position in a stream is a few numbers.

What is validation, in which order documents are read and where a long one is cut is integer arithmetic on names and
indices, the same on every machine and with every version of Python and numpy (``hash()`` is salted per process, and
numpy does not promise a stable ``permutation``).
"""

import hashlib
import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from mmap import mmap
from pathlib import Path

import numpy as np

PAIRS = "preference pairs"  # what documents are called of which each is two conversations


class Corpus(ABC):
    """Documents that are read in one order, some of them for training and some for validation.

    Attributes:
        name: what the user asked for, for messages.
        unit: what a document is, in the plural ("files").
        chat: a document is a conversation, the JSON of a list of messages.
        field: the field that holds the documents, where the data has several; empty for other data.
        blocks: the block of each document where documents are loaded a block at a time (parquet row groups), or None.
    """

    name: str
    unit = "documents"
    chat: bool = False
    field = ""
    fingerprint: str
    blocks: np.ndarray | None = None

    @property
    def pairs(self) -> bool:
        """Whether a document is two conversations, the JSON of both, of which the first is the better one."""
        return self.unit == PAIRS

    @abstractmethod
    def texts(self, split: str) -> Iterator[bytes]:
        """The documents of split "train" or "val" in a fixed mixed order, one by one."""

    @abstractmethod
    def only_validation(self) -> None:
        """From now on all documents are for validation."""

    @abstractmethod
    def documents(self, split: str) -> np.ndarray:
        """The indices of split "train" or "val", ascending: of documents, or of files of several."""

    @abstractmethod
    def following(self, documents: np.ndarray, first: int, row: int) -> Iterator[tuple[bytes, int, int]]:
        """The training texts of the indices ``documents`` from place ``first`` on, of that one from its ``row`` on;
        each with the place and the row of the next. Raises ValueError, naming the place, for what is not text."""

    def order(self, documents: np.ndarray) -> np.ndarray:
        """``documents`` in their fixed mixed order, the same on every machine."""
        return shuffled(documents, hash64("0/0"), None if self.blocks is None else self.blocks[documents])

    @abstractmethod
    def describe(self) -> str:
        """One line for people: how much there is and how it is split."""

    def stamp(self) -> str:
        """Text that changes when the data is rewritten in place: times of its files. Empty where there is none."""
        return ""


class Source(Corpus):
    """Documents by index.

    Attributes:
        size: bytes of the whole, for messages.
        train, val: document indices, int64; disjoint, together all documents, neither empty.
    """

    size: int
    train: np.ndarray
    val: np.ndarray

    def __len__(self) -> int:
        return len(self.train) + len(self.val)

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The content of document ``index``. Raises ValueError, naming the place, for one that is not text."""

    def identity(self) -> bytes:
        """What distinguishes this data from other data with as many documents and bytes: names, or offsets."""
        return b""

    def documents(self, split: str) -> np.ndarray:
        return self.train if split == "train" else self.val

    def texts(self, split: str) -> Iterator[bytes]:
        return (self.read(int(index)) for index in self.order(self.documents(split)))

    def following(self, documents: np.ndarray, first: int, row: int) -> Iterator[tuple[bytes, int, int]]:
        for place in range(first, len(documents)):
            yield self.read(int(documents[place])), place + 1, 0

    def only_validation(self) -> None:
        self.val = np.sort(np.concatenate([self.train, self.val]))

    def describe(self) -> str:
        return (
            f"{self.name}: {len(self):,} {self.unit}, {megabytes(self.size)}; "
            f"{len(self.train):,} train / {len(self.val):,} validation"
        )

    @cached_property
    def fingerprint(self) -> str:
        """Equal for the same documents in the same split, wherever the file lies. Reads the first and last document."""
        digest = hashlib.blake2b(f"{type(self).__name__} {len(self)} {self.size}\n".encode(), digest_size=8)
        for part in (self.val.tobytes(), self.identity(), self.read(0), self.read(len(self) - 1)):
            digest.update(hashlib.blake2b(part).digest())
        return digest.hexdigest()

    def split_by_index(self, count: int) -> None:
        """Splits by the index's hash; a lone document is left in train for ``open_source`` to cut."""
        if count == 1:
            self.train, self.val = np.array([0]), np.array([], dtype=np.int64)
        else:
            self.train, self.val = split_by_hash(mix64(np.arange(count)))


class FileSource(Source):
    """The documents of the file ``path``. ``name``: of the file that it is, or was unpacked from."""

    def __init__(self, path: Path, name: str):
        self.name, self.size, self._path = name, path.stat().st_size, path

    def stamp(self) -> str:
        return str(self._path.stat().st_mtime_ns)


class Stdlib(Source):
    """The ``*.py`` files of the running Python's own standard library, read in place, sorted by relative path.

    Left out, so that one version of Python gives the same files on different machines: installed packages, files
    written by the build (``_sysconfigdata``, ``sitecustomize``), and the parts that distributions ship separately or
    not at all: every test folder, the Tk programs (idlelib, tkinter, turtledemo), distutils, lib2to3 and ensurepip.
    Tests also hold files that are broken on purpose. Empty files are no documents.
    """

    name = "stdlib"
    unit = "files"
    _skipped_anywhere = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    _skipped_at_top = {"idlelib", "tkinter", "turtledemo", "distutils", "lib2to3", "ensurepip"}
    _skipped_files = ("_sysconfigdata", "sitecustomize", "usercustomize", "_distutils_system_mod")

    def __init__(self, root: str | Path | None = None):
        self._root = Path(root or sysconfig.get_path("stdlib"))
        self._paths = sorted(self._find(), key=lambda path: path.as_posix())
        if len(self._paths) < 2:
            raise ValueError(
                f"stdlib: {self._root} of Python {platform.python_version()} holds no *.py files: use --data FILE.txt"
            )
        self._sizes = [(self._root / path).stat().st_size for path in self._paths]
        self.size = sum(self._sizes)
        self.train, self.val = split_by_hash(
            np.array([hash64(path.as_posix()) for path in self._paths], dtype=np.uint64)
        )

    def _find(self) -> list[Path]:
        found = []
        for folder, subfolders, files in os.walk(self._root):
            at = Path(folder).relative_to(self._root)
            skipped = self._skipped_anywhere | (set() if at.parts else self._skipped_at_top)
            subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith("config-")]
            for name in files:
                wanted = name.endswith(".py") and not name.startswith(self._skipped_files)
                if wanted and (Path(folder) / name).stat().st_size:
                    found.append(at / name)
        return found

    def read(self, index: int) -> bytes:
        return (self._root / self._paths[index]).read_bytes()

    def stamp(self) -> str:
        return str(max((self._root / path).stat().st_mtime_ns for path in self._paths))

    def identity(self) -> bytes:
        return "\n".join(
            f"{path.as_posix()} {size}" for path, size in zip(self._paths, self._sizes, strict=True)
        ).encode()


class Sections(Source):
    """One document cut by position: the first 95% train, the last 5% validation, in sections of about 64 KiB.

    Sections are the unit that is shuffled; to the loader each is a document. ``source``: whose only document it is.
    """

    unit = "sections"

    def __init__(self, source: Source, text: bytes):
        if len(text) < 2:
            raise ValueError(f"{source.name} holds one document of {len(text)} bytes: too little to split, use more")
        self.name, self.size, self.field, self._text = source.name, source.size, source.field, text
        self.stamp = source.stamp
        self._bounds, self.train, self.val = cut_sections(text, 0, len(text))

    def read(self, index: int) -> bytes:
        return self._text[self._bounds[index] : self._bounds[index + 1]]

    def describe(self) -> str:
        return describe_sections(self)


def describe_sections(source: Source) -> str:
    return (
        f"{source.name}: one document, {megabytes(source.size)}, split by position (the last 5% is validation) into "
        f"{len(source.train):,} train / {len(source.val):,} validation sections"
    )


def megabytes(size: int) -> str:
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


VALIDATION_FRACTION = 0.05
SECTION_BYTES = 64 * 1024  # a lone document is read in sections of about this size


def hash64(name: str) -> int:
    """A stable 64-bit hash of a string."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def mix64(x: np.ndarray) -> np.ndarray:
    """A bijection on 64-bit integers that looks random: distinct inputs (N,) give distinct uint64 outputs (N,).

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    x = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def are_validation(hashes: np.ndarray) -> np.ndarray:
    """Whether documents with these hashes (N,) are validation, only by the hash: bool (N,), true of about 5%."""
    return hashes < np.uint64(int(VALIDATION_FRACTION * 2**64))


def split_by_hash(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices (train, val) of documents with these hashes: about 5% are validation, and neither side is empty.

    Whether a document is validation depends on its own hash only, so adding documents does not move the others (but
    for the one document that is moved where a side would be empty). Needs at least two documents.
    """
    is_val = are_validation(hashes)
    if not is_val.any():
        is_val[hashes.argmin()] = True
    elif is_val.all():
        is_val[hashes.argmax()] = False
    return np.flatnonzero(~is_val), np.flatnonzero(is_val)


def shuffled(documents: np.ndarray, key: int, blocks: np.ndarray | None = None) -> np.ndarray:
    """``documents`` (N,) in the order that the 64-bit ``key`` chooses.

    With ``blocks`` (N,), the block of each document: blocks are shuffled, then documents inside each block, so that
    a reader which loads a block at a time loads each block once.
    """
    key = np.uint64(key)
    rank = mix64(mix64(documents) ^ key)
    if blocks is None:
        return documents[np.argsort(rank)]
    return documents[np.lexsort((rank, mix64(mix64(blocks) ^ key)))]


def cut_sections(text: bytes | mmap, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts one document, ``text[start:end]``, by position: bounds (S + 1,) of sections, and the (train, val) sections.

    The first 95% are train, the last 5% validation; each side is cut into sections of about ``SECTION_BYTES``, after
    a newline where there is one near. Needs at least two bytes.
    """
    middle = _cut(text, start + max(1, int((end - start) * (1 - VALIDATION_FRACTION))), end)
    bounds = [start]
    train_sections = 0
    for side_end in (middle, end):
        while side_end - bounds[-1] > 2 * SECTION_BYTES:
            bounds.append(_cut(text, bounds[-1] + SECTION_BYTES, side_end))
        bounds.append(side_end)
        train_sections = train_sections or len(bounds) - 1
    sections = np.arange(len(bounds) - 1)
    return np.array(bounds, dtype=np.int64), sections[:train_sections], sections[train_sections:]


def _cut(text: bytes | mmap, at: int, end: int) -> int:
    """A position in [at, end) to cut at: after the next near newline, else before a UTF-8 character."""
    newline = text.find(b"\n", at, at + min((end - at) // 2, SECTION_BYTES // 8))
    if newline >= 0:
        return newline + 1
    while at < end - 1 and text[at] & 0xC0 == 0x80:  # a continuation byte
        at += 1
    return at
