"""Gradients with respect to tensors of the step: gradient penalties, forces, and the inputs of checkpoints."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph

PASSES = pytest.mark.parametrize("passes", [[], "exact"])


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, fused=True)


def network(activation=nn.Tanh, norm=nn.LayerNorm):
    return nn.Sequential(nn.Linear(6, 10), norm(10), activation(), nn.Linear(10, 10), activation(), nn.Linear(10, 6))


def batches(n=2):
    return [{"x": torch.randn(4, 6), "y": torch.randn(4, 6)} for _ in range(n)]


def slope(model, x):
    """d(sum of outputs)/dx, itself differentiable."""
    x = x.clone().requires_grad_()
    out = model(x)
    return torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def penalty(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"]) + (slope(model, batch["x"]).norm(dim=1) - 1).square().mean()


def forces(model, batch):
    return F.mse_loss(-slope(model, batch["x"]), batch["y"])


def attack(model, batch):
    """Trains on inputs moved along the sign of their gradient, a number."""
    x = batch["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.mse_loss(model(x), batch["y"]), x)
    return F.mse_loss(model(batch["x"] + 0.1 * gradient.sign()), batch["y"])


def batch_itself(model, batch):
    loss = F.mse_loss(model(batch["x"].requires_grad_()), batch["y"])
    return loss + torch.autograd.grad(loss, batch["x"], create_graph=True)[0].square().sum()


def parameters(model, batch):
    """One step of descent inside the loss."""
    loss = F.mse_loss(model(batch["x"]), batch["y"])
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, params, create_graph=True)
    moved = {name: p - 0.1 * g for name, p, g in zip(names, params, grads, strict=True)}
    return F.mse_loss(torch.func.functional_call(model, moved, (batch["x"],)), batch["y"])


def leaf_in_the_middle(model, batch):
    """Part of the model is cut off by a leaf that requires a gradient."""
    half = model[:3](batch["x"]).detach().requires_grad_()
    return F.mse_loss(model[3:](half), batch["y"])


LOSSES = [penalty, forces, attack, batch_itself, parameters, leaf_in_the_middle]


@PASSES
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses(check_training, loss_fn, accumulate, passes):
    check_training(network(), loss_fn, batches(), adamw, max_grad_norm=0.5, accumulate=accumulate, passes=passes)


@pytest.mark.parametrize("activation", [nn.SiLU, nn.GELU, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Mish])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d])
def test_penalty_through_many_operators(check_training, activation, norm):
    check_training(network(activation, norm), penalty, batches(), adamw, steps=3)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_passes_that_round_differently_stay_close(loss_fn):
    model, batch = network(norm=nn.RMSNorm), batches()[0]
    step = stepgraph.capture(model, loss_fn, batch, passes="default", disable=["inductor"])
    expected = loss_fn(model, batch)
    expected.backward()
    grads = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.testing.assert_close(step(batch), expected.detach())
    torch.testing.assert_close([p.grad for p in model.parameters()], grads)


def test_a_batch_that_requires_a_gradient_from_the_start(check_training):
    """Eager leaves its gradient in the batch, where no step reads it."""
    given = batches()
    for batch in given:
        batch["x"].requires_grad_()
    check_training(network(), batch_itself, given, adamw)


def test_a_batch_computed_with_gradients_is_refused():
    encoder, model = nn.Linear(6, 6), network()
    batch = batches()[0]
    step = stepgraph.capture(model, penalty, batch, passes="exact")
    batch["x"] = encoder(batch["x"])
    for attempt in (lambda: step(batch), lambda: stepgraph.capture(model, penalty, batch)):
        with pytest.raises(
            stepgraph.CaptureError, match=r"shape \[4, 6\] computed from a tensor that requires a gradient"
        ):
            attempt()


def test_a_frozen_parameter_that_forward_unfreezes_is_refused():
    model = network()
    model[3].weight.requires_grad_(False)

    def unfreeze(model, batch):
        model[3].weight.requires_grad_()
        return penalty(model, batch)

    message = r"forward makes 3.weight, used in 3 \(.*test_input_gradients.py:\d+\), require a gradient"
    with pytest.raises(stepgraph.CaptureError, match=message):
        stepgraph.capture(model, unfreeze, batches()[0])
    assert not model[3].weight.requires_grad


def test_backward_inside_the_loss_is_refused():
    def own(model, batch):
        F.mse_loss(model(batch["x"]), batch["y"]).backward()
        return model(batch["x"]).sum()

    with pytest.raises(stepgraph.CaptureError, match=re.escape("loss_fn calls backward()")):
        stepgraph.capture(network(), own, batches()[0])


@PASSES
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_lora_with_gradient_checkpointing(check_training, use_reentrant, passes):
    """Frozen embeddings whose output requires a gradient, so that checkpoints have one to compute."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=53, max_position_embeddings=32))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    ids = torch.randint(53, (4, 12))
    step = check_training(
        model,
        lambda model, batch: model(**batch).loss,
        [{"input_ids": ids, "labels": ids.clone()}],
        adamw,
        max_grad_norm=1.0,
        passes=passes,
        steps=4,
    )
    updated = {s.what.name for s in step.graph.inputs if s.what.kind == "optimizer"}
    assert updated and all("lora" in name for name in updated)
