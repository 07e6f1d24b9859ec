"""Qwen3-MoE as a plain ``nn.Module``, independent of graphs, meshes and tokenizers.

Source: Qwen Team, "Qwen3 Technical Report", 2025, section 2; Hugging Face's ``Qwen3MoeForCausalLM`` for the layout of
the weights. Every block has experts, none is shared.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from stepgraph.models.decoder import PLAN, Attention, Block
from stepgraph.models.family import Family, check_heads, check_positive
from stepgraph.models.hf_decoder import decoder_format, rope_from_hf, yarn_from_hf, yarn_to_hf
from stepgraph.models.moe import EXPERTS_PLAN, FREE, MoE, MoEConfig, MoEDecoder
from stepgraph.models.rope import YarnScaling


@dataclass(frozen=True)
class Qwen3MoEConfig:
    """Shape of a Qwen3-MoE model."""

    dim: int  # width of the residual stream
    n_layers: int  # number of blocks
    n_heads: int  # query heads
    n_kv_heads: int  # key and value heads, each shared by n_heads / n_kv_heads query heads
    head_dim: int  # width of one head
    moe: MoEConfig  # the experts of every block
    vocab_size: int  # rows of the embedding and of the head
    max_seq_len: int  # longest sequence forward takes; the length of the RoPE tables
    rope_theta: float = 1_000_000.0  # base of the RoPE frequencies
    rope_scaling: YarnScaling | None = None  # YaRN's stretch of the low frequencies
    norm_eps: float = 1e-6  # eps of every RMSNorm
    tie_embeddings: bool = False  # the head uses the embedding's weight

    def __post_init__(self) -> None:
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_seq_len")
        check_positive(self, *sizes, "rope_theta", "norm_eps")
        check_heads(self.n_heads * self.head_dim, self.n_heads, self.n_kv_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, RoPE rotates pairs; try {self.head_dim + 1}")

    @property
    def score_flops(self) -> int:
        """Multiplications of a query with a key, and of the score with the value, in all heads of a layer."""
        return self.n_heads * 2 * self.head_dim

    def num_params(self, *, lookup_table: bool = True, active: bool = False) -> int:
        """Number of parameters; without ``lookup_table``, an embedding that is not also the head is left out;
        ``active``: only the experts that one token uses."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads) + 2 * self.head_dim
        block = attention + self.moe.num_params(self.dim, active=active) + 2 * self.dim
        tables = 2 if lookup_table and not self.tie_embeddings else 1
        return self.n_layers * block + self.dim + tables * self.vocab_size * self.dim


class Qwen3MoE(MoEDecoder):
    """Qwen3-MoE: see `MoEDecoder`. Queries and keys are normalized per head."""

    def __init__(self, config: Qwen3MoEConfig):
        c, yarn, norm = config, config.rope_scaling, partial(nn.RMSNorm, eps=config.norm_eps)
        scale = None if yarn is None else c.head_dim**-0.5 * yarn.score_scale
        blocks = (
            Block(c.dim, norm, Attention(c.dim, c.n_heads, c.n_kv_heads, c.head_dim, norm, scale), MoE(c.dim, c.moe))
            for _ in range(c.n_layers)
        )
        super().__init__(config, blocks, norm, c.head_dim, yarn)


def qwen3_30b_a3b() -> Qwen3MoEConfig:
    """Qwen3-30B-A3B: 30,532,122,624 parameters, 3.4B of them active."""
    return Qwen3MoEConfig(
        dim=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        head_dim=128,
        moe=MoEConfig(n_experts=128, top_k=8, ffn_dim=768),
        vocab_size=151_936,
        max_seq_len=40_960,
    )


# Their key -> our field, where the value is the same.
_PLAIN_MOE = {
    "num_experts": "n_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "ffn_dim",
    "norm_topk_prob": "normalize",
}
_NEEDED = {"model_type": "qwen3_moe", "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _from_hf(raw: dict[str, Any]) -> dict[str, Any]:
    if "num_local_experts" in raw:  # transformers 5's name of it
        raw = {"num_experts": raw["num_local_experts"]} | raw
    moe = MoEConfig(**{field: raw[key] for key, field in _PLAIN_MOE.items()})
    return {"moe": moe, **rope_from_hf(raw, "yarn", partial(yarn_from_hf, scales_scores=False))}


def _to_hf(config: Qwen3MoEConfig) -> dict[str, Any]:
    moe = config.moe
    balance = {"balance_rate": moe.balance_rate, "balance_loss": moe.balance_loss}
    if moe != MoEConfig(moe.n_experts, moe.top_k, moe.ffn_dim, normalize=moe.normalize, **balance):
        raise ValueError(
            f"Hugging Face's Qwen3-MoE has no form for {moe}: its router has softmax scores without groups, scale and "
            "selection_bias, and no shared experts; drop them"
        )
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_NEEDED,
        **{key: getattr(moe, field) for key, field in _PLAIN_MOE.items()},
        "intermediate_size": moe.top_k * moe.ffn_dim,  # of dense blocks, of which there are none
        "rope_scaling": yarn_to_hf(config.rope_scaling, scales_scores=False),
    }


#: The tensor-parallel plan: module -> style.
TP_PLAN = PLAN | EXPERTS_PLAN | {"layers.*.attn.[qk]_norm": "sequence", "layers.*.mlp_norm": "sequence"}

QWEN3_MOE = Family(
    "qwen3_moe",
    Qwen3MoEConfig,
    Qwen3MoE,
    lambda config: TP_PLAN,
    ("n_heads", "n_kv_heads", "vocab_size"),
    longest=lambda config: config.max_seq_len,
    hugging_face=decoder_format(
        "Qwen3-MoE",
        Qwen3MoEConfig,
        "qwen3_moe",
        plain={"num_key_value_heads": "n_kv_heads", "head_dim": "head_dim"},
        renamed={"router": "gate"},
        needed=lambda raw: _NEEDED,
        read=_from_hf,
        write=_to_hf,
        free=FREE,
    ),
)
