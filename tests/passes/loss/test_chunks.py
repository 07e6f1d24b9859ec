"""A head and its loss in parts of the tokens: gradients as eager gives them, less memory, a reason where it stays."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph.costs.flops import flops
from stepgraph.costs.memory import estimate_memory
from stepgraph.graph.facts import packet
from stepgraph.passes import StepOptions, configured, get, run_passes
from stepgraph.passes.loss.chunk import parts
from stepgraph.passes.loss.head import Head as Nodes
from stepgraph.passes.memory.rematerialize import rematerialize
from stepgraph.passes.options import check_step

aten = torch.ops.aten
FUSE = replace(get("fuse_loss"), needs_cuda=False)


class Head(nn.Module):
    """Logits (M, V) or (B, S, V) of ids, by the table that looked them up if ``tied``."""

    def __init__(self, vocab=37, width=12, bias=False, tied=False, dtype=torch.float32):
        super().__init__()
        self.table, self.out = nn.Embedding(vocab, width, dtype=dtype), nn.Linear(width, vocab, bias, dtype=dtype)
        self.up = nn.Linear(width, width, dtype=dtype)
        if tied:
            self.out.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(0.5, dtype=dtype))

    def hidden(self, ids):
        return torch.tanh(self.up(self.table(ids)))

    def forward(self, ids):
        return self.out(self.hidden(ids))


def ids_and_targets(vocab=37, shape=(16,), ignored=3):
    targets = torch.randint(vocab, shape)
    targets.view(-1)[:: max(targets.numel() // max(ignored, 1), 1)] = -100
    return {"x": torch.randint(vocab, shape), "y": targets}


def plain(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["y"].view(-1))


def total(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum") * model.scale


def upcast(model, batch):
    """As Hugging Face does: cast, then reshaped."""
    logits = model(batch["x"]).float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["y"].view(-1), reduction="sum") / 7


def capped(model, batch):
    """Gemma 2's soft cap, after a scale as Cohere's."""
    logits = 3 * torch.tanh(model(batch["x"]) * model.scale / 3)
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), batch["y"].view(-1))


def gradients(model, loss_fn, batch, passes):
    """(loss, gradients, report or None); ``passes=None`` is plain eager."""
    model = copy.deepcopy(model)
    if passes is None:
        loss = loss_fn(model, batch)
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, None
    step = stepgraph.capture(model, loss_fn, batch, passes=passes)
    loss = step(batch)
    return loss, {n: p.grad for n, p in model.named_parameters()}, step.report[0]


def products(step):
    return [n for n in step.graph.nodes if packet(n) in (aten.mm, aten.addmm)]


def check(model, loss_fn, batch, chunks, tolerance=1e-5):
    """Loss and gradients in ``chunks`` against eager's in float64; the report."""
    wide = copy.deepcopy(model).double()
    expected, slopes, _ = gradients(wide, loss_fn, batch, None)
    loss, grads, report = gradients(model, loss_fn, batch, [FUSE.with_options(chunks=chunks)])
    torch.testing.assert_close(loss.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    for name, slope in slopes.items():
        if slope is None:
            assert grads[name] is None
            continue
        assert grads[name].dtype == dict(model.named_parameters())[name].dtype
        error = (grads[name].double() - slope).norm() / slope.norm().clamp(min=1e-30)
        assert error < tolerance or slope.norm() == 0 == grads[name].norm(), f"{name}: relative error {error:.1e}"
    return report


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss_fn", [plain, total, upcast, capped])
def test_gradients(loss_fn, bias, tied):
    report = check(Head(bias=bias, tied=tied), loss_fn, ids_and_targets(), 3)
    assert "16 x 37 logits in 3 parts of 6 rows" in report.summary and report.notes == []


@pytest.mark.parametrize("loss_fn", [plain, upcast, capped])
def test_in_bf16_no_worse_than_in_one_part(loss_fn):
    """A weight's gradient is rounded once a part: 2^-9 of what is summed so far, four times."""
    torch.manual_seed(3)
    model, batch = Head(width=32, bias=True, tied=True, dtype=torch.bfloat16), ids_and_targets(shape=(4, 64))
    check(model, loss_fn, batch, 4, tolerance=1.5e-2)
    truth = gradients(copy.deepcopy(model).double(), loss_fn, batch, None)[1]
    error = {}
    for chunks in (1, 4):
        grads = gradients(model, loss_fn, batch, [FUSE.with_options(chunks=chunks)])[1]
        error[chunks] = {n: ((grads[n].double() - t).norm() / t.norm()).item() for n, t in truth.items()}
    for name, one in error[1].items():
        assert error[4][name] < 2 * one + 1e-4, f"{name}: {error[4][name]:.1e} in four parts, {one:.1e} in one"


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 40), vocab=st.integers(1, 50), width=st.integers(1, 9), chunks=st.integers(1, 45),
    ignored=st.integers(0, 8), bias=st.booleans(), tied=st.booleans(), loss_fn=st.sampled_from([plain, total, capped]),
)  # fmt: skip
def test_any_shape(rows, vocab, width, chunks, ignored, bias, tied, loss_fn):
    torch.manual_seed(rows + 41 * vocab)
    batch = ids_and_targets(vocab, (rows,), ignored)
    check(Head(vocab, width, bias, tied), loss_fn, batch, chunks, tolerance=1e-4)  # what is left of large sums


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabulary(tools, tied, bias, chunks):
    """Rows of 37 fp32 numbers do not start at multiples of 16 bytes: products of 64 columns, losses of 37."""
    model, batch = Head(bias=bias, tied=tied), ids_and_targets(shape=(4, 160))
    report = check(model, plain, batch, chunks)
    assert report.summary.endswith(", the vocabulary padded to 64")
    step = tools.trace(model, plain, batch)
    run_passes(step, [FUSE.with_options(chunks=chunks)])
    wide = [n for n in products(step) if 64 in {s for i in n.all_input_nodes for s in i.meta["val"].shape}]
    assert len(wide) == 3 * chunks
    assert not [n for n in products(step) if 37 in n.meta["val"].shape]


