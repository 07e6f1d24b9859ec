"""Cuts documents, in the order in which they arrive, into buffers of rows.

The files of a `Streamed` data set are dealt out to lanes, which are read side by side: how many there are depends on
the data alone, so that any number of ranks shares them. A lane reads its files one after the other, in an order of each
epoch's own, lays out their documents as `stepgraph.train.data.stream` does, epoch after epoch, and cuts that into
buffers of one size. A buffer begins at a `Mark`, from which it can be made again.
"""

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from stepgraph.train.data.formats.streamed import Streamed
from stepgraph.train.data.split import hash64, shuffled
from stepgraph.train.data.stream import begun, stream_of
from stepgraph.train.data.tokenizer import Tokenizer

LEAST_BYTES, CHUNK_BYTES = 1 << 12, 1 << 20  # text that is tokenized at a time
_JOIN_S = 5.0
NEWS_S = 30.0

#: (epoch, place of its file in the lane's order, its row there) and the text.
Document = tuple[tuple[int, int, int], bytes]


@dataclass(frozen=True)
class Mark:
    """The begin of buffer ``number``: token ``token`` of those that row ``row`` of a file adds, the ``place``-th file
    of its lane's ``epoch``. -1 is the token before the first document."""

    number: int
    epoch: int
    place: int
    row: int
    token: int


@dataclass(frozen=True)
class Buffer:
    """``tokens`` (rows * T + 1,) int32, of which the last is the next buffer's first; whether a document ``begins`` at
    each; and where it lies itself."""

    tokens: np.ndarray
    begins: np.ndarray
    mark: Mark

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.tokens.tobytes(), digest_size=8).hexdigest()


class Lane:
    """The ``files`` of ``source`` as buffers of ``rows`` rows of ``seq_len`` tokens."""

    def __init__(self, source: Streamed, tokenizer: Tokenizer, files: np.ndarray, rows: int, seq_len: int, seed: int):
        self._source, self._tokenizer, self._files, self._seed = source, tokenizer, files, seed
        self._where = f"files {', '.join(map(str, files[:8]))}{', ...' if len(files) > 8 else ''}"
        self._size, self._row = rows * seq_len, seq_len if source.chat else None
        self._left_out = (
            f"{source.name}: {source.unit} longer than seq_len={seq_len} tokens are cut, and {source.unit} "
            "without a word of the assistant are left out"
        )

    def buffers(self, mark: Mark | None, stop: threading.Event) -> Iterator[Buffer]:
        """The buffers from the one at ``mark`` on, by default the first, until ``stop`` is set."""
        stream, size = stream_of(self._tokenizer.eos_id, self._row, pairs=self._source.pairs), self._size
        tokens = stream.open()
        if mark is None:
            mark = Mark(0, 0, 0, 0, -stream.there)
        elif mark.token >= 0:
            tokens, stream.begins, stream.there = tokens[:0], [], -mark.token
        number, added = mark.number, []  # where each document's tokens begin
        pieces, behind = [tokens], max(0, mark.token)  # tokens of the first document that lie before the buffer
        filled = mark.epoch
        documents = self._documents(mark, stop)
        while some := _some(documents, size + 1 - stream.there):
            encoded = self._tokenizer.encode_batch([text for _, text in some])
            for (place, _), ids in zip(some, encoded, strict=True):
                added.append((stream.there, place))
                piece = stream.add([ids])
                pieces.append(piece[behind:])
                behind = 0
                filled = place[0] if len(piece) else filled
                if place[0] > filled + 1:
                    raise ValueError(f"{self._source.name}: nothing of an epoch is to be learned in {self._where}")
            if stream.told:
                warnings.warn(self._left_out, stacklevel=2)  # warned of once
            if stream.there <= size:
                continue
            tokens = np.concatenate(pieces)
            while len(tokens) > size:
                begins = begun(stream.begins, 0, size + 1)
                yield Buffer(tokens[: size + 1].astype(np.int32), begins, mark)
                number += 1
                last = max(i for i, (start, _) in enumerate(added) if start <= size)
                start, (epoch, file, row) = added[last]
                mark = Mark(number, epoch, file, row, 0 if self._row else size - start)
                tokens, stream.there = tokens[size:], stream.there - size
                stream.begins = [begin - size for begin in stream.begins if begin >= size]
                added = [(start - size, place) for start, place in added[last:]]
            pieces = [tokens]

    def _documents(self, mark: Mark, stop: threading.Event) -> Iterator[Document]:
        """The training documents from ``mark`` on, until ``stop`` is set."""
        epoch, begin, row = mark.epoch, mark.place, mark.row
        stamp = self._source.stamp()
        while True:
            files, found = shuffled(self._files, hash64(f"{self._seed}/{epoch}/files")), begin > 0 or row > 0
            for place in range(begin, len(files)):
                if self._source.stamp() != stamp:
                    raise ValueError(f"{self._source.name} was written to while it was read: start the run again with "
                                     "data that stays")  # fmt: skip
                for number, text in self._source.read(int(files[place]), row):
                    found = True
                    if stop.is_set():
                        return
                    yield (epoch, place, number), text
                row = 0
            if not found:
                raise ValueError(f"{self._source.name}: there is nothing to train on in {self._where}")
            epoch, begin = epoch + 1, 0


