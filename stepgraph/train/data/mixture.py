"""Batches whose rows come from several sources, each with its share."""

from typing import Any

import numpy as np

from stepgraph.train.data.loader import Batch, PackedLoader, to_batch
from stepgraph.train.data.several import Part
from stepgraph.train.data.tokenizer import Tokenizer


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