def test_even_vocabulary_in_one_part_stays(tools):
    step = tools.trace(Head(vocab=32), plain, ids_and_targets(32, (4, 160)))
    (report,) = run_passes(step, [FUSE])
    assert "parts" not in report.summary and report.notes == [] and len(products(step)) == 6


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_memory_falls_with_the_parts(tools, chunks):
    step = tools.trace(Head(vocab=512, width=4), plain, ids_and_targets(512, (64,)))
    run_passes(step, [FUSE.with_options(chunks=chunks)])
    estimate = estimate_memory(step.graph)
    logits = 64 * 512 * 4
    assert estimate.peak - estimate.inputs <= logits // chunks + 6 * 512 * 4 * 4
    assert estimate.peak - estimate.inputs >= logits // chunks


def test_auto_is_by_memory():
    """As Qwen 3's head at 8 x 2048 tokens; GPT-2's; a small one."""

    def wanted(rows, vocab, dtype=torch.bfloat16):
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(rows, vocab, dtype=dtype, device="meta")
        node.args = (node, node)
        return parts(Nodes(node, node), "auto")

    assert wanted(16384, 151936) == 4 and wanted(16384, 50304) == 2 and wanted(8192, 32000) == 1
    assert wanted(2048, 262144, torch.float32) == 1  # below 2048 rows products are slower


# Models of Hugging Face

TINY = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=37, max_position_embeddings=16, head_dim=8,
)  # fmt: skip


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    small = {k: v for k, v in TINY.items() if k not in ("num_key_value_heads", "head_dim")}
    if kind == "qwen3 tied":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, tie_word_embeddings=True))
    if kind == "gemma2":
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**TINY, pad_token_id=0))
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**small, hidden_dropout_prob=0.0,
                                                                    attention_probs_dropout_prob=0.0))  # fmt: skip
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=37, n_positions=16, resid_pdrop=0.0,
                                         embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3 tied", "gemma2", "bert", "gpt2"])
