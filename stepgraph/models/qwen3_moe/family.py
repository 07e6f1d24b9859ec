"""Qwen3-MoE as a `Family`."""

from stepgraph.models.family import Family, HuggingFace
from stepgraph.models.flops import moe_flops_per_token
from stepgraph.models.moe.plan import EXPERTS
from stepgraph.models.qwen3_moe.hf import config_from_hf, config_to_hf, hf_name, pieces
from stepgraph.models.qwen3_moe.qwen3_moe import Qwen3MoE, Qwen3MoEConfig

#: The tensor-parallel plan: module -> style. Not used here; `stepgraph.parallel` applies it.
TP_PLAN = {
    "embed": "embedding",
    "layers.*.attn_norm": "sequence_gather",
    "layers.*.attn.[qkv]_proj": "columns",
    "layers.*.attn.[qk]_norm": "sequence",
    "layers.*.attn.o_proj": "rows",
    "layers.*.mlp_norm": "sequence",
    **EXPERTS,
    "norm": "sequence_gather",
    "head": "columns",
}

QWEN3_MOE = Family(
    "qwen3_moe",
    Qwen3MoEConfig,
    Qwen3MoE,
    lambda config: TP_PLAN,
    ("n_heads", "n_kv_heads", "vocab_size"),
    flops_per_token=moe_flops_per_token,
    longest=lambda config: config.max_seq_len,
    hugging_face=HuggingFace(
        "Qwen3-MoE",
        hf_name,
        config_from_hf,
        config_to_hf,
        ("qwen3_moe",),
        free=("max_seq_len", "moe.balance_rate", "moe.balance_loss"),
        pieces=pieces,
    ),
)
