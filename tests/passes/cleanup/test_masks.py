"""Masks and clamps go where no value that can come is changed by them, and nowhere else."""

import pytest
import torch

aten = torch.ops.aten
SCORES = torch.tensor([[0.3, -1.0, 2.0, 0.7], [1.5, 0.2, -0.4, 0.9], [0.1, 0.4, 0.2, -2.0]])
ROWS = torch.arange(12.0).view(6, 2) - 5


def check(tools, function, *inputs):
    """(targets left, report), after checking that results and inputs are as before."""
    step = tools.by_hand(function, *inputs)
    (report, _) = tools.check_same(step, inputs, ["false_masks", "dead_code"])
    return tools.targets(step), report


def chosen(scores, K=2):
    """Experts (N * K,) of the tokens, from 0 to 3."""
    return scores.topk(K).indices.reshape(-1)


def test_rows_masked_for_experts_that_are_not_there(tools):
    """As transformers 5.17 does: mask, clamp in place, mask in place, mask a copy."""

    def function(scores, x):
        ids, order = chosen(scores).sort()
        mask, rows = (ids >= 4).unsqueeze(-1), x[order]
        ids.clamp_(max=3)
        rows.masked_fill_(mask, 0.0)
        return (rows * 2).masked_fill(mask, 0.0) * 3, ids + 1

    targets, report = check(tools, function, SCORES, ROWS)
    assert report.changed == report.matched == 3
    assert not {aten.ge.Scalar, aten.clamp_.default, aten.masked_fill.Scalar, aten.masked_fill_.Scalar} & set(targets)


KEPT = {
    "a value that comes": lambda ids, x: (x * 2).masked_fill((ids >= 3).unsqueeze(-1), 9.0) * 1,
    "ids written before": lambda ids, x: (x * 2).masked_fill((ids.add_(3) >= 4).unsqueeze(-1), 9.0) * 1,
    "a mask written before": lambda ids, x: (x * 2).masked_fill((ids >= 4).logical_not_().unsqueeze(-1), 9.0) * 1,
    "a copy that is written": lambda ids, x: (x.masked_fill((ids >= 4).unsqueeze(-1), 9.0).mul_(2), x * 1),
    "a copy that is returned": lambda ids, x: (x.masked_fill((ids >= 4).unsqueeze(-1), 9.0), x * 1),
    "a tensor written after": lambda ids, x: (x.masked_fill((ids >= 4).unsqueeze(-1), 9.0), x.mul_(2))[0] * 1,
    "a mask that widens": lambda ids, x: x[:1].masked_fill((ids >= 4).unsqueeze(-1), 9.0) * 1,
    "other strides": lambda ids, x: x[:, :1].expand(6, 2).masked_fill((ids >= 4).unsqueeze(-1), 9.0) * 1,
    "a clamp that acts": lambda ids, x: ids.clamp(max=2) * 1,
    "a lower bound that acts": lambda ids, x: ids.clamp(min=1) * 1,
    "wider numbers": lambda ids, x: (x * 2).masked_fill((ids * 2 >= 4).unsqueeze(-1), 9.0) * 1,
}


@pytest.mark.parametrize("function", KEPT.values(), ids=KEPT)
def test_what_must_stay(tools, function):
    _, report = check(tools, lambda scores, x: function(chosen(scores), x * 1), SCORES, ROWS)
    assert report.matched == 1 and report.changed == 0


@pytest.mark.parametrize("number", range(-1, 6))
def test_what_the_bounds_decide(tools, number):
    """A mask goes exactly where no expert of four reaches the number, a clamp where none exceeds it."""

    def function(scores, x):
        return (x * 2).masked_fill((chosen(scores) >= number).unsqueeze(-1), 9.0) * 1, chosen(scores).clamp(
            max=number
        ) * 1

    _, report = check(tools, function, SCORES, ROWS)
    assert report.changed == (number >= 4) + (number >= 3)


def test_places_of_a_sort(tools):
    def function(scores):
        values, places = scores.argsort(-1).sort(0)
        return places.clamp(max=2) + 1, values[1:].clone().clamp(min=0, max=3) + 1

    _, report = check(tools, function, SCORES)
    assert report.changed == report.matched == 2
