"""Adapters of peft under capture: the bits of eager in the exact pipeline, and what a step leaves of frozen weights."""

import copy

import pytest
import torch

import stepgraph
from stepgraph.graph.values import Gradient, OptimizerState
from stepgraph.passes import StepOptions

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=16)
IDS = (torch.arange(32) * 7 % 64).view(2, 16)
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "rslora": dict(target_modules="all-linear", use_rslora=True),
    "dora": dict(target_modules="all-linear", use_dora=True),
    "experts": dict(target_modules=["q_proj", "v_proj"], target_parameters=FUSED),
}


def loss_fn(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def adapted(kind, **options):
    torch.manual_seed(0)
    if kind == "experts":
        config = transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, num_key_value_heads=1)
        base = transformers.Qwen3MoeForCausalLM(config)
        base.set_experts_implementation("grouped_mm")
    else:
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))
    lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **KINDS[kind], **options)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def steps(model, run):
    """The losses of two steps, and the trained parameters after them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step = run(model, optimizer)
    losses = [step(IDS).detach().clone() for _ in range(2)]
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def eager(model, optimizer):
    def step(ids):
        loss = loss_fn(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_eager(kind):
    plain, mine = (copy.deepcopy(adapted(kind)) for _ in range(2))
    losses, weights = steps(plain, eager)
    found, trained = steps(
        mine, lambda model, optimizer: stepgraph.capture(model, loss_fn, IDS, optimizer, passes="exact")
    )
    assert all(map(torch.equal, found, losses)) and trained.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(trained[name], weight), name
    with torch.no_grad():  # no tensor of the trace is left in the model
        assert torch.equal(loss_fn(mine, IDS), loss_fn(plain, IDS))


def test_default_is_close():
    kind = "experts"
    losses, weights = steps(adapted(kind), eager)
    options = StepOptions(inductor="off")
    captured = []

    def capture(model, optimizer):
        captured.append(stepgraph.capture(model, loss_fn, IDS, optimizer, passes=options))
        return captured[0]

    found, trained = steps(adapted(kind), capture)
    assert next(r for r in captured[0].report if r.name == "lora_experts").changed == 2
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    for name, weight in weights.items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-3, atol=1e-4)


def test_frozen_weights_leave_nothing():
    """No gradient and no optimizer state, and kernels of frozen norms compute no gradient of a weight."""
    model = adapted("rslora").bfloat16()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options = StepOptions(inductor="off", norm="kernel")
    step = stepgraph.capture(model, loss_fn, IDS, optimizer, passes=options).graph
    assert {i.what.parameter for i in step.inputs if isinstance(i.what, OptimizerState)} == trained
    assert {what.parameter for what in step.outputs if isinstance(what, Gradient)} <= trained
    norms = step.graph.find_nodes(op="call_function", target=torch.ops.stepgraph.norm_backward.default)
    assert norms and all(argument[-2:] == (False, False) for argument in (tuple(n.args) for n in norms))
    products = step.nodes("backward")
    shapes = {tuple(n.meta["val"].shape) for n in products if n.target is torch.ops.aten.mm.default}
    frozen = {tuple(p.shape) for name, p in model.named_parameters() if name not in trained and p.ndim == 2}
    assert not shapes & ({(48, 32), (32, 48), (64, 32)} & frozen)
