"""Frozen linear layers in NF4 and fp8: values, gradients, what autograd keeps, casts, and their state."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.kernels.quant import KINDS, Nf4Linear, quantize_linear
from stepgraph.kernels.quant.linear import _Fp8Product

KIND = pytest.mark.parametrize("kind", KINDS)


def layer(kind, bias=True, dtype=torch.float32, out=48):
    torch.manual_seed(0)
    return KINDS[kind].of(nn.Linear(32, out, bias=bias).to(dtype))


@KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_multiplies_by_the_dequantized_weight_and_keeps_its_bits_alone(kind, dtype):
    linear = layer(kind, dtype=dtype)
    x = torch.randn(2, 3, 32, dtype=dtype, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear(x)
    weight = linear.dequantize(dtype)
    assert torch.equal(y, F.linear(x, weight, linear.bias))
    assert (weight - nn.Linear(32, 48).weight).abs().max() < 1 and linear.dequantize().dtype == dtype
    dy = torch.randn_like(y)
    dx, db = torch.autograd.grad(y, (x, linear.bias), dy)
    assert torch.equal(dx, dy @ weight) and torch.equal(db, dy.flatten(0, 1).sum(0))
    assert kept and all(t.dtype == torch.uint8 or t.numel() < weight.numel() for t in kept)


@KIND
def test_the_weight_is_near(kind):
    torch.manual_seed(0)
    linear = nn.Linear(32, 48)
    near = KINDS[kind].of(linear)
    error = (near.dequantize() - linear.weight).abs().max() / linear.weight.abs().max()
    assert 0 < error < (0.2 if kind == "nf4" else 0.04)


@KIND
def test_autocast_decides_the_dtype(kind):
    linear, x = layer(kind), torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert torch.equal(y, F.linear(x.bfloat16(), linear.dequantize(torch.bfloat16), linear.bias.bfloat16()))


@KIND
def test_a_cast_of_the_module_reaches_its_bias_alone(kind):
    linear = layer(kind)
    weight = linear.dequantize(torch.float32)
    linear.to(torch.bfloat16)
    assert linear.bias.dtype == torch.bfloat16 and torch.equal(linear.dequantize(torch.float32), weight)
    assert not linear.weight.requires_grad


@KIND
def test_its_state_comes_back(kind):
    linear, other = layer(kind), layer(kind)
    linear.weight.data.random_(1, 100)
    with torch.no_grad():
        linear.bias.zero_()
    state = {f"in.{name}": tensor for name, tensor in linear.state_dict().items()}
    nn.ModuleDict({"in": other}).load_state_dict(state)
    assert torch.equal(other.dequantize(), linear.dequantize()) and torch.equal(other.bias, linear.bias)
    with pytest.raises((ValueError, RuntimeError), match=r"needed are absmax|Missing key|use a checkpoint in fp8"):
        other.load_state_dict({"weight": torch.zeros(48, 32), "bias": linear.bias})


def test_state_of_bitsandbytes():
    modules = pytest.importorskip("bitsandbytes.nn")
    torch.manual_seed(0)
    plain = nn.Linear(64, 48)
    theirs = modules.Linear4bit(64, 48, quant_type="nf4", compute_dtype=torch.float32)
    theirs.load_state_dict(plain.state_dict())
    theirs.to("cpu")
    ours = Nf4Linear.of(plain)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 64)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("bias", [True, False])
def test_products_in_fp8(bias):
    """What a GPU with fp8 runs, by the operators' references."""
    linear = layer("fp8", bias=bias, dtype=torch.bfloat16)
    x = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    y = _Fp8Product.apply(x, linear.bias, linear.weight, linear.weight_scale)
    expected = linear(x)
    dy = torch.randn_like(y)
    (dx,), (other,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
    for given, true in ((y, expected), (dx, other)):
        assert given.shape == true.shape and given.dtype == torch.bfloat16
        assert (given - true).float().norm() < 0.06 * true.float().norm()
    assert not torch.equal(y, expected)


@pytest.mark.parametrize("passes", ["exact", "default"])
def test_layers_in_fp8_share_the_cast_of_their_input(passes, monkeypatch):
    """As on a GPU with fp8, by the operators' references."""
    import stepgraph
    from stepgraph.options import StepOptions

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

        def forward(self, x):
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    def product(layer, x, bias):
        return _Fp8Product.apply(x, bias, layer.weight, layer.weight_scale)

    monkeypatch.setattr(KINDS["fp8"], "_product", product)
    torch.manual_seed(0)
    model = Layer().to(torch.bfloat16).requires_grad_(False)
    quantize_linear(model, "fp8")
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16), model)
    optimizer = torch.optim.AdamW(model[0].parameters(), fused=True)
    batch = torch.randn(2, 16, 32, dtype=torch.bfloat16)
    options = StepOptions(passes=passes, inductor="off")
    step = stepgraph.capture(model, lambda m, x: m(x).float().square().mean(), batch, optimizer, passes=options)
    assert "bitwise equal" in str(step.verify(batch))
    names = [str(node.target) for node in step.graph.graph.nodes]
    assert sum("scaled_product" in name for name in names) == 6
    assert sum("cast_scaled_rows" in name for name in names) == 5  # of 6: gate and up share one


def test_which_layers_are_replaced():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.body = nn.Embedding(8, 32), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
            self.tied, self.head = nn.Linear(32, 8, bias=False), nn.Linear(32, 8)
            self.tied.weight = self.table.weight

    model = Model().eval()
    assert quantize_linear(model, "nf4", skip=["head"]) == ["body.0", "body.2"]
    assert type(model.body[0]) is Nf4Linear and not model.body[0].training and type(model.head) is nn.Linear
    with pytest.raises(ValueError, match="no linear layers besides its head"):
        quantize_linear(model, "nf4", skip=["head"])
    with pytest.raises(ValueError, match="choose one of fp8, nf4"):
        quantize_linear(model, "nf5")


@KIND
def test_the_graph_keeps_bits_alone(kind):
    import stepgraph
    from stepgraph.costs.memory import peak_bytes
    from stepgraph.graph.provenance import phase_of

    def step_of(kind):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).to(torch.bfloat16).requires_grad_(False)
        if kind:
            quantize_linear(model, kind)
        model.insert(0, nn.Linear(4, 256, dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW(model[0].parameters(), fused=True)
        batch = torch.randn(8, 4, dtype=torch.bfloat16)
        step = stepgraph.capture(model, lambda m, x: m(x).float().square().mean(), batch, optimizer, passes="exact")
        assert "bitwise equal" in str(step.verify(batch))
        return step

    plain, step = step_of(None), step_of(kind)
    values = {node: node.meta.get("val") for node in step.graph.graph.nodes if node.op == "call_function"}
    form = (256, 256), torch.bfloat16
    whole = [node for node, v in values.items() if isinstance(v, torch.Tensor) and (v.shape, v.dtype) == form]
    assert len({n for n in whole if phase_of(n) == "backward"}) >= 6
    assert all(phase_of(user) == phase_of(node) for node in whole for user in node.users)
    saved = (2 - (0.55 if kind == "nf4" else 1.1)) * 6 * 256 * 256  # bytes of the weights
    assert peak_bytes(step.program) < peak_bytes(plain.program) - saved + 9 * 256 * 256  # one in fp32 and one in bf16
