"""The loss of ranks that share the vocabulary, and `fuse_loss`, which writes its gradient over the logits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph.capture import trace_step
from stepgraph.costs.memory import estimate_memory
from stepgraph.kernels.loss.tokens import token_gradient_, token_stats
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
    """The pass moves the gradient, and changes no bit."""
    mesh = make_mesh(text)
    loss_fn = next_token_loss(mesh)
    for options in ({}, {"param_dtype": torch.bfloat16}):
        expected, whole, _ = trained(mesh, loss_fn, "exact", **options)
        loss, grads, step = trained(mesh, loss_fn, [*EXACT, FUSE], **options)
        report = next(report for report in step.report if report.name == "fuse_loss")
        assert (report.matched, report.changed, report.notes) == (1, 1, [])
        assert torch.equal(loss, expected)
        assert all(torch.equal(grads[name], grad) for name, grad in whole.items())


@pytest.mark.parametrize("text", ["tp=2", pytest.param("fsdp=2,tp=2", marks=pytest.mark.long)])
def test_loss_and_gradients_stay(text):
    on_ranks(MeshSpec.parse(text).size, check, text)


def check_against_whole():
    """Each rank has its columns of what ``F.cross_entropy`` gives for all logits."""
    mesh = make_mesh("tp=2")
    place, torch_dtypes = mesh.axis("tp").get_local_rank(), ((torch.float32, 1e-6), (torch.bfloat16, 8e-3))
    for dtype, tolerance in torch_dtypes:
        torch.manual_seed(0)
        whole = (3 * torch.randn(10, 14)).to(dtype).requires_grad_()
        targets = torch.tensor([0, 6, 7, 13, -100, 3, 9, -100, 12, 1])
        expected = F.cross_entropy(whole.float(), targets)
        expected.backward(torch.tensor(2.0))
        own = whole.detach().chunk(2, 1)[place].clone().requires_grad_()
        loss = cross_entropy(own, targets, mesh.axis("tp"))
        loss.backward(torch.tensor(2.0))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(own.grad, whole.grad.chunk(2, 1)[place], rtol=tolerance, atol=1e-7)
        assert torch.equal(own, whole.detach().chunk(2, 1)[place]), "logits keep their values in eager"


def rewritten(mesh, loss_fn, **options):
    """The graph before and after: (peak bytes before, step after, report)."""
    traced = trace_step(parallel_model(mesh, **options), loss_fn, own_batch(mesh, 0))
    run_passes(traced.step, EXACT)
    before = estimate_memory(traced.step.graph).peak
    report = next(report for report in run_passes(traced.step, [FUSE]) if report.name == "fuse_loss")
    return before, traced.step, report


def check_memory():
    """There is no fp32 tensor of the logits' size, and no second one of theirs."""
    mesh = make_mesh("tp=2")
    before, step, report = rewritten(mesh, next_token_loss(mesh), param_dtype=torch.bfloat16)
    size = BATCH * SEQ * TINY.vocab_size // 2
    large = [n for n in step.graph.nodes if n.op == "call_function"
             and isinstance(v := n.meta.get("val"), torch.Tensor) and v.numel() == size]  # fmt: skip
    assert {n.meta["val"].dtype for n in large} == {torch.bfloat16}
    (gradient,) = calls(step.graph, token_gradient_)
    (stats,) = calls(step.graph, token_stats)
    assert gradient.args[0] is stats.args[0], gradient.args[0].format_node()
    assert "1 of 1 cross entropies" in report.summary
    assert estimate_memory(step.graph).peak <= before


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
        assert torch.equal(loss, expected[0])
        assert all(torch.equal(grads[name], grad) for name, grad in expected[1].items())


def check_graphs():
    """Logits that others read later are copied; what is not this loss stays as it is."""
    mesh = make_mesh("tp=2")
    tp = mesh.axis("tp")

    def read_before(model, batch):
        """Its gradient reads no logits."""
        logits = model(batch["tokens"]).flatten(0, 1)
        return cross_entropy(logits, batch["targets"].flatten(), tp) + logits.mean()

    for loss_fn, copied in ((read_after(mesh), False), (read_before, False)):
        _, step, report = rewritten(mesh, loss_fn)
        (gradient,) = calls(step.graph, token_gradient_)
        assert (gradient.args[0].target is torch.ops.aten.clone.default) == copied, loss_fn
        assert report.changed == (not copied), report

    _, step, report = rewritten(mesh, lambda m, b: m(b["tokens"]).float().amax(2).mean())
    assert report.matched == 0 and "no cross entropy" in report.summary


def test_memory_and_what_is_rewritten():
    in_fake_world(1, 2, check_all_of, (check_memory, check_graphs))


def test_readers_and_recomputation():
    on_ranks(2, check_all_of, (check_against_whole, check_readers, check_recomputed))


def check_all_of(checks):
    for each in checks:
        each()


def check_recomputed():
    mesh = make_mesh("tp=2")
    loss_fn = next_token_loss(mesh)
    expected = trained(mesh, loss_fn, "exact")
    loss, grads, step = trained(mesh, loss_fn, [*configured("exact", memory="selective", cuda_graph=False), FUSE])
    assert next(report for report in step.report if report.name == "fuse_loss").changed == 1
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(grads[name], grad) for name, grad in expected[1].items())
