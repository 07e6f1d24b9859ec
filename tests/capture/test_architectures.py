"""Architectures of `transformers`, from tiny configurations, bit for bit with their update; CI takes the quick ones."""

import functools

import pytest
import torch

import stepgraph
from tests.capture.architectures import ARCHITECTURES, Architecture, loss_fn

pytest.importorskip("transformers")

ROWS = [
    pytest.param(row, id=row.name, marks=[] if row.quick else [pytest.mark.long])
    for row in ARCHITECTURES
    if not row.refused
]
REFUSED = [pytest.param(row, id=row.name) for row in ARCHITECTURES if row.refused]

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize("row", ROWS)
def test_bitwise_equal_to_eager(check_training, row: Architecture):
    batches = [row.batch() for _ in range(2)]
    check_training(row.build(), loss_fn, batches, lambda m: adamw(m.parameters()), max_grad_norm=1.0, steps=3)


@pytest.mark.parametrize("row", ROWS)
def test_accumulated_bitwise_equal_to_eager(check_training, row: Architecture):
    batches = [row.batch() for _ in range(2)]
    check_training(row.build(), loss_fn, batches, lambda m: adamw(m.parameters(), fused=True), accumulate=2, steps=2)


@pytest.mark.parametrize("row", REFUSED)
def test_refused_in_one_line(row: Architecture):
    with pytest.raises(stepgraph.CaptureError, match=row.refused) as caught:
        stepgraph.capture(row.build(), loss_fn, row.batch(), passes="exact")
    assert "\n" not in str(caught.value)


def test_names_are_unique():
    names = [row.name for row in ARCHITECTURES]
    assert len(set(names)) == len(names) >= 40
