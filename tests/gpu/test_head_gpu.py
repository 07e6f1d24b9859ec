"""Heads and losses on a GPU: odd vocabularies and widths under Inductor, and logits in parts of the tokens."""

import copy
import statistics

import pytest
import torch
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.inductor.library import Compiled
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions
from tests.inductor import test_strides as behind_products
from tests.kernels import strides

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_take_any_strides(dtype):
    for name, operator, arguments in strides.calls(DEVICE, dtype):
        strides.check_call(name, operator, arguments)


@pytest.mark.parametrize(("width", "forced"), [(1537, True), (4097, False)])
@pytest.mark.parametrize("name", ["with_norm", "with_sums", "over_logits"])
def test_operators_behind_products_of_odd_widths(name, width, forced):
    """``forced``: Inductor pads the product, else only where it measures that this is faster."""
    function = getattr(behind_products, name)
    x, w = torch.randn(4096, 512, device=DEVICE), torch.randn(width, 512, device=DEVICE)
    weight = torch.randn(width, device=DEVICE)
    if name == "over_logits":
        x = x[:1024]  # a target for each row
    expected = function(x, w, weight)
    with config.patch(force_shape_pad=forced):
        piece = Compiled(make_fx(function, tracing_mode="fake")(x, w, weight), {})
    for given, right in zip(piece(x, w, weight), expected, strict=True):
        assert given.stride() == right.stride()
        torch.testing.assert_close(given, right, rtol=1e-3, atol=1e-3 * right.abs().max().item())


def gpt2(vocab, width, layers=4):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=3, vocab_size=vocab, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).to(DEVICE, torch.bfloat16)


def hugging_face_loss(model, batch):
    return model(batch["ids"], labels=batch["ids"]).loss


def relative(given, expected):
    return ((given.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize(
    ("vocab", "width", "chunks", "disable"),
    [
        (50257, 192, "auto", ()), (50257, 195, 3, ()), (50257, 195, "auto", ("fuse_loss",)), (5001, 1155, "auto", ()),
        (5001, 1290, "auto", ()),
    ],
)  # fmt: skip
def test_gpt2_of_odd_widths(vocab, width, chunks, disable):
    """Default passes in bf16, 16 x 256 tokens: the logits, hidden states and heads of odd widths."""
    torch.manual_seed(0)
    model, ids = gpt2(vocab, width), torch.randint(vocab, (16, 256), device=DEVICE)
    wide = copy.deepcopy(model).float()
    truth = hugging_face_loss(wide, {"ids": ids})
    truth.backward()
    eager = copy.deepcopy(model)
    hugging_face_loss(eager, {"ids": ids}).backward()
    options = StepOptions(loss_chunks=chunks, disable_pass=disable)
    step = stepgraph.capture(model, hugging_face_loss, {"ids": ids}, passes=options)
    loss = step({"ids": ids}).clone()
    torch.testing.assert_close(loss.float(), truth.detach(), rtol=2e-3, atol=0)
    for (name, mine), exact, other in zip(model.named_parameters(), wide.parameters(), eager.parameters(), strict=True):
        error, theirs = relative(mine.grad, exact.grad), relative(other.grad, exact.grad)
        assert error < max(1.3 * theirs, 2e-2), f"{name}: relative error {error:.1e}, eager's {theirs:.1e}"
    report = next(r for r in step.report if r.name == "fuse_loss") if "fuse_loss" not in disable else None
    if report:
        assert "the vocabulary padded to" in report.summary and report.notes == []


def masked_loss(model, batch):
    return model(batch["ids"], labels=batch["labels"]).loss


def labels_of(ids, share, seed):
    lot = torch.rand(ids.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))
    return ids.masked_fill(lot >= share, -100)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_that_count_alone(bias):
    """One capture, replayed as a CUDA graph, for batches of which a tenth, all, one or half of the labels count."""
    torch.manual_seed(0)
    model, ids = gpt2(50257, 192, layers=2), torch.randint(50257, (32, 256), device=DEVICE)
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(50257, device=DEVICE, dtype=torch.bfloat16) / 4)
    wide = copy.deepcopy(model).float()
    step = stepgraph.capture(model, masked_loss, {"ids": ids, "labels": labels_of(ids, 0.1, 0)})
    report = next(r for r in step.report if r.name == "fuse_loss")
    assert report.summary.endswith("of rows that count") and report.notes == []
    one = torch.full_like(ids, -100)
    one[7, 9] = 5
    for labels in (labels_of(ids, 0.1, 1), ids, one, labels_of(ids, 0.5, 2)):
        grads = []
        for _ in range(2):
            model.zero_grad()
            loss = step({"ids": ids, "labels": labels}).clone()
            grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        wide.zero_grad()
        truth = masked_loss(wide, {"ids": ids, "labels": labels})
        truth.backward()
        torch.testing.assert_close(loss.float(), truth.detach(), rtol=4e-3, atol=0)
        for name, p in wide.named_parameters():
            assert relative(grads[0][name], p.grad) < 4e-2, name
        if bias:  # untied from what lies before it
            assert torch.equal(grads[0]["lm_head.bias"], grads[1]["lm_head.bias"])
    model.zero_grad()
    none = torch.full_like(ids, -100)
    assert step({"ids": ids, "labels": none}).isnan()
    assert not any(p.grad.any() for p in model.parameters())


