"""Strides around compiled pieces: what a piece returns lies in memory as the graph says, however Inductor pads."""

import copy
from dataclasses import replace

import pytest
import torch
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
import stepgraph.kernels.embedding.gradient
import stepgraph.kernels.lora.sums
import stepgraph.kernels.loss.cross_entropy
import stepgraph.kernels.loss.tokens
import stepgraph.kernels.norm.column_sum
import stepgraph.kernels.norm.operators
from stepgraph import compat
from stepgraph.inductor.library import Compiled
from stepgraph.passes import configured

# Inductor's C++ compiler takes most of a test's time.
pytestmark = pytest.mark.slow

ours = torch.ops.stepgraph


@pytest.fixture
def padded_products(monkeypatch):
    """Inductor pads products of odd widths on this CPU as it does on a GPU, where it also times whether to."""
    monkeypatch.setattr(pad_mm, "check_device", lambda a, b: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    widths = {"disable_padding_cpu": False, "comprehensive_padding": True, "padding_stride_threshold": 16}
    with config.patch(force_shape_pad=True, shape_padding=True, force_disable_caches=True, **widths):
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
            torch.testing.assert_close(given, right, rtol=1e-4, atol=1e-4)  # sums of 257 products in another order
    assert piece.padded, "Inductor padded no product: the test tests nothing"


def with_norm(x, w, weight):
    """A product of odd width into our norm and its gradient, inside one piece."""
    made = torch.mm(x, w.t())
    y, _, _, rstd = ours.norm(made, weight, None, None, torch.float32, "rms", 1e-5, 0.0, False)
    return y, *ours.norm_backward(
        made * 2, made, weight, None, rstd, y, torch.float32, "rms", 1e-5, 0.0, torch.float32, True, True, False
    )[:2]  # fmt: skip


def with_sums(x, w, weight):
    made = torch.mm(x, w.t())
    index = torch.arange(len(x), device=x.device).remainder(5)
    stats = ours.token_stats(made, index, 1.0, -100)
    return ours.embedding_backward(made, index, 7, -1), ours.column_sum(made, torch.float32), *stats


def over_logits(x, w, weight):
    """Written over the result of a product: with what is read of it afterwards."""
    logits = torch.mm(x, w.t())
    index, ones = (make(len(x), device=x.device) for make in (torch.arange, torch.ones))
    loss = ours.cross_entropy_(logits, index, torch.ones((), device=x.device), True, -100)
    other = torch.mm(x.sin(), w.t())
    ours.token_gradient_(other, index, *[ones] * 6, 1.0, -100)
    return loss, logits, logits * weight, torch.mm(logits, w), other.t()


@pytest.mark.parametrize("function", [with_norm, with_sums, over_logits])
def test_operators_behind_padded_products(padded_products, function):
    x, w, weight = torch.randn(32, 16), torch.randn(257, 16), torch.randn(257)
    expected = function(x, w, weight)
    piece = Compiled(make_fx(function, tracing_mode="fake")(x, w, weight), {})
    for given, right in zip(piece(x, w, weight), expected, strict=True):
        assert given.stride() == right.stride()
        torch.testing.assert_close(given, right, rtol=1e-4, atol=1e-4)


def test_what_our_operators_read_is_written_once():
    """As rows, and transposed: torch computes the product again for each operator that reads a view of it, and writes
    it once for each, so that a block of a step took several times its memory."""

    def gradients(dy, gate, w, a, b):
        product = (dy * gate).view(32, 16)
        ours_of = ours.sum_products
        return ours_of([product], [w]), ours_of([product], [b]), ours_of([product.t()], [a])

    inputs = torch.randn(4, 8, 16), torch.randn(4, 8, 16), torch.randn(16, 5), torch.randn(32, 3), torch.randn(16, 3)
    piece = Compiled(make_fx(gradients, tracing_mode="fake")(*inputs), {})
    for given, expected in zip(piece(*inputs), gradients(*inputs), strict=True):
        torch.testing.assert_close(given, expected)
    source = compat.inductor_source(piece.function)
    assert source.count("= torch.ops.stepgraph.sum_products") == 3 and source.count("= empty_strided_cpu(") == 1


@pytest.mark.long  # its short siblings are above
def test_a_gpt2_of_odd_widths(padded_products):
    """The whole pipeline as on a GPU: logits leave a piece for the loss, norms and the table's gradient lie between."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=17, n_layer=1, n_head=1, vocab_size=37, n_positions=16, n_inner=35,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
                                     tie_word_embeddings=False)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    batch = {"ids": torch.randint(37, (2, 16))}

    def loss_fn(model, batch):
        return model(batch["ids"], labels=batch["ids"]).loss

    twin = copy.deepcopy(model)
    loss = loss_fn(twin, batch)
    loss.backward()
    passes = [
        replace(p, needs_cuda=False) if p.name in ("fuse_norm", "fuse_loss", "embedding_gradient") else p
        for p in configured("default", norm="kernel", cuda_graph=False)
    ]
    step = stepgraph.capture(model, loss_fn, batch, passes=passes)
    assert {r.name for r in step.report if r.changed} >= {"fuse_norm", "fuse_loss", "embedding_gradient", "inductor"}
    for _ in range(2):
        torch.testing.assert_close(step(batch), loss.detach(), rtol=1e-4, atol=1e-4)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, 2 * other.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    pieces = [m for m in step.graph.executable.modules() if isinstance(m, Compiled)]
    assert any(piece.padded for piece in pieces), "no padded product left a piece: the test tests nothing"
