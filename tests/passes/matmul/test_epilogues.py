"""Activations in the products before them: the values, what is left alone, which are chosen and why, and the calls."""

import dataclasses
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.capture import StepGraph
from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec
from stepgraph.graph.values import Metric, Parameter
from stepgraph.kernels import gated, gelu, quack
from stepgraph.passes import StepOptions, chosen, get, run_passes
from stepgraph.passes.contract import Target

aten, ours = torch.ops.aten, torch.ops.stepgraph
MINE = dataclasses.replace(get("product_epilogues"), needs_cuda=False)


class Block(nn.Module):
    """Two products with ``act`` between them, and what comes in."""

    def __init__(self, act, bias, dtype):
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, bias=bias, dtype=dtype) for sizes in ((16, 32), (32, 16)))
        self.act = act

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Tower(nn.Module):
    def __init__(self, act, bias=True, dtype=torch.float32, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block(act, bias, dtype) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def captured(model, x, monkeypatch, *passes, before=(), autocast=False):
    """The captured step with the pass and ``passes``, what it gives, its loss and gradients, and eager's."""

    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float().square().mean()

    loss = loss_fn(model, x)
    loss.backward()
    expected = [loss.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(gelu, "on_device", lambda x: True)  # while passes look at the graph
        patch.setattr(quack, "unavailable", lambda: None)
        step = stepgraph.capture(model, loss_fn, x, passes=[*before, MINE, *passes])
    found = [step(x).clone(), *(p.grad for p in model.parameters())]
    return step, found, expected


def targets(step):
    return [node.target for node in step.graph.graph.nodes]


def report(step):
    return next(r for r in step.report if r.name == "product_epilogues")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(8, 16), (2, 4, 16)])
def test_values_and_gradients(shape, approximate, bias, monkeypatch):
    torch.manual_seed(0)
    model = Tower(lambda x: F.gelu(x, approximate=approximate), bias)
    step, found, expected = captured(model, torch.randn(shape), monkeypatch)
    assert report(step).matched == report(step).changed == 4
    assert report(step).summary == "4 of 4 activations and gradients inside QuACK's products"
    left = targets(step)
    assert left.count(ours.gelu_product.default) == left.count(ours.gelu_product_backward.default) == 2
    assert aten.gelu.default not in left and aten.gelu_backward.default not in left
    assert left.count(aten.sum.dim_IntList) == (2 if bias else 0)  # those of the second products' biases
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16(autocast, monkeypatch):
    """The reference rounds as eager does; the bias's gradient alone is summed in fp32 and rounded once."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16, dtype=torch.float32 if autocast else torch.bfloat16)
    model = Tower(F.gelu, dtype=x.dtype)
    step, found, expected = captured(model, x, monkeypatch, autocast=autocast)
    assert report(step).changed == 4
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4)


def test_inductor_takes_the_operators(monkeypatch):
    torch.manual_seed(0)
    step, found, expected = captured(Tower(F.gelu), torch.randn(2, 4, 16), monkeypatch, get("inductor"))
    assert report(step).changed == 4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_recomputed_in_backward(monkeypatch):
    """What is computed again in backward is matched there too."""
    torch.manual_seed(0)
    recompute = get("recompute", policy="full")
    step, found, expected = captured(Tower(F.gelu), torch.randn(2, 4, 16), monkeypatch, before=[recompute])
    assert targets(step).count(ours.gelu_product.default) == 4 and report(step).changed == 6
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gelu_alone_computed_again(monkeypatch):
    """The product stays kept, and what forward made of it is not."""
    torch.manual_seed(0)
    recompute = get("recompute", policy="selective")
    step, found, expected = captured(Tower(F.gelu), torch.randn(2, 4, 16), monkeypatch, before=[recompute])
    left = targets(step)
    assert left.count(ours.gelu_product.default) == 2 and left.count(aten.gelu.default) == 2
    assert left.count(ours.gelu_product_backward.default) == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def square_of_gradient(x):
    """GELU whose gradient is multiplied, so that something else reads it."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return F.gelu(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return aten.gelu_backward(grad, x) * grad

    return Own.apply(x)


