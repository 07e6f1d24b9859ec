"""The training loss of a language model: of the next token, and of direct preference optimization (DPO), over rows
packed with pairs of answers:

    reward(y) = beta (log p(y | x) - log p_reference(y | x)),  log p(y | x): the sum over the tokens of the answer y
    margin    = reward(chosen) - reward(rejected)
    loss      = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)

with label smoothing e, the mean over pairs. Source: Rafailov et al., "Direct Preference Optimization", 2023, equation
7; label smoothing: Mitchell, "A note on DPO with noisy preferences", 2023.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100  # a target that does not count

_open: list[list[torch.Tensor]] = []


@contextlib.contextmanager
def added_losses() -> Iterator[list[torch.Tensor]]:
    """Collects the scalars that modules inside add to the training loss: as in `next_token_loss`, for your own loss.

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
    """How many targets count in a microbatch of this many rows, by ``batch["targets_per_row"]``; None without it."""
    return batch["targets_per_row"] * batch["tokens"].shape[0] if "targets_per_row" in batch else None


def logits_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits (B, T, V) of ``batch["tokens"]``; with ``batch["positions"]``, of separate documents."""
    if "positions" in batch:
        return model(batch["tokens"], positions=batch["positions"])
    return model(batch["tokens"])


#: What ``text_field`` is where data is read for preference pairs.
PAIR = "chosen,rejected"
#: Tokens of a row that a pair takes at least, so that the most pairs of a row are a number that is known before.
PAIR_TOKENS = 16

Batch = Mapping[str, torch.Tensor]


def answer_log_probs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The log-probability of each document's targets, (B, 2 * (T // PAIR_TOKENS)) fp32: chosen and rejected by turns;
    0 where a row has fewer documents.

    ``batch``: tokens, targets and positions (B, T) int64, as `next_token_loss` takes them; a document begins where
    positions are 0. Sums are taken in a fixed order.
    """
    targets = batch["targets"]
    logs = F.log_softmax(logits_of(model, batch).float(), -1)
    logs = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(_answers(batch), logs.unsqueeze(1), 0.0).sum(-1)


def preference_loss(
    answers: torch.Tensor, reference: torch.Tensor, batch: Batch, beta: float, label_smoothing: float,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """The loss of the pairs of ``batch``, and the means of rewards, of margins and of whether the chosen answer has the
    larger reward, by TRL's names: scalars in fp32.

    ``answers``, ``reference``: `answer_log_probs` of both models. Sums over pairs are divided by
    ``batch["pairs_per_row"]``, a scalar in fp32, times B: where that is the mean of a whole step, the mean of its
    microbatches' losses is that over all of its pairs. ``over_ranks``: the mean of a tensor over ranks with batches of
    their own, and with it the loss and the metrics are those of all their pairs.
    """
    rewards = beta * (answers - reference)
    chosen, rejected = rewards[:, 0::2], rewards[:, 1::2]
    margins = chosen - rejected
    losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
    there, count = _answers(batch).any(-1)[:, 1::2], over_ranks(batch["pairs_per_row"] * len(answers))
    values = {"chosen": chosen, "rejected": rejected, "accuracies": (margins > 0).float(), "margins": margins}
    means = over_ranks(torch.stack([_mean(value.detach(), there, count) for value in values.values()]))
    named = {f"rewards/{name}": mean for name, mean in zip(values, means.unbind(), strict=True)}
    return over_ranks(_mean(losses, there, count)), named


def _answers(batch: Batch) -> torch.Tensor:
    """Which targets (B, documents, T) are those of a document."""
    of = (batch["positions"] == 0).cumsum(1) - 1
    documents = torch.arange(2 * (of.shape[1] // PAIR_TOKENS), device=of.device)
    return (of.unsqueeze(1) == documents[:, None]) & (batch["targets"] != IGNORE).unsqueeze(1)


def _mean(values: torch.Tensor, there: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return torch.where(there, values, 0.0).sum() / count
