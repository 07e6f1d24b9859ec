"""Context parallelism by gathered keys and values: each rank's queries attend to the keys of all ranks.

    k, v (B, H_kv, T / P, d) -> all_gather -> (B, H_kv, T, d); backward sums gradients by a reduce_scatter

Under a causal mask late tokens attend to more keys than early ones. So the sequence is cut into 2 P chunks, and rank r
has the chunks r and 2 P - 1 - r: as many pairs of a query and a key on every rank. Each chunk is one causal attention,
of its queries to the keys up to its end, by an operator that reads that end from the device: all ranks run one graph,
and no rank computes what its mask hides. Packed documents, and dtypes that the operator's kernel does not take, attend
with a mask (B, 1, T / P, T). Works for any number of heads; keeps all keys and values for backward.

Source: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2, "Context parallelism".
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgraph.kernels.attention.documents import DTYPES, attend_documents
from stepgraph.models.documents import Attention, computed_in, document_mask
from stepgraph.parallel.context_ranks import ContextRanks


class GatheredKeys(ContextRanks):
    """`stepgraph.models.documents.Context` by keys and values of all ranks."""

    chunks = 2

    def places(self, place: Tensor) -> Tensor:
        """The chunks of rank ``place``: an early one and a late one."""
        return torch.stack((place, 2 * self.ranks - 1 - place))

    def mask(self, tokens: Tensor, positions: Tensor | None, dtype: torch.dtype, place: Tensor) -> Tensor:
        """Numbers to add to the scores, of documents; else where each chunk's queries and keys begin and end in the
        rows of a batch, (1, 2 chunks, queries or keys, 2 B + 1) int32."""
        B, T = tokens.shape
        rows = torch.arange(T, device=tokens.device)
        if positions is None and (not tokens.is_cuda or computed_in(dtype, tokens.device) in DTYPES):
            return self._offsets(B, T, place)
        own = self.part(rows.expand_as(tokens) if positions is None else positions, place)
        return document_mask(own, dtype, self.part(rows, place, 0), T)

    def attend(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
    ) -> Tensor:
        """Attention of this rank's two chunks to the keys of all ranks."""
        q, k, v = self.cast(q, k, v)
        pair = self.whole(torch.cat((k.transpose(1, 2), v.transpose(1, 2)), -1)).transpose(1, 2)
        k, v = pair.split((k.shape[-1], v.shape[-1]), -1)  # (B, H_kv, T, d)
        if mask.dtype is not torch.int32:
            return attention(q, k, v)
        scale, width = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1]
        wide = -(-max(q.shape[-1], width) // 8) * 8  # the kernel takes one width, a multiple of 8
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
        B, T = k.shape[0], k.shape[2]
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))  # (B T, H_kv, wide)
        done = []
        for chunk, (of_queries, of_keys) in zip(q.transpose(1, 2).chunk(2, 1), mask[0], strict=True):
            c = chunk.shape[1]
            y = attend_documents(
                chunk.flatten(0, 1), k, v, of_queries, c, scale=scale, key_offsets=of_keys, key_longest=T
            )
            done.append(y.unflatten(0, (B, c)))
        return torch.cat(done, 1)[..., :width].transpose(1, 2)

    def _offsets(self, B: int, T: int, place: Tensor) -> Tensor:
        """Each row of a batch as two documents: a chunk and the keys up to its end, then the keys after it, which no
        query sees."""
        c = T // self.parts(T)
        row = torch.arange(B, device=place.device)
        ends = (self.places(place).view(2, 1) + 1) * c + row * T  # (2, B)
        keys = torch.stack((ends, ((row + 1) * T).expand(2, B)), -1).flatten(1)  # (2, 2 B)
        queries = ((row + 1) * c).repeat_interleave(2).expand(2, 2 * B)
        return F.pad(torch.stack((queries, keys), 1), (1, 0)).to(torch.int32).unsqueeze(0)
