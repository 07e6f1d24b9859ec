"""The tokens of a split, written once to a file by a thread and mapped into memory.

The file is documents as one stream of tokens, from which rows are cut, and where each document begins. Text has an
end-of-text token before the first document and after each; conversations are laid out as `Rows` says. A folder of its
own, named after source, tokenizer and split, holds

    tokens.bin      the stream, uint16 or int32
    begins.bin      where in it documents begin, int64
    progress.json   where the documents after those are, how many tokens and beginnings there are, and whether all are
    lock            held by the process that writes; every other one reads what is there and waits for more

Whoever finds the lock free continues where the last writer stopped, so a killed run leaves nothing to clean up. The
tokens reach the disk before the record that counts them.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stepgraph.cache import user_cache
from stepgraph.errors import write_text
from stepgraph.models.loss import IGNORE, PAIR_TOKENS
from stepgraph.train.data.sources import Corpus
from stepgraph.train.data.tokenizer import Tokenizer


class Text:
    """Documents with an end-of-text token after each, and one before the first, laid out one after the other.

    A document begins with the one before it, of which its own first token is predicted. ``there``: how many tokens
    there are so far. ``begins``: the places in the stream of the first tokens of the documents that this object laid
    out. ``counts``: how many were changed or left out, by why. ``told``: what a user should know of these, or empty.
    """

    told = ""

    def __init__(self, eos_id: int, there: int = 0):
        self._end, self.there = np.array([eos_id], np.int32), there
        self.begins: list[int] = []
        self.counts: Counter[str] = Counter()

    def open(self) -> np.ndarray:
        """The tokens before the first document."""
        self.begins.append(0)
        return self._counted([self._end])

    def add(self, documents: list[np.ndarray]) -> np.ndarray:
        """The tokens that ``documents``, each (N,), add."""
        ends = np.cumsum([len(ids) + 1 for ids in documents], dtype=np.int64) + self.there - 1
        self.begins += ends.tolist()
        return self._counted([part for ids in documents for part in (ids, self._end)])

    def close(self) -> np.ndarray:
        """The tokens after the last."""
        return self._counted([])

    def _counted(self, pieces: list[np.ndarray]) -> np.ndarray:
        tokens = np.concatenate([np.empty(0, np.int32), *pieces])
        self.there += len(tokens)
        return tokens


class Rows(Text):
    """Conversations, each whole within a row of ``seq_len`` tokens: one that does not fit begins the next row, and the
    rest of a row, which counts as a document, is end-of-text that is not a target.

    One longer than a row is cut to it, and left out if nothing of it is to be predicted; so each row has a target.
    """

    _unit, _parts = "conversations", 1

    def __init__(self, eos_id: int, seq_len: int, there: int = 0):
        super().__init__(eos_id, there)
        self._seq_len, self._fill = seq_len, ~np.int32(eos_id)

    @property
    def told(self) -> str:
        found, (cut, cut_out, silent) = [], (self.counts[why] for why in ("cut", "cut out", "silent"))
        if cut + cut_out:
            half = f" (half of it, {self._seq_len // 2}, for each answer)" if self._parts == 2 else ""
            found.append(
                f"{cut:,} {self._unit} are cut to seq_len={self._seq_len} tokens{half}, and {cut_out:,} dropped, "
                "which have no assistant message in them: a larger --seq-len keeps them"
            )
        if silent:
            found.append(f"{silent:,} {self._unit} are left out, in which no assistant message has content")
        return "; ".join(found)

    def open(self) -> np.ndarray:
        return self._counted([])

    def add(self, documents: list[np.ndarray]) -> np.ndarray:
        pieces, at = [], self.there
        for ids in documents:
            whole = self._split(ids)
            kept = [part[: self._seq_len // self._parts] for part in whole]
            if not all((part >= 0).any() for part in kept):
                self.counts["cut out" if all((part >= 0).any() for part in whole) else "silent"] += 1
                continue
            size = sum(map(len, kept))
            self.counts["cut"] += size < sum(map(len, whole))
            if at % self._seq_len + size > self._seq_len:
                kept.insert(0, np.full(-at % self._seq_len, self._fill))
            for part in kept:
                self.begins.append(at)
                at += len(part)
            pieces += kept
        return self._counted(pieces)

    def _split(self, ids: np.ndarray) -> list[np.ndarray]:
        return [ids]

    def close(self) -> np.ndarray:
        """Fills the last row, and gives the token that stands where its last one's target would be."""
        if not self.there:
            return self._counted([])
        self.begins.append(self.there)
        return self._counted([np.full(-self.there % self._seq_len + 1, self._fill)])


