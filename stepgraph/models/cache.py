"""Keys and values of the tokens so far, which a model that generates text reads instead of computing them again."""

from collections.abc import Sequence

import torch


class LayerCache:
    """Those of one layer, with room for ``limit`` tokens. ``length``: tokens so far.

    They take ``B * limit * (H_k d_k + H_v d_v)`` elements of the model's dtype, allocated at the first token.
    """

    def __init__(self, limit: int):
        self.limit, self.length = limit, 0
        self._all: list[torch.Tensor] = []

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of the next tokens, (B, H_k, T, d_k) and (B, H_v, T, d_v), and returns all, of
        ``length`` tokens.

        Raises ``ValueError`` beyond ``limit``, and for several tokens at once after others, which would need a mask.
        """
        start, stop = self.length, self.length + k.shape[2]
        if stop > self.limit:
            raise ValueError(f"{stop} tokens are more than the cache's {self.limit}; make it larger")
        if start and k.shape[2] > 1:
            raise ValueError(f"{k.shape[2]} tokens at once after {start} others; give them one by one")
        if not start:
            self._all = [x.new_empty(*x.shape[:2], self.limit, x.shape[3]) for x in (k, v)]
        for kept, new in zip(self._all, (k, v), strict=True):
            kept[:, :, start:stop] = new
        self.length = stop
        keys, values = (kept[:, :, :stop] for kept in self._all)
        return keys, values


Cache = Sequence[LayerCache]


def tokens_in(cache: Cache | None) -> int:
    """How many tokens the layers of ``cache`` hold; none without one."""
    return cache[0].length if cache else 0
