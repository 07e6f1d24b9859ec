"""The cross entropy computed with its gradient: same gradients where it is rewritten, a reason where it is not."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.costs.memory import estimate_memory
from stepgraph.kernels.loss.cross_entropy import cross_entropy_
from stepgraph.passes import configured, get, run_passes
from stepgraph.passes.memory.rematerialize import rematerialize

aten = torch.ops.aten
OPERATOR = cross_entropy_._opoverload
FUSE = replace(get("fuse_loss"), needs_cuda=False)
VOCAB, ROWS = 11, 6


class Head(nn.Module):
    """Logits (M, V) of vectors (M, D), and buffers that a loss may use."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up, self.out = nn.Linear(8, 12, dtype=dtype), nn.Linear(12, VOCAB, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return self.out(torch.tanh(self.up(x)))


def batch_of_classes(dtype=torch.float32):
    targets = torch.randint(VOCAB, (ROWS,))
    targets[2] = -100
    return {"x": torch.randn(ROWS, 8, dtype=dtype), "y": targets}


def gradients(model, loss_fn, batch, passes, **options):
    """(loss, gradients, buffers, report or None) of one step; ``passes=None`` is plain eager."""
    model = copy.deepcopy(model)
    report = None
    if passes is None:
        loss = loss_fn(model, batch)
        loss.backward()
    else:
        step = stepgraph.capture(model, loss_fn, batch, passes=passes, **options)
        loss = step(batch)
        report = next((r for r in step.report if r.name == "fuse_loss"), None)
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers()), report


def check(model, loss_fn, batch, changed, tolerance=1e-6, **options):
    """Loss, gradients and buffers as eager (with microbatches, the graph as captured) gives them; the report."""
    before = gradients(model, loss_fn, batch, [] if options else None, **options)
    loss, grads, buffers, report = gradients(model, loss_fn, batch, [FUSE], **options)
    assert report.changed == changed
    same = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    same(loss, before[0], equal_nan=True)
    for name, grad in before[1].items():
        same(grads[name], grad, msg=lambda m, name=name: f"{name}: {m}")
    for name, value in before[2].items():
        assert torch.equal(buffers[name], value)
    return report


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # bf16: the gradient of a logit is rounded once either way, but from sums in another order: one unit in the last
    # place, 2^-8, of values up to 1, carried through layers in bf16.
    [("llama gradients", 1e-6), ("llama bf16 gradients, accumulated", 2e-2), ("autocast", 1e-6), ("tied", 1e-6)],
)
def test_models(tools, name, tolerance):
    records, traced, *_ = tools.prepared(name)
    step = tools.copied(traced.step)
    (report,) = run_passes(step, [FUSE])
    assert (report.matched, report.changed, report.notes) == (1, 1, [])
    assert "1 of 1 cross entropies computed with the gradient" in report.line()
    assert len(step.graph.find_nodes(op="call_function", target=OPERATOR)) == 1
    for gone in ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"):
        assert not step.graph.find_nodes(op="call_function", target=getattr(aten, gone).default)
    actual = tools.captured_records(name, step, 2)
    for expected, given in zip(records, actual, strict=False):
        for key, value in expected.items():
            torch.testing.assert_close(
                given[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k} {m}"
            )