class Pairs(Rows):
    """As `Rows`, of documents that are pairs, as `PairTokenizer` gives them: the chosen one is a document, next to the
    rejected one in the same row, each cut to half a row. A pair takes `PAIR_TOKENS` at least, filled up as rows are.
    """

    _unit, _parts = "preference pairs", 2

    def _split(self, ids: np.ndarray) -> list[np.ndarray]:
        chosen, rejected = np.split(ids[1:], [~ids[0]])
        missing = max(0, PAIR_TOKENS - len(chosen) - len(rejected))
        return [chosen, np.pad(rejected, (0, missing), constant_values=self._fill)]


def stream_of(eos_id: int, row: int | None, there: int = 0, pairs: bool = False) -> Text:
    """`Rows` of ``row`` tokens, or `Pairs`, or `Text` for None."""
    return Text(eos_id, there) if row is None else (Pairs if pairs else Rows)(eos_id, row, there)


def inputs_and_targets(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split rows of the stream (B, T + 1) int64: tokens (B, T), and the next, `IGNORE` where it is not a target."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    return np.where(inputs < 0, ~inputs, inputs), np.where(targets < 0, IGNORE, targets)


def begun(begins: np.ndarray | list[int], start: int, stop: int) -> np.ndarray:
    """Whether each place from ``start`` to ``stop`` of a stream is one of ``begins``, which ascend: bool."""
    first, last = np.searchsorted(begins, (start, stop))
    found = np.zeros(stop - start, dtype=bool)
    found[np.asarray(begins[first:last], dtype=np.int64) - start] = True
    return found


def positions_in_documents(begins: np.ndarray) -> np.ndarray:
    """``begins`` (..., N) bool, whether a document begins at a token of a row -> the position of each in its document,
    int64. What a row begins with counts from 0, though the row may cut it out of a longer one."""
    place = np.arange(begins.shape[-1])
    return place - np.maximum.accumulate(np.where(begins, place, 0), axis=-1)


CHUNK_BYTES = 4 << 20  # text that is tokenized at a time
NEWS_S = 30.0  # between two lines about how far it is
_POLL_S = 0.02
_JOIN_S = 10.0  # for a thread that reads from the network; it ends with the process


def default_folder() -> Path:
    """``tokens`` in the user's cache."""
    return user_cache() / "tokens"


class TokenCache:
    """The stream of ``documents`` of a source, readable while a thread still writes it.

    Args:
        documents: indices of ``source``, in the stream's order.
        folder: where caches lie; None writes to a temporary file instead, which ends with this object.
        row: conversations are packed whole into rows of this length, see `Rows`; None: documents of text.

    The thread starts at the first :meth:`wait` or :meth:`start`, and from then on only the thread reads ``source``.

    Raises:
        ValueError: the folder cannot be written, in one line.
    """

    def __init__(
        self,
        source: Corpus,
        tokenizer: Tokenizer,
        documents: np.ndarray,
        folder: Path | None = None,
        row: int | None = None,
    ):
        self._source, self._tokenizer, self._documents, self._row = source, tokenizer, documents, row
        self._stamp = source.stamp()
        self._dtype = np.dtype(np.uint16 if row is None and tokenizer.vocab_size <= 1 << 16 else np.int32)
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="stepgraph-tokens-")
            self.folder = Path(self._temporary.name)
        else:
            self.folder = folder / self._key()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "lock").open("wb") as lock:
                while not self._on_disk():
                    if _locked(lock):
                        (self.folder / "progress.json").unlink()
                    else:  # by a writer that is about to end: while one writes, all that is recorded is there
                        time.sleep(_POLL_S)
        except OSError as error:
            raise ValueError(self._cannot_write(error)) from error
        self._mapped = np.empty(0, self._dtype)
        self._begins, self._begins_of = np.empty(0, np.int64), 0  # up to this token
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stop, self._grown = threading.Event(), threading.Event()
        self._say: Callable[[str], None] | None = None

    def _key(self) -> str:
        facts = [self._source.fingerprint, self._stamp, self._tokenizer.fingerprint, str(self._dtype), "begins"]
        facts += [] if self._row is None else [f"row {self._row}"]
        facts += ["system"] * self._source.chat  # columns next to a conversation are read
        facts += [f"field {self._source.field}"]  # the fingerprint knows two documents of it alone
        digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=12)
        digest.update(self._documents.tobytes())
        return digest.hexdigest()

    def start(self, say: Callable[[str], None] | None = None) -> None:
        """Begin to tokenize the rest; ``say`` gets the progress every ``NEWS_S`` seconds."""
        self._say = say or self._say
        if self._thread is None and not self._progress()["whole"]:
            self._thread = threading.Thread(target=self._write, name="tokenizer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; what it wrote stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def wait(self, count: int) -> tuple[int, bool]:
        """Wait until ``count`` tokens are there, or all: (tokens there, whether they are all).

        Raises what reading or writing raised in the thread: ValueError for a bad document, OSError for a full disk.
        """
        self.start()
        while True:
            found = self._progress()
            if found["whole"] or found["tokens"] >= count:
                return found["tokens"], found["whole"]
            if self._failure is not None:
                raise self._failure
            self._grown.wait(_POLL_S)  # another process does not notify
            self._grown.clear()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of the stream, int64; they must be there."""
        if len(self._mapped) < stop:
            count = self._progress()["tokens"]
            self._mapped = np.memmap(self.folder / "tokens.bin", self._dtype, "r", shape=(count,))
        return self._mapped[start:stop].astype(np.int64)

    def begins(self, start: int, stop: int) -> np.ndarray:
        """Whether a document begins at each of tokens ``start`` to ``stop``, bool; they must be there."""
        if self._begins_of < stop:
            found = self._progress()
            self._begins = np.memmap(self.folder / "begins.bin", np.int64, "r", shape=(found["begins"],))
            self._begins_of = found["tokens"]
        return begun(self._begins, start, stop)

    def describe(self) -> str:
        """How much is tokenized, as text."""
        found = self._progress()
        if found["whole"]:
            told = found.get("told")
            return f"{found['tokens']:,} tokens in {self.folder}" + (f"; {told}" if told else "")
        return f"tokenizing in the background, {found['documents'] / len(self._documents):.0%} done, into {self.folder}"

    def _progress(self) -> dict[str, Any]:
        """How many ``tokens`` and ``begins`` are in the files, whether that is the ``whole``, at which place of the
        ``documents``, and of a file in which ``row``, the next text is, and what a user should know (``told``)."""
        try:
            return json.loads((self.folder / "progress.json").read_text())
        except FileNotFoundError:
            return {"documents": 0, "row": 0, "tokens": 0, "begins": 0, "whole": False}

    def _on_disk(self) -> bool:
        """Whether everything recorded is on disk: a power cut may lose what a kill does not."""
        found = self._progress()
        sizes = {"tokens.bin": found["tokens"] * self._dtype.itemsize, "begins.bin": found["begins"] * 8}
        files = {self.folder / name: size for name, size in sizes.items() if size}
        return all(file.exists() and file.stat().st_size >= size for file, size in files.items())

    def _write(self) -> None:
        self._said_at, self._has_said = time.monotonic(), False
        try:
            with (self.folder / "lock").open("rb") as lock:
                while not self._stop.is_set() and not self._progress()["whole"]:
                    if _locked(lock):
                        self._append()
                    else:
                        self._stop.wait(_POLL_S * 10)
                        self._say_progress()
        except BaseException as failure:  # raised by `wait`, in the thread that needs the tokens
            self._failure = failure
            self._grown.set()

    def _say_progress(self) -> None:
        """Say how far it is: now and then, and at the end where that was said before."""
        due = time.monotonic() >= self._said_at + NEWS_S
        if self._say is not None and (due or (self._has_said and self._progress()["whole"])):
            self._said_at, self._has_said = time.monotonic(), True
            self._say(f"data {self.describe()}")

    def _append(self) -> None:
        """Tokenize the missing documents. This process holds the lock."""
        found = self._progress()
        if found["whole"]:
            return
        place, begun_before = (found["documents"], found.get("row", 0)), found["begins"]
        texts = self._source.following(self._documents, *place)
        stream = stream_of(self._tokenizer.eos_id, self._row, found["tokens"], self._source.pairs)
        stream.counts.update(found.get("counts", {}))
        with self._writing():
            tokens_file = self._opened("tokens.bin", found["tokens"] * self._dtype.itemsize)
            begins_file = self._opened("begins.bin", begun_before * 8)
        with tokens_file, begins_file:
            if not any(place):
                tokens_file.write(stream.open().astype(self._dtype).tobytes())
            whole = False
            while not whole and not self._stop.is_set():
                some, place, whole = self._next_texts(texts, place)
                tokens = [stream.add(self._tokenizer.encode_batch(some))]
                if whole:
                    tokens.append(stream.close())
                begins, stream.begins = np.array(stream.begins, dtype=np.int64), []
                begun_before += len(begins)
                with self._writing(tokens_file, begins_file):
                    tokens_file.write(np.concatenate(tokens).astype(self._dtype).tobytes())
                    begins_file.write(begins.tobytes())
                    for file in (tokens_file, begins_file):
                        file.flush()
                        os.fsync(file.fileno())  # progress on disk is never ahead of the tokens
                    self._record(place, whole, begun_before, stream)
            if stream.told:
                warnings.warn(f"{self._source.name}: {stream.told}", stacklevel=2)

    @contextlib.contextmanager
    def _writing(self, *files: BinaryIO) -> Iterator[None]:
        """Inside, an OSError becomes the line about this cache. ``files`` are closed first: writing what
        they hold fails again, and would be reported instead."""
        try:
            yield
        except OSError as error:
            for file in files:
                with contextlib.suppress(OSError):
                    file.close()
            raise OSError(self._cannot_write(error)) from error

    def _next_texts(
        self, texts: Iterator[tuple[bytes, int, int]], place: tuple[int, int]
    ) -> tuple[list[bytes], tuple[int, int], bool]:
        """The next of ``texts``, which begin at ``place``; where those after them begin, and whether there are none."""
        some, size, whole = [], 0, True
        for text, *after in texts:
            some.append(text)
            size, place = size + len(text), tuple(after)
            if size >= CHUNK_BYTES or self._stop.is_set():
                whole = False
                break
        if self._source.stamp() != self._stamp:
            raise ValueError(
                f"{self._source.name} was written to while it was tokenized: start the run again with data that stays"
            )
        return some, place, whole

    def _opened(self, name: str, size: int) -> BinaryIO:
        """A file of the cache, opened to write after its first ``size`` bytes: the rest came after the last record."""
        file = (self.folder / name).open("r+b" if size else "wb")
        file.seek(size)
        file.truncate()
        return file

    def _record(self, place: tuple[int, int], whole: bool, begins: int, stream: Text) -> None:
        content = dict(zip(("documents", "row"), place, strict=True)) | {"tokens": stream.there, "begins": begins}
        content |= {"counts": dict(stream.counts), "whole": whole} | ({"told": stream.told} if stream.told else {})
        write_text(self.folder / "progress.json", json.dumps(content))
        self._grown.set()
        self._say_progress()

    def _cannot_write(self, error: OSError) -> str:
        return f"cannot write the token cache {self.folder}: {error.strerror}; choose another folder by --data-cache"


def _locked(lock: BinaryIO) -> bool:
    """Whether this process holds the lock now; it does until the file is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
