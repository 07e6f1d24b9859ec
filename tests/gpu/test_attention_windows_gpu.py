"""Windows of attention on a GPU: as near to float64 as the masked kernels are, in every layout that models use."""

import copy

import pytest
import torch
import torch.nn.functional as F

import stepgraph

DEVICE = "cuda"


class Attention(torch.nn.Module):
    """Attention alone, under a window of ``left`` keys before and ``right`` keys behind each query."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right
        self.scale = torch.nn.Parameter(torch.ones((), device=DEVICE))

    def forward(self, q, k, v):
        here = torch.arange(q.shape[2], device=q.device)
        distance = here[:, None] - here[None]
        mask = (distance <= self.left) & (-distance <= self.right)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) * self.scale


def loss_of(model, batch):
    q, k, v, dy = (batch[name] for name in ("q", "k", "v", "dy"))
    width = q.shape[-1]
    projected = (F.linear(x, model.mix.to(x.dtype)).transpose(1, 2) for x in (q, k, v))
    return (model.attend(*projected).transpose(1, 2).float() * dy).sum() / width


class Mixed(torch.nn.Module):
    """Attention whose queries, keys and values come from one matrix, so that their gradients reach a parameter."""

    def __init__(self, left, right, width, dtype):
        super().__init__()
        self.attend = Attention(left, right)
        self.mix = torch.nn.Parameter((torch.randn(width, width, device=DEVICE) / width**0.5).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize(("left", "right"), [(63, 0), (64, 64), (5, 11), (0, 0)])
def test_windows(dtype, width, left, right):
    torch.manual_seed(0)
    model = Mixed(left, right, width, dtype)
    batch = {name: torch.randn(2, 320, 4, width, device=DEVICE).to(dtype) for name in ("q", "k", "v")}
    batch["dy"] = torch.randn(2, 320, 4, width, device=DEVICE)
    exact = copy.deepcopy(model).double()
    loss_of(exact, {name: value.double() for name, value in batch.items()}).backward()
    errors = {}
    for name, disable in (("window", ()), ("masked", ("attention_windows",))):
        fresh = copy.deepcopy(model)
        step = stepgraph.capture(fresh, loss_of, batch, disable=("inductor", *disable))
        step(batch)
        errors[name] = (fresh.mix.grad.double() - exact.mix.grad).abs().max().item()
        (report,) = [r for r in step.report if r.name == "attention_windows"] or [None]
        if name == "window":
            assert report.changed == 1 and "1 of 1" in report.summary, (report.summary, report.notes)
    assert errors["window"] <= 2 * errors["masked"] + 1e-6, errors


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    common = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4)
    torch.manual_seed(0)
    if name == "gemma3":
        config = transformers.Gemma3TextConfig(**common, num_key_value_heads=1, head_dim=32, sliding_window=33)
        model = transformers.AutoModelForCausalLM.from_config(config)
    elif name == "mistral":
        config = transformers.MistralConfig(**common, num_key_value_heads=2, sliding_window=17)
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        model = transformers.AutoModelForMaskedLM.from_config(
            transformers.ModernBertConfig(**common, local_attention=16, **ids)
        )
    return model.to(DEVICE, torch.bfloat16).train()


@pytest.mark.parametrize(("name", "windows"), [("gemma3", 5), ("mistral", 6), ("modernbert", 4)])
def test_hugging_face(name, windows):
    """Trained as well as with masks: gradients of a first step as near to those of fp32."""
    model = hugging_face(name)
    ids = torch.randint(512, (2, 128), device=DEVICE)
    batch = {"input_ids": ids, "labels": ids}

    def loss_fn(model, batch):
        return model(**batch).loss

    exact = copy.deepcopy(model).float()
    loss_fn(exact, batch).backward()
    errors = {}
    for kind, disable in (("window", ()), ("masked", ("attention_windows",))):
        fresh = copy.deepcopy(model)
        step = stepgraph.capture(fresh, loss_fn, batch, disable=("inductor", *disable))
        loss = step(batch)
        assert torch.isfinite(loss)
        total = sum(
            (p.grad.float() - q.grad).square().sum()
            for p, q in zip(fresh.parameters(), exact.parameters(), strict=True)
        )
        errors[kind] = total.sqrt().item()
        if kind == "window":
            (report,) = [r for r in step.report if r.name == "attention_windows"]
            assert f"{windows} of {windows} attentions" in report.summary, (report.summary, report.notes)
    assert errors["window"] <= 1.2 * errors["masked"], errors
