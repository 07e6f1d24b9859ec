"""Tiny mixture-of-experts models of many kinds, and Hugging Face's of the same weights."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stepgraph.models import DeepSeekV3Config, MoEConfig, Qwen3MoEConfig, YarnScaling, family_of
from stepgraph.models.hf_decoder import write_json

SIGMOID = MoEConfig(
    n_experts=8,
    top_k=3,
    ffn_dim=24,
    n_shared=1,
    scoring="sigmoid",
    scale=2.5,
    n_groups=4,
    top_groups=2,
    selection_bias=True,
    balance_rate=0.1,
)
SOFTMAX = MoEConfig(n_experts=8, top_k=2, ffn_dim=24, n_shared=2, scoring="softmax", normalize=False, scale=1.5)
DEEPSEEK = DeepSeekV3Config(
    dim=48,
    n_layers=3,
    n_dense_layers=1,
    n_heads=4,
    ffn_dim=80,
    moe=SIGMOID,
    vocab_size=96,
    max_seq_len=64,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
# Original length 8 and a low theta, so that 40 positions hold pairs that are kept, blended and divided.
YARN = YarnScaling(factor=16.0, original_max_seq_len=8, beta_fast=4.0, beta_slow=0.5, mscale=0.8, mscale_all_dim=0.5)
QWEN = Qwen3MoEConfig(
    dim=48,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    moe=MoEConfig(n_experts=8, top_k=3, ffn_dim=24),
    vocab_size=96,
    max_seq_len=64,
)
#: Each of a kind that Hugging Face has too.
KINDS = {
    "deepseek": DEEPSEEK,
    "no-query-compression": replace(DEEPSEEK, q_lora_rank=None),
    "no-groups": replace(DEEPSEEK, moe=replace(SIGMOID, n_groups=1, top_groups=1, n_shared=2)),
    "not-normalized": replace(DEEPSEEK, moe=replace(SIGMOID, normalize=False), n_dense_layers=0),
    "one-expert": replace(DEEPSEEK, moe=replace(SIGMOID, top_k=1, normalize=False)),
    "yarn": replace(DEEPSEEK, rope_scaling=YARN, rope_theta=100.0),
    "yarn-of-tables": replace(DEEPSEEK, rope_scaling=replace(YARN, mscale=1.0, mscale_all_dim=0.0), rope_theta=100.0),
    "tied": replace(DEEPSEEK, tie_embeddings=True),
    "softmax": replace(DEEPSEEK, moe=SOFTMAX),
    "softmax-groups": replace(DEEPSEEK, moe=replace(SOFTMAX, n_groups=4, top_groups=2), rope_scaling=YARN),
    "qwen": QWEN,
    "qwen-yarn": replace(QWEN, rope_scaling=replace(YARN, mscale=1.0, mscale_all_dim=0.0), rope_theta=100.0),
    "qwen-not-normalized-tied": replace(QWEN, moe=replace(QWEN.moe, normalize=False), tie_embeddings=True),
}


def our_model(config, seed: int = 0) -> nn.Module:
    """A model with random weights, norms and selection biases included."""
    model = family_of(config).model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(1.0 if param.ndim == 1 else 0.0, 0.1, generator=generator)
        for router in model.routers:
            router.weight.mul_(5.0)  # scores that are apart, so that rounding changes no choice
            if router.expert_bias is not None:
                router.expert_bias.normal_(0.0, 0.3, generator=generator)
    return model


def hf_model(ours: nn.Module, folder: Path) -> nn.Module:
    """Hugging Face's model of the same weights, by names alone: no file of weights is written."""
    theirs = family_of(ours.config).hugging_face
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", theirs.write_config(ours.config, torch.float32))
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    state = dict(hf.named_parameters()) | {n: b for n, b in hf.named_buffers() if n in hf.state_dict()}
    with torch.no_grad():
        for name, value in hf_named(ours, {n: t for n, t in ours.state_dict().items() if n in saved(ours)}).items():
            state.pop(name).copy_(value)
    assert not state, "every tensor of Hugging Face's has its place in ours"
    return hf


def saved(model: nn.Module) -> set[str]:
    """Names of the tensors of a checkpoint."""
    return set(model.state_dict())


def hf_named(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors under the names of Hugging Face's modules, which stack experts as ours do."""
    theirs = family_of(model.config).hugging_face
    return {theirs.name(name).replace("_proj.weight", "_proj") if ".experts." in name else theirs.name(name): value
            for name, value in tensors.items()}  # fmt: skip


def tokens_for(config, seq_len: int = 40, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (3, seq_len), generator=torch.Generator().manual_seed(seed))
