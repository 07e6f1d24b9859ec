"""Llama 3 as a plain ``nn.Module``, independent of graphs, meshes and tokenizers.

Source: "The Llama 3 Herd of Models", 2024, section 3.2; Hugging Face's ``LlamaForCausalLM`` for the RoPE layout.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from stepgraph.models.decoder import PLAN, SWIGLU_PLAN, Attention, Block, Decoder, SwiGLU
from stepgraph.models.family import Family, check_heads, check_positive
from stepgraph.models.hf_decoder import decoder_format, rope_from_hf
from stepgraph.models.rope import RopeScaling

#: The tensor-parallel plan: module -> style.
TP_PLAN = PLAN | {f"layers.*.{path}": style for path, style in SWIGLU_PLAN.items()}


@dataclass(frozen=True)
class Llama3Config:
    """Shape of a Llama 3 model."""

    dim: int  # width of the residual stream
    n_layers: int  # number of blocks
    n_heads: int  # query heads; head_dim is dim / n_heads
    n_kv_heads: int  # key and value heads, each shared by n_heads / n_kv_heads query heads
    ffn_dim: int  # width of the SwiGLU feed-forward
    vocab_size: int  # rows of the embedding and of the head
    max_seq_len: int  # longest sequence forward takes; the length of the RoPE tables
    rope_theta: float = 500_000.0  # base of the RoPE frequencies
    rope_scaling: RopeScaling | None = None  # Llama 3.1's stretch of the low frequencies
    norm_eps: float = 1e-5  # eps of every RMSNorm
    tie_embeddings: bool = False  # the head uses the embedding's weight

    def __post_init__(self) -> None:
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")
        check_positive(self, *sizes, "rope_theta", "norm_eps")
        check_heads(self.dim, self.n_heads, self.n_kv_heads)
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} (dim={self.dim} / n_heads={self.n_heads}) is odd, RoPE rotates pairs; "
                f"try dim={self.dim + self.n_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def score_flops(self) -> int:
        """Multiplications of a query with a key, and of the score with the value, in all heads of a layer."""
        return 2 * self.dim

    def num_params(self, *, lookup_table: bool = True, active: bool = False) -> int:
        """Number of parameters, all of them ``active``; without ``lookup_table``, an embedding that is not also the
        head is left out."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        table = self.vocab_size * self.dim
        tables = 2 if lookup_table and not self.tie_embeddings else 1
        return self.n_layers * block + self.dim + tables * table


class Llama3(Decoder):
    """Llama 3: see `Decoder`."""

    def __init__(self, config: Llama3Config):
        c, norm = config, partial(nn.RMSNorm, eps=config.norm_eps)
        blocks = (
            Block(c.dim, norm, Attention(c.dim, c.n_heads, c.n_kv_heads, c.head_dim), SwiGLU(c.dim, c.ffn_dim))
            for _ in range(c.n_layers)
        )
        super().__init__(config, blocks, norm, c.head_dim, c.rope_scaling)


def llama3_debug() -> Llama3Config:
    """6.1M parameters for a laptop CPU: 256 bytes and room for 64 special tokens.

    Four wide blocks rather than eight narrow ones: the same size trains a fifth faster on two CPU cores.
    """
    return Llama3Config(
        dim=384, n_layers=4, n_heads=6, n_kv_heads=3, ffn_dim=896, vocab_size=320, max_seq_len=2048, rope_theta=10_000.0
    )


def llama3_1b() -> Llama3Config:
    """Llama 3.2 1B: 1,235,814,400 parameters."""
    return Llama3Config(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        vocab_size=128_256,
        max_seq_len=131_072,
        rope_scaling=RopeScaling(factor=32.0),
        tie_embeddings=True,
    )


def llama3_8b() -> Llama3Config:
    """Llama 3.1 8B: 8,030,261,248 parameters."""
    return _llama31(dim=4096, n_layers=32, n_heads=32, ffn_dim=14_336)


def llama3_70b() -> Llama3Config:
    """Llama 3.1 70B: 70,553,706,496 parameters."""
    return _llama31(dim=8192, n_layers=80, n_heads=64, ffn_dim=28_672)


def llama3_405b() -> Llama3Config:
    """Llama 3.1 405B: 405,853,388,800 parameters (with 8 key-value heads, as in the Hugging Face release)."""
    return _llama31(dim=16_384, n_layers=126, n_heads=128, ffn_dim=53_248)


def _llama31(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> Llama3Config:
    return Llama3Config(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        ffn_dim=ffn_dim,
        vocab_size=128_256,
        max_seq_len=131_072,
        rope_scaling=RopeScaling(factor=8.0),
    )


# Their key -> our field.
_ROPE = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
_ROPE |= {"original_max_position_embeddings": "original_max_seq_len"}


def _from_hf(raw: dict[str, Any]) -> dict[str, Any]:
    rope = rope_from_hf(raw, "llama3", lambda rope: RopeScaling(**{field: rope[key] for key, field in _ROPE.items()}))
    return {"n_kv_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"], **rope}


def _check_heads(raw: dict[str, Any], config: Llama3Config) -> None:
    if raw.get("head_dim") not in (None, config.head_dim):
        raise ValueError(
            f"head_dim={raw['head_dim']} is not hidden_size / num_attention_heads = {config.head_dim}; "
            "use a Llama 3 checkpoint"
        )


def _to_hf(config: Llama3Config) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "mlp_bias": False,
        "rope_scaling": scaling and {"rope_type": "llama3", **{key: getattr(scaling, f) for key, f in _ROPE.items()}},
    }


LLAMA3 = Family(
    "llama3",
    Llama3Config,
    Llama3,
    lambda config: TP_PLAN,
    ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"),
    longest=lambda config: config.max_seq_len,
    hugging_face=decoder_format(
        "Llama 3",
        Llama3Config,
        "llama",
        plain={"intermediate_size": "ffn_dim"},
        renamed={},
        needed=lambda raw: {"model_type": "llama", "mlp_bias": False},
        read=_from_hf,
        write=_to_hf,
        check=_check_heads,
    ),
)
