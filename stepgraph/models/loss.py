"""The training loss of a language model."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100  # a target that does not count

_open: list[list[torch.Tensor]] = []


@contextlib.contextmanager
def added_losses() -> Iterator[list[torch.Tensor]]:
    """What modules inside add to the training loss, scalars: as `next_token_loss` has it, for a loss of your own.

    Empty without gradients, as in validation. Recomputation for backward, outside, adds nothing.
    """
    _open.append([])
    try:
        yield _open[-1]
    finally:
        _open.pop()


def add_to_loss(value: torch.Tensor) -> None:
    """Add ``value``, a scalar, to the training loss that is being computed: see `added_losses`."""
    if _open:
        _open[-1].append(value)


def next_token_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy, in nats, of the next token: a scalar in fp32 whatever the model's dtype.

    ``batch["tokens"]`` and ``batch["targets"]`` are (B, T) int64; ``targets[b, t]`` is the token that follows
    ``tokens[b, t]``. With ``batch["positions"]`` documents do not see each other (see `stepgraph.models.documents`).
    Targets of -100 do not count; a batch without any other target has no mean and gives NaN. With
    ``batch["targets_per_row"]``, a scalar in fp32, the sum over the targets is divided by that times B instead: where
    it is the mean number of targets in the rows of a whole step, the mean of its microbatches' losses is that over all
    of its targets. What modules add, as a mixture of experts with ``balance_loss`` does, is part of it.
    """
    with added_losses() as others:
        logits = logits_of(model, batch)  # (B, T, V)
    # fp32: in bf16 the sum of V exponentials and the mean over B * T tokens would lose most of their digits.
    loss = mean_cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), usual_count(batch))
    return loss + sum(others) if others else loss


def mean_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """Of ``logits`` (N, V) fp32: the sum over the ``targets`` (N,) that are not -100, divided by ``count`` or, without
    one, by their number."""
    if count is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / count


def usual_count(batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """How many targets count in a microbatch of as many rows, as ``batch["targets_per_row"]`` has it; None without."""
    return batch["targets_per_row"] * batch["tokens"].shape[0] if "targets_per_row" in batch else None


def logits_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits (B, T, V) of ``batch["tokens"]``; with ``batch["positions"]``, of documents that do not see each
    other."""
    if "positions" in batch:
        return model(batch["tokens"], positions=batch["positions"])
    return model(batch["tokens"])
