"""Strides around compiled pieces: what a piece returns lies in memory as the graph says, however Inductor pads."""

import pytest
import torch
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.inductor.compiled import Compiled

# Inductor's C++ compiler takes most of a test's time.
pytestmark = pytest.mark.slow


@pytest.fixture
def padded_products(monkeypatch):
    """Inductor pads products of odd widths on this CPU as it does on a GPU, where it also times whether to."""
    monkeypatch.setattr(pad_mm, "check_device", lambda a, b: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    with config.patch(force_shape_pad=True, shape_padding=True, force_disable_caches=True):
        yield


def as_rows(x, w):
    return torch.mm(x, w.t())


def as_batch(x, w):
    return torch.mm(x, w.t()).view(4, 8, 257)


def transposed(x, w):
    return torch.mm(x, w.t()).t()


def with_others(x, w):
    """Results of a width that needs no padding, and none that is a tensor."""
    return x + 1, torch.mm(x, w.t()), torch.mm(w, x.t()).sum(0)


@pytest.mark.parametrize("function", [as_rows, as_batch, transposed, with_others])
def test_outputs_have_the_strides_that_the_graph_records(padded_products, function):
    x, w = torch.randn(32, 16), torch.randn(257, 16)
    piece = Compiled(make_fx(function, tracing_mode="fake")(x, w), {})
    for _ in range(2):
        results, expected = piece(x, w), function(x, w)
        pairs = (
            [(results, expected)] if isinstance(expected, torch.Tensor) else list(zip(results, expected, strict=True))
        )
        for given, right in pairs:
            assert given.stride() == right.stride()
            torch.testing.assert_close(given, right)
    assert piece.padded, "Inductor padded no product: the test tests nothing"
