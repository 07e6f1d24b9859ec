"""Documents as one stream of tokens, from which rows are cut, and where each document begins.

Text has an end-of-text token before the first document and after each. Conversations are placed so that none crosses
from a row to the next: see `Rows`.
"""

from collections import Counter

import numpy as np

from stepgraph.models.loss import IGNORE
from stepgraph.models.preference import PAIR_TOKENS


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
    rest of a row, which counts as a document, is end-of-text that is no target.

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
                f"{cut:,} {self._unit} are cut to seq_len={self._seq_len} tokens{half}, and {cut_out:,} left out, "
                "which have nothing of the assistant's in these: a larger --seq-len keeps them"
            )
        if silent:
            found.append(
                f"{silent:,} {self._unit} are left out, in which no message of the role assistant says anything"
            )
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
    """Split rows of the stream (B, T + 1) int64: tokens (B, T), and the next tokens, `IGNORE` where one is no
    target."""
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
