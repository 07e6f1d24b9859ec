"""Mixture of experts of transformers on a GPU: one CUDA graph, the losses of eager."""

import copy

import pytest
import torch

import stepgraph

transformers = pytest.importorskip("transformers")

STEPS = 8


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2, vocab_size=512, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).to("cuda", torch.bfloat16).train()


def batches(n=3):
    """Each batch draws from another part of the vocabulary, so that its tokens go to other experts."""
    ids = [torch.randint(160 * k, 160 * (k + 1), (4, 128), device="cuda") for k in range(n)]
    return [{"input_ids": i, "labels": i} for i in ids]


def loss_fn(model, batch):
    return model(**batch).loss


def train(model, data, passes=None):
    """(losses, gradient norms, parameters, the captured step or None); without passes the model trains eagerly."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = passes and stepgraph.capture(model, loss_fn, data[0], optimizer, max_grad_norm=1.0, passes=passes)
    losses, norms = [], []
    for i in range(STEPS):
        batch = data[i % len(data)]
        if step:
            losses.append(step(batch).clone())
            norms.append(step.metrics["grad_norm"].clone())
            continue
        loss = loss_fn(model, batch)
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), torch.stack(norms), list(model.parameters()), step


def recording(step):
    return next(report for report in step.report if report.name == "cuda_graph")


@pytest.mark.parametrize("passes", ["exact", "default"])
def test_one_cuda_graph(passes):
    """What the report says after the steps, by when waiting nodes were seen."""
    _, _, _, step = train(qwen3_moe(), batches(), passes)
    report = recording(step)
    assert report.summary == "1 CUDA graph, 0 nodes on the host", report.notes


def test_exact_is_eager_bit_for_bit(deterministic):
    """Also where later batches go to other experts than the one that was traced."""
    model, data = qwen3_moe(), batches()
    model.set_attn_implementation("eager")  # others' backward may add in any order
    losses, norms, parameters, _ = train(model, data)
    ours, our_norms, our_parameters, _ = train(model, data, "exact")
    assert torch.equal(losses, ours) and torch.equal(norms, our_norms)
    assert all(map(torch.equal, parameters, our_parameters))


def test_default_passes_are_close():
    model, data = qwen3_moe(), batches()
    losses, *_ = train(model, data)
    ours, *_ = train(model, data, "default")
    # bf16 rounds to 2^-9; a token near the border of two experts may go to another, which moves the loss by as little.
    torch.testing.assert_close(ours, losses, rtol=1e-2, atol=1e-2)


def test_fp32_names_what_waits():
    """torch's grouped products of fp32 read the groups' sizes on the host: the step works, in pieces."""
    model, data = qwen3_moe().float(), batches()
    losses, *_ = train(model, data)
    ours, _, _, step = train(model, data, "exact")
    torch.testing.assert_close(ours, losses, rtol=1e-4, atol=1e-4)
    products = [note for note in recording(step).notes if "_grouped_mm" in note]
    assert len(products) == 4 * 2 * 3  # layers, products of each, and their two gradients