def test_nothing_of_the_logits_size_is_allocated_twice(tools):
    """The fp32 logits, their softmax and their gradient are gone: bf16 logits stay alone."""
    step = tools.copied(tools.prepared("llama bf16")[1].step)
    before = estimate_memory(step.graph).peak
    run_passes(step, [FUSE])
    rows = 4 * 8 * 37
    large = [n for n in step.graph.nodes if n.op == "call_function" and n.target is not OPERATOR
             and isinstance(v := n.meta.get("val"), torch.Tensor) and v.numel() == rows]  # fmt: skip
    assert all(n.meta["val"].dtype == torch.bfloat16 for n in large)
    assert aten.clone.default not in {n.target for n in large}
    # What the operator replaced: at its peak, softmax and gradient in fp32 next to each other.
    assert before - estimate_memory(step.graph).peak >= rows * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_loss(dtype):
    """Targets shifted by padding; in bf16 the cast lies before the reshape to rows."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=37, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)
    ids = torch.randint(37, (2, 8))

    def loss_fn(model, batch):
        return model(batch["ids"], labels=batch["ids"], use_cache=False).loss

    report = check(model, loss_fn, {"ids": ids}, 1, tolerance=1e-6 if dtype == torch.float32 else 2e-2)
    assert not report.notes


@pytest.mark.parametrize("memory", ["none", "full", "budget=0.3"])
@pytest.mark.parametrize("name", ["llama gradients", "hugging face"])
def test_after_recomputation_and_before_a_minimum_cut(tools, name, memory):
    """Logits that hold a gradient are never what something is computed from again."""
    records, traced, *_ = tools.prepared(name)
    step = tools.copied(traced.step)
    run_passes(step, [*configured("exact", memory=memory, cuda_graph=False), FUSE])
    rematerialize(step)
    step.graph.lint()
    step.module.recompile()
    assert len(step.graph.find_nodes(op="call_function", target=OPERATOR)) == 1
    for expected, given in zip(records, tools.captured_records(name, step, 2), strict=False):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def plain(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def without_rows(model, batch):
    return F.cross_entropy(model(batch["x"]), torch.full_like(batch["y"], -100))


def with_z_loss(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + 0.1 * logits.logsumexp(1).square().mean()


def read_after(model, batch):
    """The logits are read by an operator after the loss."""
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + logits.tanh().sum()


def kept_in_a_buffer(model, batch):
    logits = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"])
    model.scale.copy_(logits.detach()[0, 0])
    return loss


def of_a_slice(model, batch):
    """A vocabulary padded for speed: rows of the logits are not contiguous with each other."""
    return F.cross_entropy(model(batch["x"])[:, :9], batch["y"].clamp(max=8))


def transposed(model, batch):
    """Columns are contiguous instead of rows."""
    return F.cross_entropy((model.out.weight @ torch.tanh(model.up(batch["x"])).t()).t(), batch["y"])


def scaled(model, batch):
    loss = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return loss * model.scale.clone() / 3


def scaled_by_what_is_written_before(model, batch):
    model.scale.mul_(1.5)
    return plain(model, batch) * model.scale


def sliding_targets(model, batch):
    """Targets with a stride."""
    return F.cross_entropy(model(batch["x"]), torch.stack([batch["y"], batch["y"]], 1)[:, 1])


def logits_written_before(model, batch):
    logits = model(batch["x"])
    logits.mul_(2)
    return F.cross_entropy(logits, batch["y"])


def two_losses(model, batch):
    """On different logits, and on shared ones."""
    logits = model(batch["x"])
    other = model(batch["x"] + 1)
    return (
        F.cross_entropy(logits, batch["y"]) + 0.3 * F.cross_entropy(other, batch["y"])
        + F.cross_entropy(logits, batch["y"].clamp(min=3), ignore_index=3, reduction="sum")
    )  # fmt: skip


def smoothed(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1)


def weighted(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=torch.ones(VOCAB))


def for_each_row(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none").square().mean()


def squared(model, batch):
    return plain(model, batch) ** 2


def scaled_by_what_is_written_later(model, batch):
    """Through ``.data`` autograd does not notice: backward reads what was written after forward."""
    loss = plain(model, batch) * model.scale.data
    model.scale.mul_(3)
    return loss


def entropy_too(model, batch):
    logs = model(batch["x"]).log_softmax(1)
    return F.nll_loss(logs, batch["y"]) + 0.1 * (logs.exp() * logs).sum()


def image(model, batch):
    logits = model(batch["x"]).view(2, 3, VOCAB).transpose(1, 2)
    return F.cross_entropy(logits, batch["y"].view(2, 3))


@pytest.mark.parametrize(
    ("loss_fn", "changed"),
    [
        (plain, 1), (without_rows, 1), (with_z_loss, 1), (read_after, 1), (kept_in_a_buffer, 1), (of_a_slice, 1),
        (transposed, 1), (scaled, 1), (scaled_by_what_is_written_before, 1), (sliding_targets, 1),
        (logits_written_before, 1), (two_losses, 3), (smoothed, 1), (weighted, 1), (for_each_row, 1), (squared, 1),
        (scaled_by_what_is_written_later, 1), (entropy_too, 1), (image, 1),
    ],
)  # fmt: skip
def test_rewritten(loss_fn, changed):
    report = check(Head(), loss_fn, batch_of_classes(), changed)
    assert not report.notes


@pytest.mark.parametrize("loss_fn", [read_after, kept_in_a_buffer, of_a_slice, transposed])
def test_logits_that_others_read_are_copied(tools, loss_fn):
    step = tools.trace(Head(), loss_fn, batch_of_classes())
    run_passes(step, [FUSE])
    (node,) = step.graph.find_nodes(op="call_function", target=OPERATOR)
    assert node.args[0].target is aten.clone.default and node.args[0].meta["val"].is_contiguous()


def logits_written_after_the_softmax(model, batch):
    logits = model(batch["x"])
    logs = logits.log_softmax(1)
    logits.zero_()
    return F.nll_loss(logs, batch["y"])


def in_float64(model, batch):
    return F.cross_entropy(model(batch["x"]).double(), batch["y"])


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (logits_written_after_the_softmax, "its logits are overwritten before it"),
        (in_float64, "logits of 2 dimensions in torch.float64"),
    ],
)
def test_left_as_it_is(loss_fn, why):
    report = check(Head(), loss_fn, batch_of_classes(), 0, tolerance=0)
    (note,) = report.notes
    assert note.startswith("_log_softmax") and note.endswith(f"is left unchanged: {why}")
    assert report.summary.startswith("0 of 1 cross entropies")


def by_autocast(model, batch):
    """What ``F.cross_entropy`` of logits in bf16 becomes under autocast on a GPU, as in minGPT and nanoGPT."""
    return F.nll_loss(F.log_softmax(model(batch["x"]), -1).float(), batch["y"])


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_a_cast_between_softmax_and_loss(rows):
    batch = {name: value[:rows] for name, value in batch_of_classes(torch.bfloat16).items()}
    check(Head(torch.bfloat16), by_autocast, batch, 1, tolerance=2e-2)


def smoothed_by_autocast(model, batch):
    logs, seen = F.log_softmax(model(batch["x"]), -1), batch["y"] != -100
    smooth = -(logs.sum(-1, dtype=torch.float32) * seen).sum() / seen.sum() / VOCAB
    return 0.9 * F.nll_loss(logs.float(), batch["y"]) + 0.1 * smooth


def weighted_by_autocast(model, batch):
    logs = F.log_softmax(model(batch["x"]), -1).float()
    return F.nll_loss(logs, batch["y"], torch.arange(1.0, VOCAB + 1))


@pytest.mark.parametrize("loss_fn", [smoothed_by_autocast, weighted_by_autocast])
def test_classes_with_a_cast_between(loss_fn):
    check(Head(torch.bfloat16), loss_fn, batch_of_classes(torch.bfloat16), 1, tolerance=2e-2)


def with_probabilities_by_autocast(model, batch):
    logs = F.log_softmax(model(batch["x"]), -1)
    return F.nll_loss(logs.float(), batch["y"]) + logs.float().square().mean()


def test_a_cast_that_others_read_too():
    check(Head(torch.bfloat16), with_probabilities_by_autocast, batch_of_classes(torch.bfloat16), 0, tolerance=2e-2)


def capped(form):
    def loss_fn(model, batch):
        logits = model(batch["x"])
        if form == "cast before":
            logits = logits.float()
        inner = logits * 0.5 if form == "a factor" else logits / 2
        logits = torch.tanh(inner) * (3 if form == "another factor" else 2)
        if form == "reshaped":
            logits = logits.view(2, -1, VOCAB)
        loss = F.cross_entropy(logits.float().view(-1, VOCAB), batch["y"])
        return loss + 0.1 * logits.square().mean() if form == "read elsewhere" else loss

    return loss_fn


@pytest.mark.parametrize("form", ["plain", "a factor", "reshaped", "cast before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_soft_cap_is_computed_in_the_kernel(form, dtype):
    torch.manual_seed(0)
    model, batch = Head(dtype), batch_of_classes(dtype)
    check(model, capped(form), batch, changed=1, tolerance=1e-6 if dtype == torch.float32 else 2e-2)
    step = stepgraph.capture(model, capped(form), batch, passes=[FUSE])
    (loss,) = (node for node in step.graph.graph.nodes if node.target is OPERATOR)
    assert loss.args[5:] == (False, 2.0) and loss.args[0].meta["val"].dtype == dtype
    assert not any(
        node.target is aten.tanh.default and node.meta["val"].shape[-1] == VOCAB for node in step.graph.graph.nodes
    )


@pytest.mark.parametrize("form", ["another factor", "read elsewhere"])
def test_what_is_no_soft_cap_or_read_elsewhere_stays(form):
    torch.manual_seed(0)
    model, batch = Head(), batch_of_classes()
    check(model, capped(form), batch, changed=1)
    step = stepgraph.capture(model, capped(form), batch, passes=[FUSE])
    assert [node.args[5:] for node in step.graph.graph.nodes if node.target is OPERATOR] in ([(False, 0.0)], [])


def test_no_loss(tools):
    step = tools.trace(tools.Tower(p=0.0), tools.mse, tools.vectors(6, 12)[0])
    (report,) = run_passes(step, [FUSE])
    assert report.matched == 0 and "found nothing to do" in report.line()


def test_a_loss_in_bf16_stays_in_bf16():
    """Computed in fp32 all the same, so closer to the truth than eager's."""
    model, batch = Head(torch.bfloat16), batch_of_classes(torch.bfloat16)
    loss, grads, _, report = gradients(model, plain, batch, [FUSE])
    assert report.changed == 1 and loss.dtype == torch.bfloat16
    wide = copy.deepcopy(model).double()
    truth = plain(wide, {"x": batch["x"].double(), "y": batch["y"]})
    truth.backward()
    torch.testing.assert_close(loss.double(), truth.detach(), rtol=2**-7, atol=0)
    for name, param in wide.named_parameters():
        torch.testing.assert_close(grads[name].double(), param.grad, rtol=2e-2, atol=2e-3)


def test_accumulated_microbatches():
    batch = batch_of_classes()
    report = check(Head(), plain, batch, 1, accumulate=2)
    assert report.summary.startswith("1 of 1 cross entropies")


def test_needs_a_gpu_by_default(tools):
    step = tools.trace(Head(), plain, batch_of_classes())
    with pytest.raises(ValueError, match="pass fuse_loss cannot run: the step has no CUDA tensors"):
        run_passes(step, ["fuse_loss"])