LARGE = Llama3Config(dim=1024, n_layers=1, n_heads=8, n_kv_heads=8, ffn_dim=2048, vocab_size=151936, max_seq_len=2048)
TOKENS = (4, 2048)


def large_head(chunks):
    """(step, batch, model) with 8,192 x 151,936 logits: 2.3 GiB."""
    torch.manual_seed(0)
    model = Llama3(LARGE).to(DEVICE, torch.bfloat16)
    ids = torch.randint(LARGE.vocab_size, TOKENS, device=DEVICE)
    batch = {"tokens": ids, "targets": ids.roll(-1, 1)}
    options = StepOptions(loss_chunks=chunks, cuda_graph=False)
    return stepgraph.capture(model, next_token_loss, batch, passes=options), batch, model


def peak(step, batch):
    step(batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("chunks", [2, 4, "auto"])
def test_large_vocabulary_in_parts(chunks):
    """Less memory by what the parts leave out, and the gradients of one part."""
    logits = TOKENS[0] * TOKENS[1] * LARGE.vocab_size * 2
    if torch.cuda.mem_get_info()[0] < 8 * logits:
        pytest.skip(f"needs {8 * logits / 2**30:.0f} GiB of free GPU memory")
    whole, batch, one = large_head(1)
    step, _, model = large_head(chunks)
    losses = [s(batch).clone() for s in (whole, step)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for (name, mine), other in zip(model.named_parameters(), one.parameters(), strict=True):
        assert relative(mine.grad, other.grad) < 1e-2, name
    head = model.head.weight
    repeated = head.grad.clone()
    for p in model.parameters():
        p.grad = None
    step(batch)
    # Of the head alone: attention's backward adds its parts in any order, and all that lies before it differs.
    assert torch.equal(head.grad, repeated), "two runs differ"
    saved = peak(whole, batch) - peak(step, batch)
    parts = 2 if chunks == "auto" else chunks
    assert saved > 0.9 * logits * (1 - 1 / parts), f"{saved / logits:.2f} of the logits saved in {parts} parts"


def seconds(step, batch, runs=10):
    for _ in range(3):
        step(batch)
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(batch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


@pytest.mark.timed
def test_parts_are_as_fast():
    """The head is most of this step; parts may not cost it five percent."""
    took = {}
    for chunks in (1, "auto", 4):
        step, batch, _ = large_head(chunks)
        took[chunks] = seconds(step, batch)
        del step
    assert max(took["auto"], took[4]) < 1.05 * took[1], ", ".join(f"{c}: {t * 1e3:.1f} ms" for c, t in took.items())