def test_hugging_face(kind, dtype):
    model, ids = hugging_face(kind).to(dtype), torch.randint(1, 37, (2, 8))

    def loss_fn(model, batch):
        return model(batch["ids"], labels=batch["ids"]).loss

    runs = [gradients(model, loss_fn, {"ids": ids}, p) for p in (None, [FUSE.with_options(chunks=3)])]
    (loss, grads, _), (given, mine, report) = runs
    assert "16 x 37 logits in 3 parts" in report.summary and report.notes == []
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(given, loss, rtol=tolerance, atol=tolerance)
    for name, grad in grads.items():
        error = (mine[name].double() - grad.double()).norm() / grad.double().norm().clamp(min=1e-6)
        assert error < tolerance, f"{name}: relative error {error:.1e}"


# What stays in one part


def read_elsewhere(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + logits.tanh().mean()


def no_product(model, batch):
    return F.cross_entropy(model.hidden(batch["x"]).cumsum(1), batch["y"].clamp(max=3))


def bias_added_apart(model, batch):
    return F.cross_entropy(model(batch["x"]) + model.out.weight.sum(1), batch["y"])


def swapped_rows(model, batch):
    """A transposition between head and loss: a part of the rows of x is none of the logits."""
    logits = model(batch["x"].view(4, 4)).transpose(0, 1).reshape(16, -1)
    return F.cross_entropy(logits, batch["y"])


@pytest.mark.parametrize("loss_fn", [read_elsewhere, no_product, bias_added_apart, swapped_rows])
def test_left_in_one_part(loss_fn):
    report = check(Head(), loss_fn, ids_and_targets(), 2)
    (note,) = report.notes
    assert "stays in one part: " in note and "parts of" not in report.summary


def test_frozen_head():
    """No gradient for the weight: two products a part."""
    model, batch = Head(bias=True), ids_and_targets()
    model.out.requires_grad_(False)
    expected = gradients(model, plain, batch, None)
    given = gradients(model, plain, batch, [FUSE.with_options(chunks=2)])
    assert "in 2 parts" in given[2].summary
    torch.testing.assert_close(given[:2], expected[:2], rtol=1e-5, atol=1e-6)


def test_after_recomputation():
    model, batch = Head(tied=True), ids_and_targets()
    expected = gradients(model, plain, batch, None)
    model = copy.deepcopy(model)
    step = stepgraph.capture(model, plain, batch, passes=[get("recompute", policy="full"), FUSE.with_options(chunks=2)])
    torch.testing.assert_close(step(batch), expected[0])
    for name, grad in expected[1].items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", [0, -1, "some", 2.5, True])
def test_bad_number_of_parts(chunks):
    with pytest.raises(ValueError, match=r"loss_chunks=.*; allowed: auto, or a number of parts from 1 on"):
        check_step(StepOptions(loss_chunks=chunks))
    with pytest.raises(ValueError, match=r"loss_chunks=.*; allowed: auto, or a number of parts from 1 on"):
        FUSE.with_options(chunks=chunks)


@pytest.mark.parametrize("bias", [False, True])
def test_costs_are_seen(tools, bias):
    """Parts are plain nodes: as many operations as in one part, and gradients that the memory account knows."""
    totals = []
    for chunks in (1, 4):
        step = tools.trace(Head(bias=bias), plain, ids_and_targets())
        run_passes(step, [FUSE.with_options(chunks=chunks)])
        totals.append(sum(flops(node) for node in step.graph.nodes))
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("llama gradients", "none"), ("llama gradients", "full"), ("llama gradients", "budget=0.3"),
        ("llama bf16 gradients, accumulated", "full"), ("autocast", "full"), ("tied", "full"),
    ],
)  # fmt: skip
def test_models_between_recomputation_and_a_minimum_cut(tools, name, memory):
    records, traced, *_ = tools.prepared(name)
    step = tools.copied(traced.step)
    reports = run_passes(step, [*configured("exact", memory=memory, cuda_graph=False), FUSE.with_options(chunks=2)])
    assert " in 2 parts of " in reports[-1].summary and reports[-1].notes == []
    rematerialize(step)
    step.graph.lint()
    step.module.recompile()
    tolerance = 2e-2 if "bf16" in name or name == "autocast" else 1e-5
    for expected, mine in zip(records, tools.captured_records(name, step, 2), strict=False):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
