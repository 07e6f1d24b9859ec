"""The loss of direct preference optimization (DPO), over rows packed with pairs of answers.

    reward(y) = beta (log p(y | x) - log p_reference(y | x)),  log p(y | x): the sum over the tokens of the answer y
    margin    = reward(chosen) - reward(rejected)
    loss      = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)

with label smoothing e, the mean over pairs.
Source: Rafailov et al., "Direct Preference Optimization", 2023, equation 7; label smoothing: Mitchell, "A note on DPO
with noisy preferences", 2023.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from stepgraph.models.loss import IGNORE, logits_of

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
