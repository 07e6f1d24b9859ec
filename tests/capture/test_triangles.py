"""Causal masks in buffers: graphs make them, and the step is captured again once a buffer holds something else."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture.state import triangle_of
from stepgraph.graph.values import Buffer
from stepgraph.passes import StepOptions

T, D = 8, 16
ONES = torch.ones(T, T)
MASKS = {
    "tril": torch.tril(ONES).view(1, 1, T, T),
    "tril, boolean": torch.tril(ONES).bool(),
    "triu": torch.triu(ONES, 1),
    "triu, boolean": torch.triu(ONES, 1).bool(),
    "-inf": torch.triu(torch.full((T, T), -math.inf), 1),
    "integers": torch.tril(ONES).long(),
}


class Attention(nn.Module):
    """Two heads, written out, for sequences up to T."""

    def __init__(self, mask: torch.Tensor, counts: bool = False):
        super().__init__()
        self.qkv, self.out, self.counts = nn.Linear(D, 3 * D), nn.Linear(D, D), counts
        self.added, self.hidden_by_zero = bool(mask.float().isinf().any()), bool(mask.flatten()[0])
        self.register_buffer("mask", mask.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (z.unflatten(-1, (2, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        scores, mask = q @ k.transpose(-2, -1) / math.sqrt(D // 2), self.mask[..., : x.shape[1], : x.shape[1]]
        if self.added:
            scores = scores + mask
        else:
            scores = scores.masked_fill(mask == 0 if self.hidden_by_zero else mask != 0, -math.inf)
        if self.counts:
            self.mask.add_(1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), batch)


def captured(model: nn.Module, passes: object = None) -> tuple[stepgraph.CapturedStep, torch.Tensor]:
    batch = torch.randn(2, T - 2, D, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return stepgraph.capture(model, loss_fn, batch, optimizer, passes=passes or StepOptions(inductor="off")), batch


def reads_mask(step: stepgraph.CapturedStep) -> bool:
    """Whether anything but the comparison with what the graph makes reads it."""
    readers = [user for node, what in step.graph.bound() if isinstance(what, Buffer) for user in node.users]
    return any(user.target is not torch.ops.aten.eq.Tensor or user.args[1].op == "placeholder" for user in readers)


def check(step: stepgraph.CapturedStep, batch: torch.Tensor) -> None:
    report = step.verify(batch)
    assert report.bitwise, report


@pytest.mark.parametrize("name", MASKS)
def test_the_graph_makes_the_mask(name):
    step, batch = captured(Attention(MASKS[name]))
    assert not reads_mask(step)
    check(step, batch)


def test_a_mask_written_in_place_is_followed():
    model = Attention(MASKS["tril"])
    step, batch = captured(model)
    step(batch)
    before = step.graph
    model.mask.copy_(MASKS["tril"])
    model.load_state_dict(model.state_dict())
    step(batch)
    assert step.graph is before  # the same mask again
    model.mask[..., 3, 1] = 0
    step(batch)
    assert step.graph is not before
    assert reads_mask(step)
    check(step, batch)


@pytest.mark.parametrize("inductor", ("off", "full"))
def test_a_mask_written_by_data_is_no_silent_error(inductor):
    model = Attention(MASKS["tril"])
    step, batch = captured(model, StepOptions(inductor=inductor))
    step(batch)
    model.mask.data[..., 3, 1] = 0
    with pytest.raises(RuntimeError, match=r"the buffer mask was changed by \.data"):
        step(batch)


def test_another_triangle_is_followed():
    model = Attention(MASKS["triu"])
    step, batch = captured(model)
    step(batch)
    model.mask.mul_(-30)
    step(batch)
    assert not reads_mask(step)
    check(step, batch)


def test_an_exact_step_reads_it():
    step, batch = captured(Attention(MASKS["tril"]), "exact")
    assert reads_mask(step)
    check(step, batch)


def test_a_mask_that_the_step_writes_is_read():
    step, batch = captured(Attention(MASKS["tril"].float(), counts=True))
    assert reads_mask(step)
    check(step, batch)


def test_masks_of_one_memory_are_read():
    model = nn.Sequential(Attention(MASKS["triu"]), Attention(MASKS["triu"]))
    model[1].mask = model[0].mask.view(1, T, T)
    step, batch = captured(model)
    assert reads_mask(step)
    check(step, batch)


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(T), torch.zeros(T, T), torch.ones(T), torch.tril(ONES)[:5], torch.tril(ONES).T[::2], torch.ones(1, 1)]
    + [torch.tril(ONES, 1), torch.tril(ONES).expand(2, T, T), torch.full((T, T), math.nan).triu(1)],
)
def test_what_is_no_triangle(tensor):
    assert triangle_of(tensor) is None
