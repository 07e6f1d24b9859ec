"""How tensor parallelism splits DeepSeek-V3. Not used here; `stepgraph.parallel` applies it."""

from stepgraph.models.deepseek_v3.deepseek_v3 import DeepSeekV3Config
from stepgraph.models.moe.plan import EXPERTS

#: Fields of the configuration that the number of tensor-parallel ranks must divide.
TP_SIZES = ("n_heads", "ffn_dim", "vocab_size")


def tp_plan(config: DeepSeekV3Config) -> dict[str, str]:
    """Module -> style. Where queries are compressed, what is gathered over the sequence is the latents, a third of the
    residual stream's width; else the normalized residual stream."""
    compressed = config.q_lora_rank is not None
    dense = {f"layers.{i}.mlp_norm": "sequence_gather" for i in range(config.n_dense_layers)}
    for i in range(config.n_dense_layers):
        dense |= {f"layers.{i}.mlp.gate_proj": "columns", f"layers.{i}.mlp.up_proj": "columns"}
        dense |= {f"layers.{i}.mlp.down_proj": "rows"}
    shared = {f"layers.*.mlp.shared.{part}_proj": "sequence" for part in ("gate", "up", "down")}
    return {
        "embed": "embedding",
        "layers.*.attn_norm": "sequence" if compressed else "sequence_gather",
        "layers.*.attn.q_proj": "columns",
        "layers.*.attn.q_a_proj": "sequence_gather",
        "layers.*.attn.q_a_norm": "sequence",
        "layers.*.attn.q_b_proj": "columns",
        "layers.*.attn.kv_a_proj": "sequence_gather" if compressed else "sequence",
        "layers.*.attn.kv_a_norm": "sequence",
        "layers.*.attn.kv_b_proj": "columns",
        "layers.*.attn.o_proj": "rows",
        **dense,
        "layers.*.mlp_norm": "sequence",
        **EXPERTS,
        **(shared if config.moe.n_shared else {}),
        "norm": "sequence_gather",
        "head": "columns",
    }
