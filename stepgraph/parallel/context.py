"""Context parallelism: the ranks of ``cp`` share sequences, and each has the tokens of one part.

All that works on tokens separately works on this rank's part. Attention sees all tokens, in one of two ways: of some of
the heads (`Ulysses`), or with the gathered keys and values of all ranks (`stepgraph.parallel.context_gather`).
Every rank reads the whole batch and takes its part in the graph, by a buffer that says which: all ranks have the same
graph.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from stepgraph.errors import unknown_name
from stepgraph.models.documents import PLACE, Attention, document_mask
from stepgraph.parallel.all_to_all import AllToAll
from stepgraph.parallel.context_gather import GatheredKeys
from stepgraph.parallel.context_ranks import ContextRanks
from stepgraph.parallel.context_transformers import CONTEXT, models_of_transformers, share
from stepgraph.parallel.mesh import Mesh
from stepgraph.parallel.tensor import register_place

#: How attention sees the tokens of all ranks; auto: by heads where the ranks divide them.
ContextForm = Literal["auto", "ulysses", "gather"]


class Ulysses(ContextRanks):
    """`stepgraph.models.documents.Context` by heads:

        q, k, v (B, H, T / P, d) -> all_to_all -> (B, H / P, T, d) -> attention -> all_to_all -> (B, H, T / P, d)

    so that the kernels and masks of attention are those of one rank. Where there are fewer heads of keys and values
    than ranks, ranks get copies.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
    """

    def mask(self, tokens: Tensor, positions: Tensor | None, dtype: torch.dtype, place: Tensor) -> Tensor | None:
        """That of one rank."""
        return None if positions is None else document_mask(positions, dtype)

    def attend(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """``attention`` of this rank's heads. ``ValueError`` for heads that the ranks cannot share."""
        return self._by_tokens(attention(*self._by_heads(*self.cast(q, k, v))))

    def _by_heads(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Each (B, H, T / P, d) -> (B, H / P, T, d)."""
        B, _, t, _ = xs[0].shape
        rows = [self._by_rank(x).transpose(1, 2).reshape(B * t, self.ranks, -1).transpose(0, 1) for x in xs]
        came = AllToAll.apply(torch.cat(rows, -1).contiguous(), self.group, "activation", "cp")  # (P, B t, widths)
        whole = came.unflatten(1, (B, t)).transpose(0, 1).flatten(1, 2)  # (B, T, widths)
        parts = whole.split([row.shape[-1] for row in rows], -1)
        return tuple(part.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2) for part, x in zip(parts, xs, strict=True))

    def _by_tokens(self, y: Tensor) -> Tensor:
        """(B, H / P, T, d) -> (B, H, T / P, d)."""
        B, _, T, d = y.shape
        rows = y.transpose(1, 2).reshape(B, self.ranks, T // self.ranks, -1).transpose(0, 1).flatten(1, 2)
        came = AllToAll.apply(rows.contiguous(), self.group, "activation", "cp")  # (P, B t, heads)
        return came.transpose(0, 1).reshape(B, T // self.ranks, -1, d).transpose(1, 2)

    def _by_rank(self, x: Tensor) -> Tensor:
        """(B, H, t, d) with heads for each rank, copies where several ranks share one."""
        heads, ranks = x.shape[1], self.ranks
        if heads % ranks and ranks % heads:
            fits = [n for n in range(1, ranks) if heads % n == 0]
            raise ValueError(
                f"cp={ranks} does not divide the {heads} heads of attention; try cp={fits[-1]}, or context=gather"
            )
        return x if heads % ranks == 0 else x.repeat_interleave(ranks // heads, dim=1)


def form_of(heads: int, kv_heads: int, ranks: int, asked: ContextForm = "auto") -> ContextForm:
    """``ulysses`` or ``gather``: what is ``asked``, else by the ``heads`` of a rank of ``tp``.

    By heads, a rank sends about (H + H_kv) / P of its tokens' channels and attends by the fastest kernels; it gathers
    (P - 1) times those of H_kv, keeps them for backward, and attends by FlashAttention 2. So heads come first.
    """
    if asked not in get_args(ContextForm):
        raise unknown_name("context", asked, get_args(ContextForm))
    divides = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    return ("ulysses" if divides else "gather") if asked == "auto" else asked


def _heads(model: nn.Module, mesh: Mesh) -> tuple[int, int]:
    """The heads of attention, and of its keys and values, of a rank of ``tp``."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "n_heads", None) or getattr(config, "num_attention_heads", mesh.spec.size)
    kv_heads = getattr(config, "n_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    return heads // mesh.spec.tp, kv_heads // mesh.spec.tp


def context_of(model: nn.Module) -> ContextRanks:
    """The ranks that share the sequences of ``model``, which `share_sequences` has given it."""
    found = (getattr(m, name, None) for m in model.modules() for name in ("context", CONTEXT))
    return next(one for one in found if one is not None)


def share_sequences(model: nn.Module, mesh: Mesh, device: torch.device | str, form: ContextForm) -> None:
    """Let the ranks of ``cp`` share the sequences of ``model``: a model with ``context``, as those of
    `stepgraph.models`, or of transformers. ``ValueError`` for another, and for an unknown ``form``."""
    found = {path: module for path, module in model.named_modules() if hasattr(module, "context")}
    readers = [m for path, m in found.items() if not any(path != o and path.startswith(o and f"{o}.") for o in found)]
    readers += models_of_transformers(model)
    if not readers:
        raise ValueError(
            f"mesh {mesh.spec} splits sequences and {type(model).__name__} has no attention that takes parts of them; "
            "drop cp, or use a model of stepgraph.models or transformers"
        )
    form = form_of(*_heads(readers[0], mesh), mesh.spec.cp, form)
    context, place = (
        {"ulysses": Ulysses, "gather": GatheredKeys}[form](mesh),
        torch.full((), mesh.cp_place, dtype=torch.int64, device=device),
    )
    for module in found.values():
        module.context = context
    for module in models_of_transformers(model):
        share(module, context)
    for module in readers:
        register_place(module, place, PLACE)
