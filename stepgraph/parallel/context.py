"""Context parallelism: the ranks of ``cp`` share sequences, and each has the tokens of one part.

All that works on tokens separately works on this rank's part. Attention sees all tokens, for some of the heads:

    q, k, v (B, H, T / P, d) -> all_to_all -> (B, H / P, T, d) -> attention -> all_to_all -> (B, H, T / P, d)

so that its kernels, causal masks and masks of packed documents are those of one rank. Where there are fewer heads of
keys and values than ranks, ranks get copies. Every rank reads the whole batch and takes its part in the graph, by a
buffer that says which: all ranks have the same graph.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

import torch
import torch.distributed as dist
from torch import nn

from stepgraph.models.context import PLACE
from stepgraph.parallel.all_to_all import AllToAll
from stepgraph.parallel.context_transformers import models_of_transformers, share
from stepgraph.parallel.mesh import Mesh
from stepgraph.parallel.tensor import register_place


class Context:
    """The ranks that share sequences: `stepgraph.models.context.Context` over ``mesh``."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, mesh.spec.cp

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks themselves."""
        return self.mesh.context_group

    def part(self, x: torch.Tensor, place: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The part ``place`` of ``x`` along ``dim``. ``ValueError`` for a length that the ranks do not divide."""
        if x.shape[dim] % self.ranks:
            fits = x.shape[dim] // self.ranks * self.ranks or self.ranks
            raise ValueError(f"cp={self.ranks} does not divide the sequence length {x.shape[dim]}; try {fits}")
        return x.unflatten(dim, (self.ranks, -1)).index_select(dim, place).squeeze(dim)

    def by_heads(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each (B, H, T / P, d) -> (B, H / P, T, d). ``ValueError`` for heads that the ranks cannot share."""
        B, _, t, _ = xs[0].shape
        rows = [self._by_rank(x).transpose(1, 2).reshape(B * t, self.ranks, -1).transpose(0, 1) for x in xs]
        came = AllToAll.apply(torch.cat(rows, -1).contiguous(), self.group, "activation", "cp")  # (P, B t, widths)
        whole = came.unflatten(1, (B, t)).transpose(0, 1).flatten(1, 2)  # (B, T, widths)
        parts = whole.split([row.shape[-1] for row in rows], -1)
        return tuple(part.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2) for part, x in zip(parts, xs, strict=True))

    def by_tokens(self, y: torch.Tensor) -> torch.Tensor:
        """(B, H / P, T, d) -> (B, H, T / P, d)."""
        B, _, T, d = y.shape
        rows = y.transpose(1, 2).reshape(B, self.ranks, T // self.ranks, -1).transpose(0, 1).flatten(1, 2)
        came = AllToAll.apply(rows.contiguous(), self.group, "activation", "cp")  # (P, B t, heads)
        return came.transpose(0, 1).reshape(B, T // self.ranks, -1, d).transpose(1, 2)

    def _by_rank(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, t, d) with heads for each rank, copies where several ranks share one."""
        heads, ranks = x.shape[1], self.ranks
        if heads % ranks and ranks % heads:
            fits = [n for n in range(1, ranks) if heads % n == 0]
            raise ValueError(f"cp={ranks} does not divide the {heads} heads of attention; try cp={fits[-1]}")
        return x if heads % ranks == 0 else x.repeat_interleave(ranks // heads, dim=1)

    def __deepcopy__(self, memo: dict) -> "Context":
        return self


def share_sequences(model: nn.Module, mesh: Mesh, device: torch.device | str) -> None:
    """Let the ranks of ``cp`` share the sequences of ``model``: a model with ``context``, as those of
    `stepgraph.models`, or of transformers. ``ValueError`` for another."""
    context, place = Context(mesh), torch.full((), mesh.cp_place, dtype=torch.int64, device=device)
    found = {path: module for path, module in model.named_modules() if hasattr(module, "context")}
    readers = [m for path, m in found.items() if not any(path != o and path.startswith(o and f"{o}.") for o in found)]
    for module in found.values():
        module.context = context
    for module in models_of_transformers(model):
        share(module, context)
        readers.append(module)
    if not readers:
        raise ValueError(
            f"mesh {mesh.spec} splits sequences and {type(model).__name__} has no attention that takes parts of them; "
            "drop cp, or give a model of stepgraph.models or transformers"
        )
    for module in readers:
        register_place(module, place, PLACE)
