"""Masks and clamps go where no value that can come is changed by them, and nowhere else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


SOURCES = {
    "topk": (lambda s: s.topk(2).indices, 0, 3),
    "sorted values": (lambda s: s.argsort(-1).sort(0).values, 0, 3),
    "largest along": (lambda s: s.max(0).indices, 0, 2),
    "argmax of all": (lambda s: s.argmax().view(1), 0, 11),
    "positions": (lambda s: torch.arange(s.shape[1]), 0, 3),
    "indexed": (lambda s: s.argmin(1)[torch.tensor([0, 2, 1])].to(torch.int64).clone(), 0, 3),
    "narrow": (lambda s: torch.arange(4, dtype=torch.int32).to(torch.int64)[None].expand(2, 4), 0, 3),
}
COMPARE = ("ge", "gt", "le", "lt", "eq", "ne")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SOURCES)), st.sampled_from(COMPARE), st.integers(-2, 13), st.booleans())
def test_what_the_bounds_decide(tools, source, compare, number, half):
    """``where`` of any comparison with any number goes exactly where the bounds decide it."""
    make, low, high = SOURCES[source]
    number += 0.5 * (half and compare not in ("eq", "ne"))

    def function(s):
        found = make(s)
        return torch.where(getattr(torch, compare)(found, number), found * 3, found * 5) + 1

    _, report = check(tools, function, SCORES)
    held = {getattr(torch, compare)(torch.tensor(v), number).item() for v in range(low, high + 1)}
    assert report.changed == (len(held) == 1)
