"""Turns documents into batches: shuffled, tokenized, packed without padding, resumable at any batch."""

import numpy as np
import torch

from stepgraph.train.data.sources import Source
from stepgraph.train.data.tokenizer import Tokenizer

Batch = dict[str, torch.Tensor]
ENTROPY_MAX_TOKENS = 20_000_000


class _Cursor:
    """A position in a list of documents; hands out their tokens in order, each document followed by end-of-text."""

    def __init__(self, source: Source, tokenizer: Tokenizer, documents: np.ndarray, position: int = 0, offset: int = 0):
        self._source, self._tokenizer, self._documents = source, tokenizer, documents
        self.position = position  # the document, as an index into `documents`
        self.offset = offset  # the next token within it
        self._tokens: np.ndarray | None = None  # of the document at `position`, once it was read

    @property
    def exhausted(self) -> bool:
        return self.position >= len(self._documents)

    def tokens(self) -> np.ndarray:
        """All tokens of the current document and its end-of-text, int32 (N,)."""
        if self._tokens is None:
            text = self._tokenizer.encode(self._source.read(int(self._documents[self.position])))
            self._tokens = np.append(text, np.int32(self._tokenizer.eos_id))
        return self._tokens

    def take(self, count: int) -> list[np.ndarray]:
        """The next ``count`` tokens, in pieces; fewer where the documents end."""
        pieces = []
        while count and not self.exhausted:
            tokens = self.tokens()
            piece = tokens[self.offset : self.offset + count]
            pieces.append(piece)
            count -= len(piece)
            self.offset += len(piece)
            if self.offset == len(tokens):
                self.position, self.offset, self._tokens = self.position + 1, 0, None
        return pieces


class PackedLoader:
    """An endless iterator over batches ``{"tokens": (B, T), "targets": (B, T)}``, int64 CPU tensors.

    The documents of ``split`` are read in an order shuffled anew each epoch by ``(seed, epoch)``; each is followed by
    the end-of-text token, and all are joined to one stream that is cut into rows of T. ``targets`` is the stream one
    token later, so consecutive rows overlap by one token and every token is predicted once per epoch. The stream opens
    with an end-of-text token, so the first token of the first document is predicted too. Epochs join within a row.

    Data-parallel: each rank reads its own, disjoint part of each epoch's order. Ranks need not start an epoch at the
    same batch.

    Raises:
        ValueError: fewer documents than ranks, or a size below one.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seq_len: int,
        split: str = "train",
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ):
        _check_sizes(batch_size, seq_len, rank, world_size)
        count = len(source.documents(split))
        if count < world_size:
            raise ValueError(
                f"{world_size} data-parallel ranks need as many {split} {source.unit}, {source.name} has {count}: "
                "use fewer ranks or data with more documents"
            )
        self._source, self._tokenizer = source, tokenizer
        self._batch_size, self._seq_len, self._split = batch_size, seq_len, split
        self._seed, self._shuffle, self._rank, self._world_size = seed, shuffle, rank, world_size
        self._last_token = tokenizer.eos_id
        self.epoch = 0
        self._cursor = self._cursor_at(0, 0, 0)

    def __iter__(self) -> "PackedLoader":
        return self

    def __next__(self) -> Batch:
        missing = self._batch_size * self._seq_len
        pieces = []
        while missing:
            pieces += self._cursor.take(missing)
            missing = self._batch_size * self._seq_len - sum(map(len, pieces))
            if self._cursor.exhausted:
                self.epoch += 1
                self._cursor = self._cursor_at(self.epoch, 0, 0)
        batch = _batch(self._last_token, pieces, self._batch_size, self._seq_len)
        self._last_token = int(pieces[-1][-1])
        return batch

    def _cursor_at(self, epoch: int, position: int, offset: int) -> _Cursor:
        documents = self._source.documents(self._split)
        if self._shuffle:
            documents = self._source.order(documents, self._seed, epoch)
        part = np.array_split(documents, self._world_size)[self._rank]
        return _Cursor(self._source, self._tokenizer, part, position, offset)

    def start_epoch(self, epoch: int) -> None:
        """Continue with the first document in the order of ``epoch``."""
        self.epoch, self._cursor, self._last_token = epoch, self._cursor_at(epoch, 0, 0), self._tokenizer.eos_id

    def state_dict(self) -> dict[str, int | str | bool]:
        """The position after the batches so far, as a few JSON values, and what identifies the stream.

        ``document`` counts documents in this rank's order of the epoch, ``offset`` tokens of that document already
        predicted; ``last_token`` is the first input of the next batch. No text is stored: the document is tokenized
        again on resume. The batch size may differ on resume; whatever determines the stream may not.
        """
        position = {"epoch": self.epoch, "document": self._cursor.position, "offset": self._cursor.offset}
        return position | {"last_token": self._last_token} | self._stream_identity()

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Continues with exactly the batch that would have followed ``state_dict()``.

        Raises:
            ValueError: the state is of another stream (data, tokenizer, sequence length, ...); nothing is changed.
        """
        for key, here in self._stream_identity().items():
            if key not in state:
                raise ValueError(f"the saved data position lacks {key!r}: it is not a state of this loader")
            if state[key] != here:
                raise ValueError(
                    f"the saved data position has {key}={state[key]!r}, this run has {key}={here!r}: "
                    f"resume with the saved {key}, or start a new run"
                )
        epoch, position, offset, last_token = (int(state[key]) for key in ("epoch", "document", "offset", "last_token"))
        cursor = self._cursor_at(epoch, position, offset)
        # The fingerprint does not cover every byte: check the document where the stream goes on.
        matches = not cursor.exhausted and offset < len(cursor.tokens())
        if not matches or (offset and cursor.tokens()[offset - 1] != last_token):
            raise ValueError(f"the documents of {self._source.name} changed since the data position was saved")
        self.epoch, self._cursor, self._last_token = epoch, cursor, last_token

    def _stream_identity(self) -> dict[str, int | str | bool]:
        return {
            "data": self._source.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "seq_len": self._seq_len,
            "split": self._split,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rank": self._rank,
            "world_size": self._world_size,
        }


