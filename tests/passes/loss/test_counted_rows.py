"""A head that multiplies only the rows whose label counts: as eager, whatever later batches hold."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stepgraph
from stepgraph.capture.batch import share_of_labels
from stepgraph.passes import StepOptions, get
from tests.passes.loss.test_chunks import Head, capped, gradients, plain, products, read_elsewhere, upcast

FUSE = replace(get("fuse_loss"), needs_cuda=False).with_options(rows="counted")
ours = torch.ops.stepgraph


def batch_of(share, vocab=37, shape=(4, 80), seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(vocab, shape, generator=generator) for _ in range(2))
    lot = torch.rand(shape, generator=generator)
    return {"x": ids, "y": targets.masked_fill(lot >= share, -100)}


def total(model, batch):
    return F.cross_entropy(model(batch["x"]).view(-1, model.out.out_features), batch["y"].view(-1), reduction="sum") / 9


def steps(model, loss_fn, batches, passes, **options):
    """Losses, metrics and parameters of a step on each of ``batches``; ``passes=[]``: the graph as captured."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepgraph.capture(model, loss_fn, batches[0], optimizer, passes=passes, **options)
    found = []
    for batch in batches:
        found.append(step(batch).detach().clone())
        found += [value.clone() for value in step.metrics.values()]
    return found + list(model.parameters()), step


def check(model, loss_fn, batches, chunks=3, tolerance=1e-5, parts=None, **options):
    mine, step = steps(model, loss_fn, batches, [FUSE.with_options(chunks=chunks)], **options)
    expected, _ = steps(model, loss_fn, batches, [], **options)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    report = next(r for r in step.report if r.name == "fuse_loss")
    assert report.summary.endswith("of rows that count") and not report.notes
    return step


SHARES = (0.15, 1.0, 0.0, 0.5, 0.15)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss_fn", [total, upcast])
def test_one_capture_for_any_share(loss_fn, bias, tied):
    batches = [batch_of(share, seed=i) for i, share in enumerate(SHARES)]
    step = check(Head(bias=bias, tied=tied), loss_fn, batches)
    assert all(37 not in node.meta["val"].shape for node in products(step.graph))
    nodes = [node.target for node in step.graph.graph.nodes]
    assert nodes.count(ours.counted_logits.default) == nodes.count(ours.counted_dx.default) == 3
    assert nodes.count(ours.counted_dw_.default) == 3


def test_mean_of_none_is_nan_as_in_eager():
    """And its gradient zero: parameters stay as they are."""
    check(Head(bias=True), plain, [batch_of(0.2), batch_of(0.0)])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(2, 300), vocab=st.integers(2, 50), width=st.integers(2, 9), chunks=st.integers(1, 9),
    shares=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=1, max_size=3), bias=st.booleans(),
    tied=st.booleans(), loss_fn=st.sampled_from([plain, total]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_any_shape(rows, vocab, width, chunks, shares, bias, tied, loss_fn, dtype):
    torch.manual_seed(rows + 41 * vocab)
    batches = [batch_of(share, vocab, (rows,), seed=i) for i, share in enumerate(shares)]
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2  # weights of up to 3 are rounded to 2^-7 a step
    check(Head(vocab, width, bias, tied, dtype), loss_fn, batches, chunks, tolerance)


@pytest.mark.parametrize("chunks", ["auto", 2])
def test_accumulated_and_clipped(chunks):
    batches = [batch_of(share, shape=(4, 40), seed=i) for i, share in enumerate(SHARES)]
    check(Head(bias=True, tied=True), total, batches, chunks, accumulate=2, max_grad_norm=0.5)


def autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, batch)


def test_autocast():
    check(Head(bias=True, tied=True), autocast, [batch_of(s, seed=i) for i, s in enumerate(SHARES)], tolerance=1e-2)


def test_the_fewest_rows_count_at_the_end_of_their_batch():
    """The places of rows that count are anywhere: the first alone, the last alone."""
    batches = []
    for at in (0, -1):
        batch = batch_of(0.0)
        batch["y"].view(-1)[at] = 3
        batches.append(batch)
    check(Head(), plain, batches)


def test_frozen_head():
    model = Head(bias=True)
    model.out.requires_grad_(False)
    check(model, plain, [batch_of(0.2), batch_of(0.9)])


@pytest.mark.parametrize(("loss_fn", "why"), [(capped, "reads its logits"), (read_elsewhere, "reads its logits")])
def test_heads_that_compute_all_rows_say_why(loss_fn, why):
    batch = batch_of(0.2, shape=(40,))
    expected = gradients(Head(), loss_fn, batch, None)
    del expected
    model = Head()
    want = gradients(model, loss_fn, batch, None)
    loss, grads, report = gradients(model, loss_fn, batch, [FUSE])
    torch.testing.assert_close(loss, want[0])
    torch.testing.assert_close(grads, want[1], rtol=1e-5, atol=1e-5)
    assert any(why in note for note in report.notes) and "of rows that count" not in report.summary


def test_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=37,
        max_position_embeddings=80, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)

    def loss_fn(model, batch):
        return model(batch["x"], labels=batch["y"]).loss

    check(model, loss_fn, [batch_of(0.15), batch_of(0.3, seed=1)])


@pytest.mark.parametrize(
    ("passes", "share", "chosen"),
    [
        ("default", 0.15, "counted"), ("default", 0.9, None), ("exact", 0.15, None), (StepOptions(), 0.5, "counted"),
        (StepOptions(loss_rows="all"), 0.15, "all"), (StepOptions(loss_rows="counted"), 1.0, "counted"),
    ],
)  # fmt: skip
def test_auto_looks_at_the_first_batch(passes, share, chosen):
    step = stepgraph.capture(Head(), plain, batch_of(share), passes=passes, disable=("inductor",))
    options = step.spec.passes
    assert options == passes if chosen is None else options.loss_rows == chosen
    assert step(batch_of(1.0)).isfinite()


def test_share_of_labels():
    """Of tensors with ignored labels alone: ids have none."""
    assert share_of_labels({"x": torch.arange(8), "y": torch.tensor([-100, 1, -100, 3])}) == 0.5
    assert share_of_labels([torch.arange(8), torch.full((4,), -100.0), "text"]) == 1.0


def test_a_soft_cap_in_the_kernel():
    """Which is no operator that reads the logits any more."""

    def loss_fn(model, batch):
        logits = 3 * torch.tanh(model(batch["x"]) / 3)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["y"].view(-1))

    step = check(Head(), loss_fn, [batch_of(0.2), batch_of(1.0, seed=1), batch_of(0.0, seed=2)])
    assert all(
        n.target is not torch.ops.aten.tanh.default or n.meta["val"].shape[-1] != 37 for n in step.graph.graph.nodes
    )
