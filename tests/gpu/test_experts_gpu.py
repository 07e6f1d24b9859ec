"""Mixture of experts of transformers on a GPU: one CUDA graph, the losses of eager."""

import pytest
import torch

from tests.gpu.test_triton_launch_gpu import train

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


def recording(step):
    return next(report for report in step.report if report.name == "cuda_graph")


@pytest.mark.parametrize("passes", ["exact", "default"])
def test_one_cuda_graph(passes):
    """What the report says after the steps, by when waiting nodes were seen."""
    _, _, _, step = train(qwen3_moe(), loss_fn, batches(), passes, STEPS)
    report = recording(step)
    assert report.summary == "1 CUDA graph, 0 nodes on the host", report.notes


def test_exact_is_eager_bit_for_bit(deterministic):
    """Also where later batches go to other experts than the one that was traced."""
    model, data = qwen3_moe(), batches()
    model.set_attn_implementation("eager")  # others' backward may add in any order
    losses, norms, parameters, _ = train(model, loss_fn, data, None, STEPS)
    ours, our_norms, our_parameters, _ = train(model, loss_fn, data, "exact", STEPS)
    assert torch.equal(losses, ours) and torch.equal(norms, our_norms)
    assert all(map(torch.equal, parameters, our_parameters))


def test_default_passes_are_close():
    model, data = qwen3_moe(), batches()
    losses, *_ = train(model, loss_fn, data, None, STEPS)
    ours, *_ = train(model, loss_fn, data, "default", STEPS)
    # bf16 rounds to 2^-9; a token near the border of two experts may go to another, which moves the loss by as little.
    torch.testing.assert_close(ours, losses, rtol=1e-2, atol=1e-2)


def test_fp32_names_what_waits():
    """torch's grouped products of fp32 read the groups' sizes on the host: the step works, in pieces."""
    model, data = qwen3_moe().float(), batches()
    losses, *_ = train(model, loss_fn, data, None, STEPS)
    ours, _, _, step = train(model, loss_fn, data, "exact", STEPS)
    torch.testing.assert_close(ours, losses, rtol=1e-4, atol=1e-4)
    products = [note for note in recording(step).notes if "_grouped_mm" in note]
    assert len(products) == 4 * 2 * 3  # layers, products of each, and their two gradients