def validation_batches(
    source: Source,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    n: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[Batch]:
    """The first ``n`` batches of the validation split for this rank; fewer where the split is smaller, at least one.

    Batches are as in ``PackedLoader``, in a fixed mixed order of documents that no seed changes, so that losses of
    different runs compare. Batch k of rank r is batch ``k * world_size + r`` of the whole: every rank gets the same
    number, none of them shared. Each rank tokenizes the whole; keep the list, do not call this at each validation.

    Raises:
        ValueError: too little text for one batch per rank.
    """
    _check_sizes(batch_size, seq_len, rank, world_size)
    if n < 1:
        raise ValueError(f"n={n} validation batches: ask for at least 1")
    cursor = _Cursor(source, tokenizer, source.order(source.documents("val"), 0, 0))
    batches, last_token, total = [], tokenizer.eos_id, 0
    for index in range(n * world_size):
        pieces = cursor.take(batch_size * seq_len)
        total += sum(map(len, pieces))
        if total < (index + 1) * batch_size * seq_len:
            break
        if index % world_size == rank:
            batches.append(_batch(last_token, pieces, batch_size, seq_len))
        last_token = int(pieces[-1][-1])
    whole = total // (batch_size * seq_len * world_size)
    if not whole:
        fitting = total // world_size  # tokens for each rank
        fits = (fitting // seq_len, seq_len) if fitting >= seq_len else (1, fitting)
        ranks = f" on {world_size} ranks" if world_size > 1 else ""
        fix = f"batch_size={fits[0]}, seq_len={fits[1]} would fit" if fitting else "use fewer ranks or more text"
        raise ValueError(
            f"the validation split of {source.name} has {total:,} tokens, too few for one batch of "
            f"batch_size={batch_size}, seq_len={seq_len}{ranks}: {fix}"
        )
    return batches[:whole]


def unigram_entropy(source: Source, tokenizer: Tokenizer, max_tokens: int = ENTROPY_MAX_TOKENS) -> float:
    """Entropy in nats of the token distribution of both splits: the loss of a model that knows only frequencies.

    End-of-text tokens count, as they do in the loss. Documents are read in a fixed mixed order until ``max_tokens`` are
    counted, so a larger corpus is estimated from a sample of whole documents.

    Source: Shannon, "A mathematical theory of communication", 1948: H = -sum p log p.
    """
    documents = np.concatenate([source.train, source.val])
    counts, total = np.zeros(tokenizer.vocab_size, dtype=np.int64), 0
    for index in source.order(documents, 0, 0):
        tokens = tokenizer.encode(source.read(int(index)))
        counts += np.bincount(tokens, minlength=len(counts))
        counts[tokenizer.eos_id] += 1
        total += len(tokens) + 1
        if total >= max_tokens:
            break
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())


def _batch(last_token: int, pieces: list[np.ndarray], batch_size: int, seq_len: int) -> Batch:
    """Rows of the stream ``last_token, *pieces`` of B * T + 1 tokens; the two tensors share no memory."""
    stream = np.concatenate([np.array([last_token]), *pieces]).astype(np.int64, copy=False)
    inputs, targets = stream[:-1].reshape(batch_size, seq_len), stream[1:].reshape(batch_size, seq_len)
    return {"tokens": torch.from_numpy(inputs.copy()), "targets": torch.from_numpy(targets.copy())}


def _check_sizes(batch_size: int, seq_len: int, rank: int, world_size: int) -> None:
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("world_size", world_size)):
        if value < 1:
            raise ValueError(f"{name}={value} is too small: give at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not a rank of world_size={world_size}: give 0 to {world_size - 1}")
