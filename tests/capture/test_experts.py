"""Mixture of experts of transformers with its default experts, in fp32 and bf16, bit for bit."""

import copy

import pytest
import torch

import stepgraph
from stepgraph.capture.fake import fake_mode
from stepgraph.errors import CaptureError

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 53, "intermediate_size": 48,
    "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {**ROUTED, "head_dim": 8, "moe_intermediate_size": 16},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "GptOss": {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Jamba": {
        **ROUTED, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 4,
    },
    "Olmoe": ROUTED,
}  # fmt: skip


def build(name, **changes):
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name], **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def batches(n=3):
    """Each from another part of the vocabulary, so that later batches go to other experts than the one traced."""
    ids = [torch.randint(17 * k, 17 * (k + 1), (2, 8)) for k in range(n)]
    return [{"input_ids": i, "labels": i} for i in ids]


def loss_fn(model, batch):
    return model(**batch).loss


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def check(check_training, name, dtype):
    model = build(name).to(dtype)
    assert model.config._experts_implementation == "grouped_mm"
    check_training(model, loss_fn, batches(), make_optimizer, max_grad_norm=1.0, steps=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qwen3_moe_is_bitwise_eager(check_training, dtype):
    check(check_training, "Qwen3Moe", dtype)


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "GptOss", "Jamba", "Olmoe"])
def test_others_are_bitwise_eager(check_training, name):
    check(check_training, name, torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "GptOss", "Jamba", "Olmoe"])
def test_others_are_bitwise_eager_in_bf16(check_training, name):
    check(check_training, name, torch.bfloat16)


def test_batched_experts(check_training):
    model = build("Qwen3Moe")
    model.set_experts_implementation("batched_mm")
    check_training(model, loss_fn, batches(), make_optimizer, steps=3)


def test_loops_over_experts_are_refused_with_what_to_set():
    model = build("Mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(
        CaptureError, match=r"mlp.experts at .*nonzero.*set_experts_implementation\(.grouped_mm.\)"
    ) as e:
        stepgraph.capture(model, loss_fn, batches(1)[0], make_optimizer(model))
    assert "\n" not in str(e.value)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_passes_are_close(name, dtype):
    """Their gradients in bf16 as close to those of fp32 as eager's are: some, as a router's bias's, cancel out."""
    model, (batch, *_) = build(name).to(dtype), batches()
    expected = loss_fn(model, batch)
    eager = torch.autograd.grad(expected, list(model.parameters()))
    exact = eager
    if dtype == torch.bfloat16:
        wide = copy.deepcopy(model).float()
        exact = torch.autograd.grad(loss_fn(wide, batch), list(wide.parameters()))
    step = stepgraph.capture(model, loss_fn, batch, passes="default")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(step(batch), expected.detach(), rtol=tolerance, atol=tolerance)
    for parameter, theirs, right in zip(model.parameters(), eager, exact, strict=True):
        allowed = 2 * (theirs - right).norm() + tolerance * right.norm() + 1e-6
        assert (parameter.grad - right).norm() <= allowed


# The fake kernel of grouped products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 16, 13])
@pytest.mark.parametrize("dims", [(2, 3), (2, 2), (3, 2), (3, 3)])
def test_form_of_a_grouped_product(dims, width, dtype):
    """As the real kernel's, which pads rows to 16 bytes."""
    rows, inner, groups = 24, 16, 3
    a = torch.randn(groups, rows, inner, dtype=dtype) if dims[0] == 3 else torch.randn(rows, inner, dtype=dtype)
    b = torch.randn(groups, width, inner, dtype=dtype) if dims[1] == 3 else torch.randn(width, inner, dtype=dtype)
    along = {(2, 3): rows, (2, 2): inner, (3, 2): width}.get(dims)
    offs = None if along is None else torch.tensor([along // 3, along // 3, along], dtype=torch.int32)
    real = torch._grouped_mm(a, b.transpose(-2, -1), offs=offs)
    mode = fake_mode()
    with mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in (a, b, offs)]
        fake = torch._grouped_mm(fakes[0], fakes[1].transpose(-2, -1), offs=fakes[2])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, offs: (a.double(), b.double(), offs),
        lambda a, b, offs: (a, b[..., :13].contiguous(), offs),
        lambda a, b, offs: (torch.ones(1, 1).expand(a.shape), b, offs),
        lambda a, b, offs: (a, b, offs.long()),
        lambda a, b, offs: (a, b, None),
        lambda a, b, offs: (a[:, :4], b, offs),
    ],
)
def test_what_the_real_kernel_refuses_is_refused(change):
    arguments = torch.randn(24, 16), torch.randn(3, 16, 16), torch.tensor([8, 8, 24], dtype=torch.int32)
    a, b, offs = change(*arguments)
    with pytest.raises(RuntimeError):
        torch._grouped_mm(a, b, offs=offs)
    mode = fake_mode()
    with mode, pytest.raises(RuntimeError, match="_grouped_mm: "):
        a, b, offs = change(*map(mode.from_tensor, arguments))
        torch._grouped_mm(a, b, offs=offs)