def _some(documents: Iterator[Document], size: int) -> list[Document]:
    """The next ones, of about ``size`` bytes: few at the end of a buffer, so that few are read in advance."""
    found, left = [], max(LEAST_BYTES, min(size, CHUNK_BYTES))
    for document in documents:
        found.append(document)
        left -= len(document[1])
        if left <= 0:
            break
    return found


class Reader:
    """The buffers of lanes, made by a thread in the order of `ask`: each while the one before it is in use. ``marks``:
    from which lanes that are not read from their beginning are read. ``waited``: called every ``NEWS_S`` seconds that
    are waited."""

    def __init__(self, lane: Callable[[int], Lane], marks: dict[int, Mark], waited: Callable[[], None]):
        self._lane, self._marks, self._waited, self._waits_since = lane, marks, waited, time.monotonic()
        self._open: dict[int, Iterator[Buffer]] = {}
        self._asked: dict[int, dict[int, Future[Buffer]]] = {}  # by lane and number
        self._queue: SimpleQueue[tuple[int, int, Future[Buffer]] | None] = SimpleQueue()
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._work, name="reader", daemon=True)

    def ask(self, lane: int, number: int) -> "Future[Buffer]":
        """Have a buffer made, once; those of its lane before it that were not asked for are left out."""
        asked = self._asked.setdefault(lane, {})
        if number not in asked:
            asked[number] = Future()
            self._queue.put((lane, number, asked[number]))
            if self._thread.ident is None:
                self._thread.start()
        return asked[number]

    def buffer(self, lane: int, number: int) -> Buffer:
        """Wait for a buffer of a lane, none of which is let go before `drop`. Raises what the thread did."""
        made = self.ask(lane, number)
        if made.done():
            self._waits_since = time.monotonic()
        while not wait([made], max(0.0, self._waits_since + NEWS_S - time.monotonic())).done:
            self._waits_since = time.monotonic()
            self._waited()
        self.ask(lane, number + 1)
        return made.result()

    def drop(self, lane: int, number: int) -> None:
        """Let the buffers of a lane before ``number`` go."""
        self._asked[lane] = {one: made for one, made in self._asked.get(lane, {}).items() if one >= number}

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)  # it may wait for the network; it ends with the process

    def _work(self) -> None:
        failure: BaseException | None = None
        while (asked := self._queue.get()) is not None and not self._stop.is_set():
            lane, number, made = asked
            try:
                if failure is not None:
                    raise failure
                buffer = self._make(lane, number)
            except BaseException as error:  # raised by `buffer`, in the thread that needs it
                failure = error
                made.set_exception(error)
            else:
                if buffer is None:
                    return
                made.set_result(buffer)

    def _make(self, lane: int, number: int) -> Buffer | None:
        """The buffer ``number`` of a lane; None where the thread is to end."""
        if lane not in self._open:
            mark = self._marks.get(lane)
            self._open[lane] = self._lane(lane).buffers(mark, self._stop)
        for buffer in self._open[lane]:
            if buffer.mark.number == number:
                return buffer
            if buffer.mark.number > number:
                raise AssertionError(f"buffer {number} of lane {lane} was let go")
        return None
