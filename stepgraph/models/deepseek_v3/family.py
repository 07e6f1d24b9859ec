"""DeepSeek-V3 as a `Family`."""

from stepgraph.models.deepseek_v3.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from stepgraph.models.deepseek_v3.hf import config_from_hf, config_to_hf, hf_name, pieces
from stepgraph.models.deepseek_v3.plan import TP_SIZES, tp_plan
from stepgraph.models.family import Family, HuggingFace
from stepgraph.models.flops import moe_flops_per_token

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    DeepSeekV3Config,
    DeepSeekV3,
    tp_plan,
    TP_SIZES,
    flops_per_token=moe_flops_per_token,
    longest=lambda config: config.max_seq_len,
    hugging_face=HuggingFace(
        "DeepSeek-V3",
        hf_name,
        config_from_hf,
        config_to_hf,
        ("deepseek_v3", "deepseek_v2"),
        free=("max_seq_len", "moe.balance_rate", "moe.balance_loss"),
        pieces=pieces,
    ),
)
