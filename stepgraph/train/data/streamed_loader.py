"""Batches of a data set that is read during training."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stepgraph.train.data.formats import Streamed
from stepgraph.train.data.lanes import Buffer, Lane, Mark, Reader
from stepgraph.train.data.loader import BUFFER_TOKENS, Batch, PackedLoader, check_sizes, same_identity, to_batch
from stepgraph.train.data.sources import Corpus
from stepgraph.train.data.split import hash64, shuffled
from stepgraph.train.data.stream import positions_in_documents
from stepgraph.train.data.tokenizer import Tokenizer

MOST_LANES = 64
#: By lane that was read, then by number of its buffer: where the buffer begins, and its digest.
Marks = dict[int, dict[int, tuple[Mark, str]]]


class StreamedLoader:
    """An endless iterator over batches as `PackedLoader` gives, from a `Streamed` data set, in memory alone.

    Row g of all ranks together is the next row of lane ``g % lanes``; each lane's rows are shuffled within buffers, all
    lanes' together of ``BUFFER_TOKENS``. A batch of all ranks is the next ``world_size * B`` rows by their lanes, and a
    rank's part of it a block of B: so a rank reads few lanes where there are many files, and the rows of a step do not
    depend on how many ranks share them. The state has where each lane's buffer begins, so that nothing before it is
    read again.

    Args: as of `PackedLoader`.
    """

    def __init__(
        self,
        source: Streamed,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        positions: bool = False,
    ):
        check_sizes(batch_size, seq_len, rank, world_size)
        self._source, self._tokenizer, self._stamp = source, tokenizer, source.stamp()
        self._batch_size, self._seq_len, self._rank, self._world_size = batch_size, seq_len, rank, world_size
        self._seed, self._positions = seed, positions
        self.lanes = min(MOST_LANES, 1 << (source.files.bit_length() - 1))
        self._rows = max(1, BUFFER_TOKENS // seq_len // self.lanes)  # of a lane's buffer
        self._given = 0  # rows, to all ranks together
        self._say: Callable[[str], None] | None = None
        self._reader = Reader(self._lane, {}, self._waited)
        self._marks: Marks = {}
        self._orders: dict[tuple[int, int], np.ndarray] = {}  # by lane and number
        self._identity = {
            "data": source.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "seq_len": seq_len,
            "seed": seed,
            "lanes": self.lanes,
            "buffer_rows": self._rows,
        }
        self.tokens = self

    def __iter__(self) -> "StreamedLoader":
        return self

    def __next__(self) -> Batch:
        rows = np.stack([self.row(ahead) for ahead in self._own()])
        self.advance(self._world_size * self._batch_size)
        return to_batch(rows, self._source)

    def row(self, ahead: int) -> np.ndarray:
        """As `PackedLoader.row`."""
        lane, number, place = self._place(ahead)
        buffer = self._buffer(lane, number)
        order = self._order((lane, number))
        begin = int(order[place]) * self._seq_len
        part = slice(begin, begin + self._seq_len + 1)
        tokens = buffer.tokens[part].astype(np.int64)
        return np.stack([tokens, positions_in_documents(buffer.begins[part])]) if self._positions else tokens[None]

    def advance(self, rows: int) -> None:
        """Continue after the next ``rows`` rows."""
        self._given += rows
        for lane, marks in self._marks.items():
            number = self._newest(lane)
            self._reader.drop(lane, number)
            self._marks[lane] = {one: mark for one, mark in marks.items() if one >= number}

    def ready(self, rows: int | None = None) -> None:
        """As `PackedLoader.ready`; by default, until this rank's part of a batch can be read."""
        for lane, number in dict.fromkeys(self._place(ahead)[:2] for ahead in self._aheads(rows)):
            self._buffer(lane, number)

    @property
    def epoch(self) -> int:
        """The epoch of the lane that is furthest."""
        return max((self._marks[lane][self._newest(lane)][0].epoch for lane in self._marks), default=0)

    def _own(self, batch: int = 0) -> list[int]:
        """How many rows ahead of the next each row of this rank's part of a batch is, of the next or a later one."""
        size = self._world_size * self._batch_size
        rows = sorted(range(batch * size, (batch + 1) * size), key=lambda ahead: (self._given + ahead) % self.lanes)
        return rows[self._rank * self._batch_size :][: self._batch_size]

    def _aheads(self, rows: int | None) -> list[int] | range:
        return self._own() if rows is None else range(rows)

    def _place(self, ahead: int) -> tuple[int, int, int]:
        """(lane, number of its buffer, place in the buffer's order) of the row that comes ``ahead`` after the next."""
        row, lane = divmod(self._given + ahead, self.lanes)
        return lane, *divmod(row, self._rows)

    def _newest(self, lane: int) -> int:
        """The number of the lane's newest buffer with a mark that does not lie after the lane's next row."""
        number = (self._given - lane + self.lanes - 1) // self.lanes // self._rows
        return max(one for one in self._marks[lane] if one <= number)

    def _waited(self) -> None:
        if self._say is not None:
            self._say(f"tokens: waiting for {self._source.name}")

    def _lane(self, lane: int) -> Lane:
        files = np.arange(lane, self._source.files, self.lanes)
        return Lane(self._source, self._tokenizer, files, self._rows, self._seq_len, self._seed)

    def _order(self, buffer: tuple[int, int]) -> np.ndarray:
        """The order of the rows of a (lane, number)."""
        if self._orders.get(buffer) is None:
            self._orders = {one: order for one, order in self._orders.items() if one[0] != buffer[0]}
            key = hash64(f"{self._seed}/{buffer[0]}/{buffer[1]}")
            self._orders[buffer] = shuffled(np.arange(self._rows), key)
        return self._orders[buffer]

    def _buffer(self, lane: int, number: int) -> Buffer:
        buffer = self._reader.buffer(lane, number)
        marks = self._marks.setdefault(lane, {})
        if number not in marks:
            marks[number] = buffer.mark, buffer.digest
        return buffer

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches so far, as a few JSON values, and what identifies the rows: ``rows`` that all
        ranks have read, and of each lane that this one reads where its buffer begins."""
        marks = {lane: self._marks[lane][self._newest(lane)] for lane in self._marks}
        flat = {str(lane): [*dataclasses.astuple(mark), digest] for lane, (mark, digest) in marks.items()}
        return {"rows": self._given, "marks": flat} | self._identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with exactly the row that would have followed ``state_dict()``; a lane that ``state`` has no mark
        of is read from its beginning.

        Raises:
            ValueError: the state is of other rows (data, tokenizer, ...); nothing is changed.
        """
        same_identity(state, ("rows", "marks"), self._identity)
        saved = {int(lane): (Mark(*mark), digest) for lane, (*mark, digest) in state["marks"].items()}
        reader = Reader(self._lane, {lane: mark for lane, (mark, _) in saved.items()}, self._waited)
        before = self._given, self._reader
        self._given, self._reader = int(state["rows"]), reader
        try:
            for lane in {self._place(ahead)[0] for ahead in self._own()} & saved.keys():
                mark, digest = saved[lane]
                if reader.buffer(lane, mark.number).digest != digest:
                    raise ValueError("the documents of --data changed since the data position was saved")
        except BaseException:
            reader.close()
            self._given, self._reader = before
            raise
        before[1].close()
        self._marks = {lane: {mark.number: (mark, digest)} for lane, (mark, digest) in saved.items()}

    # -- what of `TokenCache` the trainer needs

    def start(self, say: Callable[[str], None] | None = None) -> None:
        """Begin to read the lanes that this rank needs, in turn; ``say`` gets a line about long waits."""
        self._say = say or self._say
        batches = range(self.lanes // math.gcd(self.lanes, self._world_size * self._batch_size))
        firsts: dict[int, int] = {}  # by lane
        for batch in batches:
            for lane, number, _ in map(self._place, self._own(batch)):
                firsts.setdefault(lane, number)
        for lane, number in firsts.items():
            self._reader.ask(lane, number)

    def close(self) -> None:
        """End the thread that reads."""
        self._reader.close()

    def rewritten(self) -> bool:
        """Whether files that are here were written to, or removed, since."""
        try:
            return self._source.stamp() != self._stamp
        except OSError:
            return True

    def describe(self) -> str:
        """How it is read, for people."""
        size = self._rows * self.lanes * self._seq_len
        return f"read during the run, {self.lanes} files in parallel, rows shuffled in buffers of {size:,} tokens"


def open_loader(
    source: Corpus, tokenizer: Tokenizer, *, cache: Path | None = None, **sizes: Any
) -> PackedLoader | StreamedLoader:
    """The loader for ``source``; ``sizes``: as both take them."""
    if isinstance(source, Streamed):
        return StreamedLoader(source, tokenizer, **sizes)
    return PackedLoader(source, tokenizer, cache=cache, **sizes)


def joined_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of a loader from the states of all ranks, which differ in the lanes that they read."""
    joined = dict(states[0])
    if "marks" in joined:
        pairs = [pair for state in states for pair in state["marks"].items()]
        joined["marks"] = dict(sorted(pairs, key=lambda pair: pair[1][0]))  # of each lane the newest
    if "parts" in joined:
        joined["parts"] = [joined_states(list(parts)) for parts in zip(*(s["parts"] for s in states), strict=True)]
    return joined
