"""Frozen weights of experts in NF4 and fp8: the values, gradients of adapters, what a captured step keeps."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.costs.memory import peak_bytes
from stepgraph.graph.provenance import phase_of
from stepgraph.kernels.moe import grouped_mm
from stepgraph.kernels.quant import nf4, quantize_experts
from stepgraph.models import DeepSeekV3, Qwen3MoE, next_token_loss
from stepgraph.options import StepOptions

KIND = pytest.mark.parametrize("kind", ["nf4", "fp8"])
E, D, F = 4, 64, 48
SHAPES = (E, F, D), (E, D, F)


class Layer(nn.Module):
    """Every expert has as many rows; ``down`` has an adapter as `peft` adds it."""

    def __init__(self, d=D, f=F, r=4):
        super().__init__()
        self.inner, self.experts = nn.Linear(d, d), nn.Module()
        self.experts.up = nn.Parameter(torch.randn(E, f, d) / 8, requires_grad=False)
        self.experts.down = nn.Parameter(torch.randn(E, d, f) / 8, requires_grad=False)
        self.left, self.right = nn.Parameter(torch.randn(E, d, r) / 8), nn.Parameter(torch.randn(E, r, f) / 8)

    def forward(self, x):
        offsets = torch.arange(1, E + 1, dtype=torch.int32, device=x.device) * (x.shape[0] // E)
        rows = grouped_mm(self.inner(x), self.experts.up.mT, offsets).relu()
        return grouped_mm(rows, torch.baddbmm(self.experts.down, self.left, self.right, alpha=2.0).mT, offsets)


def loss_fn(model, x):
    return model(x).float().square().mean()


def dequantized(model, kind):
    """(A copy of ``model`` in bits, one with what the bits say as plain weights.)"""
    bits, plain = copy.deepcopy(model), copy.deepcopy(model)
    for path, new in quantize_experts(bits, kind)[0].items():
        plain.get_parameter(path).data.copy_(new.dequantize())
    return bits, plain


@KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_each_expert(kind, dtype):
    torch.manual_seed(0)
    model = Layer().to(dtype)
    bits, plain = dequantized(model, kind)
    for name in ("up", "down"):
        given = getattr(bits.experts, name)
        assert torch.equal(given, getattr(plain.experts, name)) and given.dtype == dtype and not given.requires_grad
        for was, one in zip(getattr(model.experts, name), given, strict=True):  # as if it were alone
            if kind == "nf4":
                single = nf4.quantize(was, nested=False)
                again = nf4.dequantize_4bit(*single, 64, was.shape, torch.float32)
                assert (one - again).abs().max() < 0.02 * was.abs().max()  # of the second quantization
            else:
                assert 0 < (one - was).abs().max() < 0.04 * was.abs().max()
    state = bits.state_dict()
    assert "experts.up" not in state and state["experts.up_quantized.weight"].dtype.itemsize == 1
    other = copy.deepcopy(bits)
    other.experts.up_quantized.weight.data.zero_()
    other.load_state_dict(state)
    assert torch.equal(other.to(torch.float16).experts.up, bits.experts.up)  # a cast leaves the bits


@KIND
@pytest.mark.parametrize("passes", ["exact", "default"])
def test_gradients_and_memory_of_a_step(kind, passes):
    """Equal to the dequantized weights by reference, and what is kept is bits."""
    torch.manual_seed(0)
    bits, plain = dequantized(nn.Sequential(*[Layer() for _ in range(3)]).append(nn.Linear(D, D)), kind)
    x, options = torch.randn(8, D), StepOptions(passes=passes, inductor="off")
    steps = [stepgraph.capture(m, loss_fn, x, passes=options) for m in (bits, plain)]
    assert steps[0].verify(x).bitwise or passes == "default"
    assert torch.equal(*(step(x) for step in steps))
    trained = dict(bits.named_parameters())
    for name, param in plain.named_parameters():
        assert not param.requires_grad or torch.equal(param.grad, trained[name].grad), name

    values = {n: n.meta["val"] for n in steps[0].graph.graph.nodes if n.op == "call_function"}
    whole = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.shape in SHAPES and v.dtype.itemsize > 1]
    assert {phase_of(n) for n in whole} == {"forward", "backward"}
    assert all(phase_of(user) == phase_of(n) for n in whole for user in n.users)
    note = next(r for r in steps[0].report if r.name == "recompute").notes
    assert note == ["6 dequantized weights are not kept for backward, under any policy"] or passes == "exact"
    saved = (4 - (0.55 if kind == "nf4" else 1.1)) * 6 * E * D * F  # bytes of the weights
    assert peak_bytes(steps[0].program) < peak_bytes(steps[1].program) - saved + 4 * 4 * E * D * F  # a few at a time


def test_a_block_of_two_experts_is_refused():
    model = Layer()
    model.experts.down = nn.Parameter(torch.randn(3, 5, 7), requires_grad=False)
    model.experts.trained = nn.Parameter(torch.randn(3, 8, 8))
    made, line = quantize_experts(model, "nf4")
    assert list(made) == ["experts.up"] and type(model.experts.down) is nn.Parameter
    assert line == (
        "1 weights of experts are not quantized, experts.down (3, 5, 7) in torch.float32 first: a block of 64 values "
        "would have some of two experts; fp8 takes them"
    )
    assert list(quantize_experts(model, "fp8")[0]) == ["experts.down"]
    with pytest.raises(ValueError, match="choose one of fp8, nf4"):
        quantize_experts(model, "nf5")


@pytest.mark.long
@pytest.mark.parametrize(("family", "kind"), [("qwen", "nf4"), ("deepseek", "fp8")])
def test_our_own_experts_with_adapters_of_peft(family, kind):
    peft, moe_models = pytest.importorskip("peft"), pytest.importorskip("tests.models.moe_models")
    torch.manual_seed(0)
    model = (
        Qwen3MoE(replace(moe_models.QWEN, n_layers=1))
        if family == "qwen"
        else DeepSeekV3(replace(moe_models.DEEPSEEK, n_layers=2))
    )
    model.init_weights(0)
    weights = ["experts.gate_up_proj.weight", "experts.down_proj.weight"]
    lora = peft.LoraConfig(r=4, target_modules=[], target_parameters=weights, init_lora_weights=False)
    bits, plain = dequantized(peft.get_peft_model(model, lora), kind)
    tokens = torch.arange(24).view(2, 12)
    batch = {"tokens": tokens, "targets": tokens + 1}
    step = stepgraph.capture(bits, next_token_loss, batch, passes="exact")
    assert step.verify(batch).bitwise
    loss = next_token_loss(plain, batch)
    loss.backward()
    assert torch.equal(step(batch), loss)
    trained = dict(bits.named_parameters())
    for name, param in plain.named_parameters():
        assert not param.requires_grad or torch.equal(param.grad, trained[name].grad), name
