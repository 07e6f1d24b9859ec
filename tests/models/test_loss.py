"""The loss against its definition."""

import torch
from torch import nn

from stepgraph.models import next_token_loss


class Fixed(nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits


def test_mean_negative_log_likelihood_over_the_targets_that_count():
    torch.manual_seed(0)
    model = Fixed(torch.randn(2, 5, 7) * 3)
    targets = torch.randint(0, 7, (2, 5))
    targets[0, 1] = targets[1, 4] = -100
    loss = next_token_loss(model, {"tokens": torch.zeros(2, 5, dtype=torch.int64), "targets": targets})
    p = model.logits.detach().double().softmax(-1)
    nll = [-p[b, t, targets[b, t]].log() for b in range(2) for t in range(5) if targets[b, t] != -100]
    torch.testing.assert_close(loss.double(), torch.stack(nll).mean(), rtol=1e-6, atol=0.0)
    loss.backward()
    assert not model.logits.grad[0, 1].any() and not model.logits.grad[1, 4].any(), "ignored targets pull nothing"


def test_bf16_logits_are_summed_in_fp32():
    torch.manual_seed(0)
    logits = torch.randn(4, 64, 1000).bfloat16()
    targets = torch.randint(0, 1000, (4, 64))
    loss = next_token_loss(Fixed(logits), {"tokens": targets, "targets": targets})
    assert loss.dtype == torch.float32
    exact = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0.0)  # bf16 arithmetic would miss by 1e-3


def test_a_batch_without_targets_is_nan():
    targets = torch.full((1, 3), -100)
    assert next_token_loss(Fixed(torch.zeros(1, 3, 7)), {"tokens": targets, "targets": targets}).isnan()


def test_the_mean_of_microbatches_is_that_over_their_targets():
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    targets[0, 1:] = targets[2:] = -100
    targets[3, 0] = 4
    count = (targets >= 0).sum() / 4
    losses = [
        next_token_loss(Fixed(part), {"tokens": its, "targets": its, "targets_per_row": count})
        for part, its in zip(logits.split(1), targets.split(1), strict=True)
    ]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(torch.stack(losses).mean(), expected)
    assert losses[2].item() == 0  # a microbatch without targets
