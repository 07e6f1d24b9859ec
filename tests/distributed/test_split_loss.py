"""`fuse_loss` where ranks share the vocabulary: the same loss and gradients with two operators over the logits."""

from dataclasses import replace

import pytest
import torch

import stepgraph
from stepgraph.capture import trace_step
from stepgraph.costs.memory import estimate_memory
from stepgraph.kernels.loss.split import softmax_parts, split_gradient_
from stepgraph.parallel import MeshSpec, cross_entropy, next_token_loss
from stepgraph.passes import configured, get, run_passes
from tests.distributed.ranks import BATCH, SEQ, TINY, in_fake_world, make_mesh, on_ranks, own_batch, parallel_model

FUSE = replace(get("fuse_loss"), needs_cuda=False)
EXACT = configured("exact", cuda_graph=False)
PARTS = 2  # microbatches


def calls(graph, operator):
    return graph.find_nodes(op="call_function", target=operator._opoverload)


def trained(mesh, loss_fn, passes, **options):
    """(loss, gradients by name, captured step) of one step on every rank."""
    model = parallel_model(mesh, **options)
    batch = own_batch(mesh, 0, PARTS * BATCH)
    step = stepgraph.capture(model, loss_fn, batch, passes=passes, accumulate=PARTS)
    loss = step(batch)
    return loss, {name: param.grad.to_local() for name, param in model.named_parameters()}, step


def check(text):
    mesh = make_mesh(text)
    loss_fn = next_token_loss(mesh)
    # bf16: a gradient of a logit is rounded once either way, from sums in another order: one unit in the last place.
    for options, tolerance in (({}, 1e-6), ({"param_dtype": torch.bfloat16}, 2e-2)):
        expected = trained(mesh, loss_fn, "exact", **options)
        loss, grads, step = trained(mesh, loss_fn, [*EXACT, FUSE], **options)
        report = next(report for report in step.report if report.name == "fuse_loss")
        assert (report.matched, report.changed, report.notes) == (1, 1, [])
        torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)
        for name, grad in expected[1].items():
            scale = grad.abs().max().item()
            torch.testing.assert_close(grads[name], grad, rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("text", ["tp=2", pytest.param("fsdp=2,tp=2", marks=pytest.mark.long)])
def test_loss_and_gradients_stay(text):
    on_ranks(MeshSpec.parse(text).size, check, text)


def rewritten(mesh, loss_fn, **options):
    """The graph before and after: (peak bytes before, step after, report)."""
    traced = trace_step(parallel_model(mesh, **options), loss_fn, own_batch(mesh, 0))
    run_passes(traced.step, EXACT)
    before = estimate_memory(traced.step.graph).peak
    report = next(report for report in run_passes(traced.step, [FUSE]) if report.name == "fuse_loss")
    return before, traced.step, report


def check_memory():
    """No fp32 tensor of the logits' size is left, and no second one of theirs."""
    mesh = make_mesh("tp=2")
    before, step, report = rewritten(mesh, next_token_loss(mesh), param_dtype=torch.bfloat16)
    size = BATCH * SEQ * TINY.vocab_size // 2
    large = [n for n in step.graph.nodes if n.op == "call_function"
             and isinstance(v := n.meta.get("val"), torch.Tensor) and v.numel() == size]  # fmt: skip
    assert {n.meta["val"].dtype for n in large} == {torch.bfloat16}
    (gradient,) = calls(step.graph, split_gradient_)
    (parts,) = calls(step.graph, softmax_parts)
    assert gradient.args[0] is parts.args[0], gradient.args[0].format_node()
    assert "1 of 1 cross entropies" in report.summary
    assert before - estimate_memory(step.graph).peak >= 2 * 4 * size, "two fp32 tensors lay beside the logits"


def read_after(mesh):
    """A loss that reads the logits once more."""

    def loss_fn(model, batch):
        logits = model(batch["tokens"]).flatten(0, 1)
        return cross_entropy(logits, batch["targets"].flatten(), mesh.axis("tp")) + logits.tanh().mean()

    return loss_fn


def check_readers():
    """Logits that others read keep their values."""
    mesh = make_mesh("tp=2")

    def squared(model, batch):
        return next_token_loss(mesh)(model, batch) ** 2

    for loss_fn in (read_after(mesh), squared):
        expected = trained(mesh, loss_fn, "exact")
        loss, grads, _ = trained(mesh, loss_fn, [*EXACT, FUSE])
        torch.testing.assert_close(loss, expected[0])
        for name, grad in expected[1].items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def check_graphs():
    """Logits that others read are copied; what is not this loss stays as it is."""
    mesh = make_mesh("tp=2")
    tp = mesh.axis("tp")
    _, step, _ = rewritten(mesh, read_after(mesh))
    (gradient,) = calls(step.graph, split_gradient_)
    assert gradient.args[0].target is torch.ops.aten.clone.default

    def smoothed(model, batch):
        """The gradient has another term."""
        logits = model(batch["tokens"]).flatten(0, 1)
        loss = cross_entropy(logits, batch["targets"].flatten(), tp)
        return loss + logits.float().logsumexp(1).square().mean()

    _, step, report = rewritten(mesh, smoothed)
    assert report.changed == 1, "the loss itself is the same, and its gradient is added to the other"

    _, step, report = rewritten(mesh, lambda m, b: m(b["tokens"]).float().amax(2).mean())
    assert report.matched == 0 and "no cross entropy" in report.summary


def test_memory_and_what_is_rewritten():
    in_fake_world(1, 2, check_all_of, (check_memory, check_graphs))


def test_readers_and_recomputation():
    on_ranks(2, check_all_of, (check_readers, check_recomputed))


def check_all_of(checks):
    for each in checks:
        each()


def check_recomputed():
    mesh = make_mesh("tp=2")
    loss_fn = next_token_loss(mesh)
    expected = trained(mesh, loss_fn, "exact")
    loss, grads, step = trained(mesh, loss_fn, [*configured("exact", memory="selective", cuda_graph=False), FUSE])
    assert next(report for report in step.report if report.name == "fuse_loss").changed == 1
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)
    for name, grad in expected[1].items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6, msg=name)
