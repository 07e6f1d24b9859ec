"""Deterministic choices: which documents are validation, in which order they are read, where a long one is cut.

Everything here is integer arithmetic on names and indices, so it is the same on every machine and with every version
of Python and numpy (``hash()`` is salted per process, and numpy does not promise a stable ``permutation``).
"""

import hashlib
from collections.abc import Iterable
from mmap import mmap

import numpy as np

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


def hash_names(names: Iterable[str]) -> np.ndarray:
    """``hash64`` of each name, uint64 (N,)."""
    return np.array([hash64(name) for name in names], dtype=np.uint64)


def are_validation(hashes: np.ndarray) -> np.ndarray:
    """Whether documents with these hashes (N,) are validation, by the hash alone: bool (N,), true of about 5%."""
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
