"""Optimizers whose state is a tensor subclass: the graph has the plain tensors inside it."""

import pytest
import torch
from torch import nn

import stepgraph
from tests.capture.own_optimizers import Written


class Halved(torch.Tensor):
    """A tensor as int8 codes and one scale, with a table that only its values say is one: rounds what is copied in."""

    @staticmethod
    def __new__(cls, codes, scale, table, label):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale, table, label):
        self.codes, self.scale, self.table, self.label = codes, scale, table, label

    def __tensor_flatten__(self):
        return ["codes", "scale", "table"], self.label

    @classmethod
    def __tensor_unflatten__(cls, parts, label, size, stride):
        return cls(parts["codes"], parts["scale"], parts["table"], label)

    @classmethod
    def of(cls, x):
        steps = torch.linspace(0, 1, 3).tolist()  # as torchao makes its tables
        made = cls(torch.zeros_like(x, dtype=torch.int8), torch.zeros(1), torch.tensor([2 * s for s in steps]), "of")
        made.copy_(x)
        return made

    def plain(self):
        return self.codes.float() * (self.scale * self.table[1])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        match func:
            case torch.ops.aten.copy_.default:
                scale = args[1].abs().amax() / 100
                args[0].codes.copy_((args[1] / (scale + 1e-12)).round())
                args[0].scale.copy_(scale.view(1))
                return args[0]
            case torch.ops.aten.detach.default:
                return cls(*(getattr(args[0], name) for name in ("codes", "scale", "table")), args[0].label)
        raise NotImplementedError(func)


class InPlace(Written):
    """Made of zeros, written in place."""

    def update(self, p, grad, state, group):
        if not state:
            state["step"], state["m"] = torch.tensor(0.0), Halved.of(torch.zeros_like(p))
        state["step"] += 1
        m = state["m"].plain().lerp(grad, 0.1)
        state["m"].copy_(m)
        p.sub_(group["lr"] * m / (1 - 0.9 ** state["step"]))


class Replaced(Written):
    """Another object in every step, the first of which makes it from the gradient."""

    def update(self, p, grad, state, group):
        m = 0.9 * state["m"].plain() + grad if "m" in state else grad
        state["m"] = Halved.of(m)
        p.sub_(group["lr"] * m)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4, bias=False))


def loss_fn(model, x):
    return model(x).square().mean()


def inside(optimizer):
    return [getattr(value, name) for state in optimizer.state.values() for value in state.values()
            if type(value) is not torch.Tensor for name in value.__tensor_flatten__()[0]]  # fmt: skip


def compare(kind, tmp_path=None, **options):
    """Four captured steps and eager ones, as written: bit for bit, in what is inside the state too."""
    (eager, captured), data = (build(), build()), [torch.randn(4, 64) for _ in range(4)]
    theirs, ours = (kind(model.parameters(), lr=0.01) for model in (eager, captured))
    step = stepgraph.capture(captured, loss_fn, data[0], ours, max_grad_norm=0.1, passes="exact", **options)
    for x in data:
        for one in (theirs, ours):
            one.param_groups[0]["lr"] *= 0.9
        loss = loss_fn(eager, x)
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
        theirs.zero_grad()
        assert torch.equal(step(x), loss)
        assert all(map(torch.equal, captured.parameters(), eager.parameters()))
        assert inside(ours) and all(map(torch.equal, inside(ours), inside(theirs)))
    assert step.verify(data[0]).bitwise
    return step


@pytest.mark.parametrize("kind", [InPlace, Replaced])
@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "skip"}])
def test_state_is_unwrapped(kind, options):
    step = compare(kind, **options)
    names = [s.what.name for s in step.graph.inputs if s.what.kind == "optimizer" and "m#" in s.what.name]
    assert {name.rpartition("#")[2] for name in names} >= {"0", "1"}


def test_a_step_is_saved(tmp_path):
    assert compare(InPlace, saved=tmp_path).saved.kept
    assert compare(InPlace, saved=tmp_path).saved.loaded


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(name):
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed: pip install torchao")
    compare(getattr(torchao, name))
