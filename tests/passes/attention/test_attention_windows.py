"""Attention under masks that the graph determines: which band a mask is, and what the graph becomes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.capture import InputSpec, Provenance, StepGraph, set_provenance
from stepgraph.compat import FakeTensorMode
from stepgraph.costs.flops import flops
from stepgraph.graph.facts import argument
from stepgraph.graph.values import Metric, Parameter
from stepgraph.passes import get, run_passes
from stepgraph.passes.attention.mask import Band, band_of

aten = torch.ops.aten
PASS = replace(get("attention_windows"), needs_cuda=False)
INF = float("inf")


# Which band a mask is


def visible(length, left, right):
    d = torch.arange(length)[:, None] - torch.arange(length)[None]
    return (d <= (length if left is None else left)) & (-d <= (length if right is None else right))


@settings(deadline=None)
@given(length=st.integers(1, 12), left=st.integers(0, 14), right=st.integers(0, 14), form=st.integers(0, 5))
def test_band(length, left, right, form):
    mask = visible(length, left, right)
    if form % 3:
        mask = torch.where(mask, 0.0, (-INF, -65504.0)[form % 3 - 1])
    if form > 2:
        mask = mask.expand(2, 3, length, length)
    expected = Band(None if left >= length - 1 else left, None if right >= length - 1 else right)
    assert band_of(mask) == expected
    assert band_of(mask.contiguous()) == expected


def test_a_mask_that_hides_nothing_is_a_band_of_any_shape():
    for mask in (torch.zeros(2, 1, 3, 5), torch.zeros(3, 5).expand(2, 4, 3, 5), torch.ones(5, 3, dtype=torch.bool)):
        assert band_of(mask) == Band(None, None)
    assert isinstance(band_of(torch.cat([torch.zeros(1, 3, 5), torch.eye(5)[None, :3]])), str)


@settings(deadline=None)
@given(st.data())
def test_any_other_mask_is_no_band(data):
    length = data.draw(st.integers(2, 8))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length**2, max_size=length**2)))
    mask = mask.reshape(length, length)
    found = band_of(mask)
    if isinstance(found, Band):
        assert torch.equal(mask, visible(length, found.left, found.right))
    else:
        bands = [visible(length, left, right) for left in range(length) for right in range(length)]
        assert not any(torch.equal(mask, band) for band in bands)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.ones(2, 3).tril() == 1, "shape"),
        (torch.stack([torch.ones(4, 4).tril() == 1, torch.ones(4, 4) == 1]), "differs"),
        (torch.where(torch.ones(4, 4).tril() == 1, 1.0, -INF), "other values"),
        (torch.where(torch.ones(4, 4).tril() == 1, 0.0, -1e4), "other values"),
        (torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)) == 1, "not a band"),
        (torch.ones(4, 4).tril(-1) == 1, "not a band"),
    ],
)
def test_reasons(mask, reason):
    assert reason in band_of(mask)


# What the graph becomes


def attention_graph(
    make_mask,
    *,
    op="cudnn",
    hidden=-INF,
    shared=False,
    dtype=torch.bfloat16,
    channels=64,
    causal=False,
    dropout=0.0,
    scale=0.3,
    keys=48,
):
    """Forward and backward of attention under ``make_mask(q, padding)``, twice, in CUDA's operators. ``shared``: all
    heads have the same keys. ``keys``: how many there are."""
    length = 48
    forward = getattr(aten, f"_scaled_dot_product_{op}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{op}_attention_backward").default

    def attend(q, k, v, dy, mask):
        k = k[:, :1].expand(q.shape) if shared else k
        k, v = k[:, :, :keys], v[:, :, :keys]
        bias = torch.where(mask if keys == length else mask[:, :keys], 0.0, hidden).to(q.dtype)
        bias = bias.expand(2, 4, length, keys)
        if op == "cudnn":
            out, lse, *_, seed, offset, _ = forward(q, k, v, bias, True, dropout, causal, False, scale=scale)
            rest = (out, lse, seed, offset, bias, None, None, length, keys, dropout, causal)
            return out, *backward(dy, q, k, v, *rest, scale=scale)
        out, lse, seed, offset = forward(q, k, v, bias, True, dropout, causal, scale=scale)
        rest = (bias, out, lse, seed, offset, dropout, [True, True, True, False], causal)
        return out, *backward(dy, q, k, v, *rest, scale=scale)[:3]

    def program(q, k, v, dy, padding):
        mask = make_mask(q, padding)
        results = [*attend(q, k, v, dy, mask), *attend(k, q, v, dy, mask)]
        # What reads them in the strides that they have: whole heads, as shared keys' gradients are added up.
        return results + [
            result.view(2, 1, -1, result.shape[2], channels).sum(1) for result in results if result.is_contiguous()
        ]

    with FakeTensorMode() as mode:
        inputs = [torch.empty(2, 4, length, channels, dtype=dtype) for _ in range(4)]
        inputs.append(torch.empty(2, length, dtype=torch.bool))
    with mode:
        module = make_fx(program)(*inputs)
    for node in module.graph.nodes:
        if node.op == "call_function":
            phase = "backward" if "backward" in node.name else "forward"
            set_provenance(node, Provenance("attn", phase, "model.py:1"))
    specs = [InputSpec(Parameter(str(i))) for i in range(len(inputs))]
    return StepGraph(module, specs, [Metric(str(i)) for i in range(len(module.graph.output_node().args[0]))])


def distances(q):
    here = torch.arange(q.shape[2], device=q.device)
    return here[:, None] - here[None]


def sliding(q, padding):
    d = distances(q)
    return (d >= 0) & (d <= 7)


def around(q, padding):
    return distances(q).abs() <= 5


def count(step, target):
    return len(step.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize(("op", "hidden"), [("cudnn", -65504.0), ("cudnn", -INF), ("efficient", -INF)])
@pytest.mark.parametrize(
    ("make_mask", "sides", "pairs"), [(sliding, (7, 0), 48 * 8 - 28), (around, (5, 5), 48 * 11 - 30)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_window(op, hidden, make_mask, sides, pairs, shared):
    step = attention_graph(make_mask, op=op, hidden=hidden, shared=shared)
    shapes = [n.meta["val"].shape for n in step.graph.output_node().args[0]]
    assert len(shapes) > 8 or op == "efficient"
    (report,) = run_passes(step, [PASS])
    assert (report.matched, report.changed, report.notes) == (2, 2, [])
    assert "2 of 2" in report.summary
    assert count(step, aten.where.self) == count(step, aten.arange.default) == 0  # nothing of the mask is left
    assert not any("scaled_dot_product" in str(node.target) for node in step.graph.nodes)
    for target, products in ((aten._flash_attention_forward.default, 2), (aten._flash_attention_backward.default, 5)):
        for node in step.graph.find_nodes(op="call_function", target=target):
            assert (node.kwargs["window_size_left"], node.kwargs["window_size_right"]) == sides
            assert node.kwargs["scale"] == 0.3
            assert flops(node) == products * 2 * 2 * 4 * 64 * pairs
    assert [n.meta["val"].shape for n in step.graph.output_node().args[0]] == shapes


@pytest.mark.parametrize("op", ["cudnn", "efficient"])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_that_say_no_more_than_causal_or_nothing(op, causal):
    def make_mask(q, padding):
        return distances(q) >= (0 if causal else -1000)

    step = attention_graph(make_mask, op=op)
    (report,) = run_passes(step, [PASS])
    assert report.changed == 2 and count(step, aten.where.self) == 0
    attention = [node for node in step.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(attention) == 4
    for node in attention:
        assert argument(node, "attn_bias") is None and argument(node, "is_causal") is causal


@pytest.mark.parametrize("op", ["cudnn", "efficient"])
def test_a_mask_that_hides_nothing_of_fewer_keys(op):
    """As T5's attention to the encoder has: zeros where others have a bias."""
    step = attention_graph(lambda q, padding: distances(q) >= -1000, op=op, keys=32)
    shapes = [n.meta["val"].shape for n in step.graph.output_node().args[0]]
    (report,) = run_passes(step, [PASS])
    assert report.changed == 2 and count(step, aten.where.self) == 0
    attention = [node for node in step.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert [argument(node, "attn_bias") for node in attention] == 4 * [None]
    assert not any(argument(node, "is_causal") for node in attention)
    assert [n.meta["val"].shape for n in step.graph.output_node().args[0]] == shapes


def padded(q, padding):
    return sliding(q, padding) & padding[:, None, None, :]


@pytest.mark.parametrize(
    ("make_mask", "options", "reason"),
    [
        (padded, {}, "depends on padding"),
        (lambda q, padding: distances(q).abs() % 3 == 0, {}, "not a band"),
        (lambda q, padding: distances(q).abs() < torch.randint(9, (), device=q.device), {}, "depends on randint"),
        (sliding, {"dropout": 0.1}, "dropout"),
        (sliding, {"dtype": torch.float32, "op": "efficient"}, "float32"),
        (sliding, {"channels": 320, "op": "efficient"}, "320 channels"),
        (sliding, {"channels": 60, "op": "efficient"}, "60 channels"),
        (sliding, {"causal": True}, "causal and has a mask"),
        (sliding, {"scale": -0.5}, "multiplied by -0.5, which is not positive"),
        (sliding, {"scale": 0.0}, "multiplied by 0.0, which is not positive"),
    ],
)
def test_what_stays_says_why(make_mask, options, reason):
    step = attention_graph(make_mask, **options)
    text = step.text()
    (report,) = run_passes(step, [PASS])
    assert report.matched == 2 and report.changed == 0
    assert len(report.notes) == 2 and all(reason in note for note in report.notes), report.notes
    assert step.text() == text


def test_a_mask_that_is_written_to_stays():
    def make_mask(q, padding):
        mask = sliding(q, padding)
        mask[3] = True
        return mask

    (report,) = run_passes(attention_graph(make_mask), [PASS])
    assert report.changed == 0 and "written to" in report.notes[0]


def test_a_large_mask_of_each_head_is_not_evaluated(monkeypatch):
    monkeypatch.setattr("stepgraph.passes.attention.mask._MAX_OF_HEADS", 5000)
    (report,) = run_passes(attention_graph(sliding), [PASS])
    assert report.changed == 2  # one for all heads, of 48 x 48 elements in memory

    def of_heads(q, padding):
        return distances(q) < torch.arange(q.shape[1], device=q.device)[:, None, None]

    (report,) = run_passes(attention_graph(of_heads), [PASS])
    assert report.changed == 0 and "9,216 elements, more than 5,000" in report.notes[0]