#: What stands between the products, and how many of the two are in products forward and backward.
LEFT = {
    "written before GELU": (lambda x: F.gelu(x.mul_(2)), 0, 2),
    "its gradient is read": (square_of_gradient, 2, 0),
    "not after a product": (lambda x: F.gelu(x * 2) * 2, 0, 0),
    "read by more than products": (lambda x: F.gelu(x) * 2, 0, 0),
    "another activation": (F.silu, 0, 0),
    "transposed": (lambda x: F.gelu(x.mT).mT, 0, 0),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name, monkeypatch):
    torch.manual_seed(0)
    act, forward, backward = LEFT[name]
    step, found, expected = captured(Tower(act), torch.randn(8, 16), monkeypatch)
    left = targets(step)
    assert left.count(ours.gelu_product.default) == forward
    assert left.count(ours.gelu_product_backward.default) == backward
    assert left.count(aten.gelu.default) == (0 if act is F.silu else 2 - forward)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Gated(nn.Module):
    """``down(act(gate) * up)``, with the factors in the order that is asked for."""

    def __init__(self, act, up_first=False, dtype=torch.float32):
        super().__init__()
        sizes = (16, 32), (16, 32), (32, 16)
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False, dtype=dtype) for size in sizes)
        self.act, self.up_first = act, up_first

    def forward(self, x):
        a = self.act(self.gate(x))
        return x + self.down(self.up(x) * a if self.up_first else a * self.up(x))


GATES = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("shape", [(8, 16), (2, 4, 16)])
@pytest.mark.parametrize("activation", GATES)
def test_gated(activation, shape, autocast, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(GATES[activation], up_first) for up_first in (False, True)))
    step, found, expected = captured(model, torch.randn(shape), monkeypatch, autocast=autocast)
    assert report(step).summary == "4 of 4 activations and gradients inside QuACK's products"
    left = targets(step)
    assert left.count(ours.gated_product.default) == left.count(ours.gated_product_backward.default) == 2
    assert not {aten.silu.default, aten.gelu.default, aten.silu_backward.default} & set(left)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 if not autocast else 1e-3)


@pytest.mark.parametrize(("policy", "forward"), [("full", 4), ("selective", 2)])
def test_gated_computed_again(policy, forward, monkeypatch):
    torch.manual_seed(0)
    model = Tower(F.silu, False, block=Gated)
    step, found, expected = captured(
        model, torch.randn(8, 16), monkeypatch, get("inductor"), before=[get("recompute", policy=policy)]
    )
    assert report(step).matched == report(step).changed == 2 + forward
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def without_first(gate, up, a):
    a[:, 0] = 0
    return a * up


def gated_by(change):
    """A gated layer whose gate, result of ``up`` and activated gate ``change`` gets, and gives the product."""

    class Changed(Gated):
        def forward(self, x):
            gate, up = self.gate(x), self.up(x)
            return x + self.down(change(gate, up, F.silu(gate)))

    return Changed(F.silu)


#: What stands between the products, and how many of the two are in products forward and backward.
LEFT_GATED = {
    "read by more than products": (lambda gate, up, a: (a * up).exp(), 0, 0),
    "another activation": (lambda gate, up, a: F.gelu(gate) * up, 0, 0),
    "not a product": (lambda gate, up, a: a * up.exp(), 0, 1),
    "its gate alone": (lambda gate, up, a: a * 2, 0, 0),
    "broadcast": (lambda gate, up, a: a[:1] * up, 0, 0),
    "the gate comes later": (lambda gate, up, a: F.silu(up) * gate, 1, 1),
    "read before the gate": (lambda gate, up, a: F.silu(up + gate) * gate, 0, 1),
    "gates itself": (lambda gate, up, a: F.silu(up) * up, 0, 1),
    "the activated gate is written": (without_first, 0, 0),
    "read twice": (lambda gate, up, a: a * up + 0 * a, 1, 0),  # the gradient of up is of the form of forward
}


