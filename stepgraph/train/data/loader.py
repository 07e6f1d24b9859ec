"""Turns documents into batches: tokenized, packed without padding, rows shuffled, resumable at any row."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepgraph.models.loss import IGNORE
from stepgraph.train.data.several import Part
from stepgraph.train.data.sources import Corpus, hash64, shuffled
from stepgraph.train.data.token_cache import TokenCache, begun, inputs_and_targets, positions_in_documents, stream_of
from stepgraph.train.data.tokenizer import Tokenizer

Batch = dict[str, torch.Tensor]
BUFFER_TOKENS = 1 << 24  # that the first epoch shuffles at a time


class PackedLoader:
    """An endless iterator over batches ``{"tokens": (B, T), "targets": (B, T)}``, int64 CPU tensors; with
    ``positions``, of each token in its document, too, by which attention stays within documents; of conversations with
    ``targets_per_row``, how many targets of a row count on average, a scalar in fp32, for the mean over a step's; of
    preference pairs with ``pairs_per_row`` in its place.

    The training documents in a fixed mixed order, an end-of-text token before the first and after each, are one
    stream, cut into rows of T predictions; the last row is filled up from the stream's start. ``targets`` is the stream
    one token later; conversations lie in rows as `Rows` says, with -100 where another than the assistant speaks. Each
    epoch has its own order of rows, drawn by ``(seed, epoch)``: the first within buffers of ``BUFFER_TOKENS``, so that
    it begins while later documents are still tokenized, all others over the whole split. All data-parallel ranks
    together take the next ``world_size * B`` rows, each rank a block of B.

    ``cache``: the folder of token caches; None keeps the tokens in a temporary file. ``positions`` change neither rows
    nor order. Raises ``ValueError`` for a cache that cannot be written.
    """

    def __init__(
        self,
        source: Corpus,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cache: Path | None = None,
        positions: bool = False,
    ):
        documents = source.order(source.documents("train"))
        self.tokens = TokenCache(source, tokenizer, documents, cache, seq_len if source.chat else None)
        self.caches = [self.tokens]
        self._batch_size, self._seq_len, self._rank, self._world_size = batch_size, seq_len, rank, world_size
        self._name = source.name
        self._seed, self._positions, self._source = seed, positions, source
        self._buffer = max(1, BUFFER_TOKENS // seq_len)  # rows
        self._there, self._whole = 0, False  # tokens that are there, and whether these are all
        self._order: tuple[str, np.ndarray] = ("", np.empty(0))
        self.epoch, self._row = 0, 0  # of the next batch's first row
        self._identity = {
            "data": source.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "seq_len": seq_len,
            "seed": seed,
        }

    def __iter__(self) -> "PackedLoader":
        return self

    def __next__(self) -> Batch:
        first = self._rank * self._batch_size
        rows = np.stack([self.row(first + i) for i in range(self._batch_size)])
        self.advance(self._world_size * self._batch_size)
        return to_batch(rows, self._source)

    def row(self, ahead: int) -> np.ndarray:
        """The row that comes ``ahead`` rows after the next: its tokens (1, T + 1), with ``positions`` (2, T + 1) those
        and the positions of each."""
        place = self._place(ahead)
        tokens = self._read(*place)
        if not self._positions:
            return tokens[None]
        return np.stack([tokens, positions_in_documents(self._read(*place, self.tokens.begins))])

    def advance(self, rows: int) -> None:
        """Continue after the next ``rows`` rows."""
        if rows:
            self.epoch, last = self._place(rows - 1)
            self._row = last + 1

    def ready(self, rows: int | None = None) -> None:
        """Wait until the next ``rows`` rows can be read, by default a batch of all ranks together. Raises what
        `TokenCache.wait` does, before anything has moved on."""
        self._count(self._place((rows or self._world_size * self._batch_size) - 1)[1])

    def rows_of_an_epoch(self) -> int:
        """How many rows an epoch has, once all documents are tokenized. Raises as `ready` does."""
        return self._count(sys.maxsize) or 0

    def _place(self, ahead: int) -> tuple[int, int]:
        """The (epoch, place in its order) of the row that comes ``ahead`` rows after the next."""
        epoch, row = self.epoch, self._row + ahead
        while (count := self._count(row)) is not None and row >= count:
            epoch, row = epoch + 1, row - count
        return epoch, row

    def _count(self, row: int) -> int | None:
        """Rows of an epoch; None while that is unknown, though the buffer that holds ``row`` is there."""
        needed = (row // self._buffer + 1) * self._buffer * self._seq_len + 1
        if not self._whole and self._there < needed:
            self._there, self._whole = self.tokens.wait(needed)
            if self._whole and self._there < 2:
                said = f"no assistant message is in the first {self._seq_len} tokens of a conversation"
                why = f"{said}: use others or a larger seq_len" if self._source.chat else "it has no text: use more"
                raise ValueError(f"{self._name} has nothing to train on: {why}")
        return -(-(self._there - 1) // self._seq_len) if self._whole else None

    def _read(self, epoch: int, row: int, read: Callable[[int, int], np.ndarray] | None = None) -> np.ndarray:
        """The (T + 1,) tokens of the row at a place of an epoch's order, or what else ``read`` has of these."""
        read = read or self.tokens.read
        start, end = 0, self._count(row)
        if epoch == 0:
            start = row - row % self._buffer
            end = start + self._buffer if end is None else min(start + self._buffer, end)
        key = f"{self._seed}/{epoch}/{start}"
        if self._order[0] != key:
            self._order = (key, shuffled(np.arange(start, end), hash64(key)))
        begin = int(self._order[1][row - start]) * self._seq_len
        tokens = read(begin, min(begin + self._seq_len + 1, self._there))
        missing = self._seq_len + 1 - len(tokens)
        if missing:
            again = read(1, min(1 + missing, self._there))
            tokens = np.concatenate([tokens, np.resize(again, missing)])
        return tokens

    def state_dict(self) -> dict[str, int | str | bool]:
        """The position after the batches so far, and what identifies the stream. ``row`` counts rows of the epoch that
        all ranks have read; ``last_row`` is a digest of the last one. Batch size and ranks may differ on resume."""
        return {"epoch": self.epoch, "row": self._row, "last_row": self._digest(self.epoch, self._row)} | self._identity

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Continues with exactly the row that would have followed ``state_dict()``. Raises ``ValueError`` for the state
        of another stream (data, tokenizer, sequence length, ...); nothing is changed."""
        same_identity(state, ("epoch", "row", "last_row"), self._identity)
        epoch, row = int(state["epoch"]), int(state["row"])
        # The fingerprint does not cover every byte.
        if self._digest(epoch, row) != state["last_row"]:
            raise ValueError("the documents of --data changed since the data position was saved")
        self.epoch, self._row = epoch, row

    def _digest(self, epoch: int, row: int) -> str:
        """The digest of the row before ``row``."""
        if not row:
            return ""
        count = self._count(row - 1)
        if count is not None and row > count:
            return "beyond the end"
        return hashlib.blake2b(self._read(epoch, row - 1).tobytes(), digest_size=8).hexdigest()


def validation_batches(
    source: Corpus,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    n: int,
    rank: int = 0,
    world_size: int = 1,
    positions: bool = False,
) -> list[Batch]:
    """The first ``n`` batches of the validation split for this rank; fewer where the split is smaller, at least one.

    Batches are as in ``PackedLoader``, in a fixed mixed order of documents that no seed changes, so that losses of
    different runs compare. Batch k of rank r is batch ``k * world_size + r`` of the whole: every rank gets the same
    number, none of them shared. Each rank tokenizes the whole; keep the list, do not call this at each validation.
    Raises ``ValueError``: too little text for one batch per rank.
    """
    stream = stream_of(tokenizer.eos_id, seq_len if source.chat else None, pairs=source.pairs)
    pieces, size = [stream.open()], batch_size * seq_len
    for text in source.texts("val"):
        pieces.append(stream.add(tokenizer.encode_batch([text])))
        if stream.there > n * world_size * size:
            break
    tokens = np.concatenate([*pieces, stream.close()]).astype(np.int64)
    total = max(0, len(tokens) - 1)
    whole = min(n, total // (size * world_size))
    if not whole:
        fitting = total // world_size  # tokens for each rank
        fits = (fitting // seq_len, seq_len) if fitting >= seq_len else (1, fitting)
        ranks = f" on {world_size} ranks" if world_size > 1 else ""
        more = "use more text" if world_size == 1 else "use fewer ranks or more text"
        fix = f"batch_size={fits[0]}, seq_len={fits[1]} would fit" if fitting else more
        if source.chat and not total:
            fix = f"no assistant message is in the first {seq_len} tokens: use others or a larger seq_len"
        raise ValueError(
            f"the validation split of {source.name} has {total:,} tokens, too few for one batch of "
            f"batch_size={batch_size}, seq_len={seq_len}{ranks}: {fix}"
        )
    starts = ((np.arange(whole) * world_size + rank) * size)[:, None] + np.arange(batch_size) * seq_len
    places = starts.reshape(-1, 1) + np.arange(seq_len + 1)  # (n B, T + 1)
    rows = [tokens[places]]
    if positions:
        rows.append(positions_in_documents(begun(stream.begins, 0, len(tokens))[places]))
    batches = [to_batch(some, source) for some in np.split(np.stack(rows, axis=1), whole)]
    if source.chat:  # so that the mean of their losses is that over all targets, or pairs
        name = "pairs_per_row" if source.pairs else "targets_per_row"
        mean = torch.stack([batch[name] for batch in batches]).mean()
        batches = [batch | {name: mean} for batch in batches]
    return batches


def to_batch(rows: np.ndarray, source: Corpus) -> Batch:
    """Rows (B, 1, T + 1) of the stream, or (B, 2, T + 1) with positions, as `PackedLoader.row` gives them, in a batch;
    its tensors share no memory. ``targets_per_row``: of conversations; ``pairs_per_row``: of pairs."""
    tokens, targets = inputs_and_targets(rows[:, 0])
    batch = {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
    if rows.shape[1] > 1:
        batch["positions"] = torch.from_numpy(rows[:, 1, :-1].copy())
    if source.pairs:
        documents = (rows[:, 1, :-1] == 0).cumsum(1) + np.arange(len(rows))[:, None] * rows.shape[-1]
        answers = len(np.unique(documents[targets != IGNORE]))
        batch["pairs_per_row"] = torch.tensor(answers / 2 / len(rows), dtype=torch.float32)
    elif source.chat:
        batch["targets_per_row"] = torch.tensor((targets != IGNORE).sum() / len(rows), dtype=torch.float32)
    return batch


def same_identity(state: dict[str, Any], position: tuple[str, ...], identity: dict[str, Any]) -> None:
    """Raise ``ValueError`` where a saved ``state`` lacks a key of ``position`` or ``identity``, or is of another."""
    for key in (*position, *identity):
        if key not in state:
            raise ValueError(
                f"the saved data position lacks {key!r}: it belongs to another kind of --data; resume with that kind"
            )
    for key, here in identity.items():
        if state[key] != here and key in ("data", "tokenizer"):  # their fingerprints say nothing to people
            raise ValueError(
                f"the saved data position belongs to another --{key}, or its content has changed: resume with the same "
                f"{key}, or start a new run"
            )
        if state[key] != here:
            raise ValueError(
                f"the saved data position has {key}={state[key]!r}, this run has {key}={here!r}: "
                f"resume with the saved {key}, or start a new run"
            )


class MixedLoader:
    """An endless iterator over batches as `PackedLoader` gives, whose rows come from ``parts``.

    Row g of all ranks together is the next row of the part that is furthest behind its share of the g + 1 rows so far,
    the first of equals. So after any number of rows each part has its share to within a row, the order depends on
    shares and seed alone, and it continues at any row on any number of ranks. Each part has epochs of its own.

    ``options``: others of `PackedLoader`.
    """

    def __init__(
        self,
        parts: list[Part],
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ):
        self._parts, self._batch_size, self._rank, self._world_size = parts, batch_size, rank, world_size
        self._shares = np.array([part.share for part in parts])
        self._loaders = [PackedLoader(part.source, tokenizer, batch_size=1, **options) for part in parts]
        self._counts = np.zeros(len(parts), dtype=np.int64)  # rows that each part has given
        self.caches = [loader.tokens for loader in self._loaders]

    @property
    def epoch(self) -> int:
        """The epoch of the part that is furthest."""
        return max(loader.epoch for loader in self._loaders)

    def __iter__(self) -> "MixedLoader":
        return self

    def __next__(self) -> Batch:
        picks = self._picks()
        first = self._rank * self._batch_size
        rows = [self._loaders[part].row(ahead) for part, ahead in picks[first : first + self._batch_size]]
        for part, loader in enumerate(self._loaders):
            taken = sum(one == part for one, _ in picks)
            loader.advance(taken)
            self._counts[part] += taken
        return to_batch(np.stack(rows), self._parts[0].source)

    def ready(self) -> None:
        """Wait until the next batch can be read, as `PackedLoader.ready`."""
        last = dict(self._picks())
        for part, ahead in last.items():
            self._loaders[part].ready(ahead + 1)

    def _picks(self) -> list[tuple[int, int]]:
        """(part, how many rows ahead of its next) of each row of the next batch of all ranks together."""
        counts, picks = self._counts.copy(), []
        for _ in range(self._world_size * self._batch_size):
            part = int(np.argmax(self._shares * (counts.sum() + 1) - counts))
            picks.append((part, int(counts[part] - self._counts[part])))
            counts[part] += 1
        return picks

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches so far: of each part, and the rows that it has given."""
        return {
            "shares": self._shares.tolist(),
            "counts": self._counts.tolist(),
            "parts": [loader.state_dict() for loader in self._loaders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with exactly the row that would have followed ``state_dict()``.

        Raises:
            ValueError: one line; the state is of other data, or of other weights.
        """
        if "shares" not in state:
            raise ValueError("the saved data position is of one source, and --data is a mixture: resume with the same")
        if state["shares"] != self._shares.tolist():
            raise ValueError(
                f"the saved data position is of a mixture of {_percent(state['shares'])}, this run's is of "
                f"{_percent(self._shares)}: resume with the same weights, or start a new run"
            )
        for part, loader, saved in zip(self._parts, self._loaders, state["parts"], strict=True):
            try:
                loader.load_state_dict(saved)
            except ValueError as error:
                raise ValueError(f"{part.name}: {error}") from error
        self._counts = np.array(state["counts"], dtype=np.int64)


def _percent(shares: list[float] | np.ndarray) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)
