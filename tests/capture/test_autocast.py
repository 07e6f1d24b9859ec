"""Autocast reaches inside operators whose kernels call others, in a captured step as in eager."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture import autocast
from stepgraph.capture.python import writes
from stepgraph.graph.provenance import provenance


@torch.library.custom_op("stepgraph_test_autocast::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w).float()


@project.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1], dtype=torch.float32)


def project_backward(ctx, g):
    x, w = ctx.saved_tensors
    return g @ w.t(), x.t() @ g


project.register_autograd(
    project_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("stepgraph_test_autocast::project_into", mutates_args=("out",))
def project_into(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.mm(x, w))


@project_into.register_fake
def _(x, w, out):
    return None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bilinear = nn.Linear(6, 6), nn.Bilinear(6, 6, 6)
        self.register_buffer("seen", torch.zeros(6, 6))


def grid(model, h):
    return F.affine_grid(h.view(-1, 2, 3)[:2].contiguous(), (2, 1, 4, 4), align_corners=False)


def into_buffer(model, h):
    project_into(h.detach(), model.linear.weight.detach(), model.seen)
    return h * model.seen


def partly(model, h):
    """Off inside, and on again."""
    y = project(h, model.linear.weight)
    with torch.autocast("cpu", enabled=False):
        y = y + project(h, model.linear.weight)
    with torch.autocast("cpu", torch.float16):
        return y + project(h, y)


FUNCTIONS = {
    "custom": lambda m, h: project(h, m.linear.weight),
    "custom_in_place": into_buffer,
    "bilinear": lambda m, h: m.bilinear(h, h.cos()),
    "affine_grid": grid,
    "partly": partly,
    "checkpoint": lambda m, h: torch.utils.checkpoint.checkpoint(
        lambda h: project(h, m.linear.weight).sin(), h, use_reentrant=False
    ),
    "checkpoint_with_state": lambda m, h: torch.utils.checkpoint.checkpoint(
        lambda h: into_buffer(m, h).sin() * project(h, m.linear.weight), h, use_reentrant=False
    ),
}


@pytest.mark.parametrize("passes", ["exact", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_that_call_others(name, passes):
    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = FUNCTIONS[name](model, x * 0.7 + model.linear.weight)
        return y.float().square().mean() + model.linear.bias.sum() + model.bilinear.bias.sum()

    eager = Model()
    model, x = copy.deepcopy(eager), torch.randn(6, 6)
    loss = loss_fn(eager, x)
    loss.backward()
    step = stepgraph.capture(model, loss_fn, x, passes=passes)
    compare = torch.equal if passes == "exact" else lambda a, b: torch.allclose(a, b, rtol=2e-2, atol=1e-2)
    assert compare(step(x), loss)
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or compare(a.grad, b.grad)
    assert torch.equal(eager.seen, model.seen)


def test_the_name_of_an_operator_says_what_it_calls():
    target = torch.ops.stepgraph_test_autocast.project.default
    made = autocast.under(target, {"cpu": torch.bfloat16})
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    assert made is autocast.named(made._schema.name.partition("::")[2])
    assert torch.equal(made(x, w), (x.bfloat16() @ w.bfloat16()).float())
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(AttributeError):
        autocast.named("cpu_bfloat16__of__stepgraph_no_such__of__operator__of__default")


def test_operators_that_autocast_does_not_reach_stay():
    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model.linear(x).float().softmax(-1).square().mean()

    step = stepgraph.capture(Model(), loss_fn, torch.randn(6, 6), passes=[])
    assert autocast.NAMESPACE not in {getattr(n.target, "namespace", "") for n in step.graph.nodes()}
    assert {provenance(n).source.rpartition(":")[0] for n in step.graph.nodes("forward")} == {__file__}


def test_a_fake_implementation_that_says_another_dtype_is_refused():
    @torch.library.custom_op("stepgraph_test_autocast::untold", mutates_args=())
    def untold(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @untold.register_fake
    def _(x):
        return torch.empty_like(x)

    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model.linear(x).float().square().mean() + untold(x.float()).float().mean()

    step = stepgraph.capture(Model(), loss_fn, torch.randn(6, 6), passes="exact")
    with pytest.raises(
        stepgraph.CaptureError, match=r"untold.default gives torch.bfloat16 under.*implementation gives torch.float32"
    ):
        step(torch.randn(6, 6))


class Entered:
    """A forward under one autocast that is entered at every call, as accelerate wraps it."""

    def __init__(self, forward):
        self.forward, self.autocast = forward, torch.autocast("cpu", torch.bfloat16)

    def __call__(self, *args):
        with self.autocast:
            return self.forward(*args).float()


def test_an_autocast_that_is_entered_again_is_no_change(monkeypatch):
    model = nn.Linear(4, 4)
    model.forward = Entered(model.forward)
    monkeypatch.setattr(writes, "same", lambda *_: False)  # a change would be refused
    batch = {"x": torch.ones(2, 4)}
    step = stepgraph.capture(model, lambda m, b: m(b["x"]).sum(), batch, passes="exact")
    assert step.verify(batch).bitwise and model.forward.autocast.prev is False