@pytest.mark.parametrize("name", LEFT_GATED)
def test_gated_left_alone(name, monkeypatch):
    torch.manual_seed(0)
    change, forward, backward = LEFT_GATED[name]
    step, found, expected = captured(gated_by(change), torch.randn(8, 16), monkeypatch)
    left = targets(step)
    assert (left.count(ours.gated_product.default), left.count(ours.gated_product_backward.default)) == (
        forward,
        backward,
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gated_activations_by_name():
    x = torch.randn(4, 4)
    with pytest.raises(ValueError, match="got the activation 'relu'; allowed are 'silu' and 'gelu_tanh'"):
        gated.gated_product(x, x, x, "relu")


def pairs(M=16384, K=768, N=3072, dtype=torch.bfloat16, approximate="tanh"):
    """A step of a product with GELU and of its gradient, on a fake GPU."""

    def program(x, weight, dy, down):
        z = x @ weight.t()
        a, dz = aten.gelu(z, approximate=approximate), aten.gelu_backward(dy @ down, z, approximate=approximate)
        return a @ down.t(), dz

    with FakeTensorMode():
        given = [torch.empty(s, dtype=dtype, device="cuda") for s in ((M, K), (N, K), (M, K), (K, N))]
        module = make_fx(program)(*given)
    for node in module.graph.nodes:
        if node.op == "call_function":
            set_provenance(node, Provenance("layers.0.mlp", "forward", "model.py:1"))
    inputs = [InputSpec(Parameter(name)) for name in ("x", "weight", "dy", "down")]
    return StepGraph(module, inputs, [Metric(str(i)) for i in range(2)])


def gated_pairs(M=16384, K=2048, N=8192):
    """A step of a gated activation and its gradient, on a fake GPU."""

    def program(x, w_gate, w_up, dy, down):
        gate, up = x @ w_gate.t(), x @ w_up.t()
        da = dy @ down
        act = F.gelu(gate, approximate="tanh")
        dg, du = aten.gelu_backward(da * up, gate, approximate="tanh"), da * act
        return (act * up) @ down.t(), dg @ w_gate, du @ w_up

    with FakeTensorMode():
        shapes = (M, K), (N, K), (N, K), (M, K), (K, N)
        module = make_fx(program)(*(torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes))
    for node in module.graph.nodes:
        if node.op == "call_function":
            set_provenance(node, Provenance("layers.0.mlp", "forward", "model.py:1"))
    names = ("x", "w_gate", "w_up", "dy", "down")
    return StepGraph(module, [InputSpec(Parameter(n)) for n in names], [Metric(str(i)) for i in range(3)])


def run(step, backend, capability=(9, 0)):
    target = Target("cuda", capability=capability)
    (found,) = run_passes(step, [get("product_epilogues", backend=backend)], target=target)
    return found


@pytest.mark.parametrize(
    ("sizes", "capability", "installed", "changed", "why"),
    [
        ({}, (9, 0), True, 2, "by QuACK, faster on one H200 (benchmarks/README.md)"),
        ({"K": 1024, "N": 4096}, (9, 0), True, 2, "by QuACK, faster on one H200 (benchmarks/README.md)"),
        ({"M": 16383}, (9, 0), True, 0, "not measured to be faster"),
        ({"K": 760}, (9, 0), True, 0, "not measured to be faster"),
        ({"K": 2048}, (9, 0), True, 0, "not measured to be faster"),
        ({"N": 3000}, (9, 0), True, 0, "not measured to be faster"),
        ({"N": 3074}, (9, 0), True, 0, "not in bf16, or K or N is no multiple of 8"),
        ({"dtype": torch.float32}, (9, 0), True, 0, "not in bf16, or K or N is no multiple of 8"),
        ({}, (10, 0), True, 0, "measured only on compute capability 9.0"),
        ({}, (9, 0), False, 0, "quack-kernels is not installed"),
    ],
)
def test_auto_says_what_it_chose_and_why(sizes, capability, installed, changed, why, monkeypatch):
    monkeypatch.setattr(quack, "unavailable", lambda: None if installed else "quack-kernels is not installed")
    found = run(pairs(**sizes), "auto", capability)
    assert found.summary == f"{changed} of 2 activations and gradients inside QuACK's products"
    M, K, N = (({"M": 16384, "K": 768, "N": 3072} | sizes)[size] for size in "MKN")
    assert found.notes == [
        f"GELU by tanh, {M} x {K} x {N} (1): {why}",
        f"gradient of GELU by tanh, {M} x {K} x {N} (1): {why}",
    ]


def test_auto_leaves_the_gradient_of_exact_gelu(monkeypatch):
    monkeypatch.setattr(quack, "unavailable", lambda: None)
    found = run(pairs(approximate="none"), "auto")
    assert found.changed == 1 and found.notes == [
        "GELU, 16384 x 768 x 3072 (1): by QuACK, faster on one H200 (benchmarks/README.md)",
        "gradient of GELU, 16384 x 768 x 3072 (1): not measured to be faster",
    ]


@pytest.mark.parametrize(
    ("sizes", "backend", "why"),
    [
        ({"M": 512}, "quack", "by QuACK, asked for"),
        *(({"M": M, "K": K, "N": N}, "auto", "by QuACK, faster on one H200 (benchmarks/README.md)")
          for M, K, N in ((16384, 2048, 8192), (16384, 1024, 3072), (8192, 4096, 14336), (8192, 2304, 9216))),
        *(({"M": M, "K": K, "N": N}, "auto", "not measured to be faster")
          for M, K, N in ((8192, 1024, 3072), (16384, 768, 3072), (8192, 5120, 14336))),
    ],
)  # fmt: skip
def test_which_gated_activations(sizes, backend, why, monkeypatch):
    monkeypatch.setattr(quack, "unavailable", lambda: None)
    found = run(gated_pairs(**sizes), backend)
    assert found.changed == (2 if why.startswith("by") else 0)
    M, K, N = (({"M": 16384, "K": 2048, "N": 8192} | sizes)[size] for size in "MKN")
    assert found.notes == [f"{what}gated activation, {M} x {K} x {N} (1): {why}" for what in ("", "gradient of a ")]


def test_asked_for_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr(quack, "unavailable", lambda: "quack-kernels is not installed")
    with pytest.raises(ValueError, match=r"^epilogues=quack: quack-kernels is not installed; use epilogues=torch or"):
        run(pairs(), "quack")
    with pytest.raises(ValueError, match=r"^epilogues=quack: none is in bf16 on a GPU; use epilogues=torch or"):
        run(pairs(dtype=torch.float32), "quack")
    with pytest.raises(ValueError, match=r"not installed: pip install quack-kernels, or choose epilogues=torch"):
        quack.gelu_product(*[torch.zeros(1)] * 3, "none")


def test_what_the_package_is_called_with(monkeypatch):
    """In the place of QuACK's, a package that computes by the reference."""
    kinds = {"gelu_erf": "none", "gelu_tanh_approx": "tanh"}
    given = []

    def gemm_act(a, b, *, bias, activation, tuned, config):
        assert not tuned
        given.append(config)
        return gelu.gelu_product(a, b, bias, kinds[activation])

    def dact_dbias_mod(activation):
        def call(a, b, c, *, config):
            given.append(config)
            return dict(zip(("D", "dwb"), gelu.gelu_product_backward(a, b, c, kinds[activation]), strict=True))

        return call

    monkeypatch.setattr(quack.PACKAGE, "load", lambda: types.SimpleNamespace(gemm_act=gemm_act))
    fakes = {
        "quack": types.ModuleType("quack"),
        "quack.epilogue": types.ModuleType("quack.epilogue"),
        "quack.epilogue.library": types.SimpleNamespace(dact_dbias_mod=dact_dbias_mod),
        "quack.gemm_config": types.SimpleNamespace(GemmConfig=lambda **fields: types.SimpleNamespace(**fields)),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    quack._tiles.cache_clear()
    try:
        x, weight, bias, dy, down, z = (torch.randn(s) for s in ((6, 8), (16, 8), (16,), (6, 8), (8, 16), (6, 16)))
        for approximate in ("none", "tanh"):
            for b in (bias, None):
                mine = quack.gelu_product(x, weight.t(), b, approximate)
                right = F.linear(x, weight, b)
                torch.testing.assert_close(mine, (right, F.gelu(right, approximate=approximate)))
            mine = quack.gelu_product_backward(dy, down, z, approximate)
            dz = aten.gelu_backward(dy @ down, z, approximate=approximate)
            torch.testing.assert_close(mine, (dz, dz.sum(0)))
        assert len({id(config) for config in given}) == 1 and (given[0].tile_m, given[0].tile_n) == (128, 128)
    finally:
        quack._tiles.cache_clear()


def test_options():
    def names(*args, **options):
        return {p.name for p in chosen(StepOptions(*args, **options))}

    assert "product_epilogues" in names(epilogues="auto") & names(epilogues="quack")
    assert "product_epilogues" not in names() | names("exact")
