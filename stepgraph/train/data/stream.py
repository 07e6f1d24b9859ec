"""Documents as one stream of tokens, which rows are cut from.

Text has an end-of-text token before the first document and behind each. Conversations lie so that none crosses from a
row to the next: see `Rows`.
"""

from typing import Protocol

import numpy as np

from stepgraph.models.loss import IGNORE


class Stream(Protocol):
    """Lays out documents one after the other; ``there``: how many tokens there are so far; ``told``: what people should
    know of those added, or nothing."""

    there: int
    told: str

    def open(self) -> np.ndarray:
        """The tokens before the first document."""

    def add(self, documents: list[np.ndarray]) -> np.ndarray:
        """The tokens that ``documents``, each (N,), add."""

    def close(self) -> np.ndarray:
        """The tokens behind the last."""


class Text:
    """Documents with an end-of-text token behind each, and one before the first."""

    told = ""

    def __init__(self, eos_id: int, there: int = 0):
        self._end, self.there = np.array([eos_id], np.int32), there

    def open(self) -> np.ndarray:
        return self._counted([self._end])

    def add(self, documents: list[np.ndarray]) -> np.ndarray:
        return self._counted([part for ids in documents for part in (ids, self._end)])

    def close(self) -> np.ndarray:
        return self._counted([])

    def _counted(self, pieces: list[np.ndarray]) -> np.ndarray:
        tokens = np.concatenate([np.empty(0, np.int32), *pieces])
        self.there += len(tokens)
        return tokens


class Rows(Text):
    """Conversations, each whole within a row of ``seq_len`` tokens: one that does not fit begins the next row, and the
    rest of a row is end-of-text that is no target.

    One longer than a row is cut to it, and left out if nothing of it is to be predicted; so each row has a target.
    """

    def __init__(self, eos_id: int, seq_len: int, there: int = 0):
        super().__init__(eos_id, there)
        self._seq_len, self._fill = seq_len, ~np.int32(eos_id)
        self.cut = self.left_out = 0

    @property
    def told(self) -> str:
        if not self.cut + self.left_out:
            return ""
        return (
            f"{self.cut:,} conversations are cut to seq_len={self._seq_len} tokens, and {self.left_out:,} left out, "
            "which have nothing of the assistant's in these: a larger --seq-len keeps them"
        )

    def open(self) -> np.ndarray:
        return self._counted([])

    def add(self, documents: list[np.ndarray]) -> np.ndarray:
        pieces, place = [], self.there % self._seq_len
        for ids in documents:
            kept = ids[: self._seq_len]
            if not (kept >= 0).any():
                self.left_out += 1
                continue
            self.cut += len(kept) < len(ids)
            if place + len(kept) > self._seq_len:
                pieces.append(np.full(self._seq_len - place, self._fill))
                place = 0
            pieces.append(kept)
            place = (place + len(kept)) % self._seq_len
        return self._counted(pieces)

    def close(self) -> np.ndarray:
        """Fills the last row, and gives the token that stands where its last one's target would be."""
        return self._counted([np.full(-self.there % self._seq_len + 1, self._fill)] if self.there else [])


def stream_of(eos_id: int, row: int | None, there: int = 0) -> Stream:
    """`Rows` of ``row`` tokens, or `Text` for None."""
    return Text(eos_id, there) if row is None else Rows(eos_id, row, there)


def inputs_and_targets(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows of the stream (B, T + 1) int64: tokens (B, T), and those that follow, `IGNORE` where one is no target."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    return np.where(inputs < 0, ~inputs, inputs), np.where(targets < 0, IGNORE, targets)
