"""Language models as plain ``nn.Module``s that know nothing of graphs or meshes."""

from stepgraph.models.deepseek_v3 import (
    DeepSeekV3,
    DeepSeekV3Config,
    deepseek_v3_16b,
    deepseek_v3_671b,
    deepseek_v3_debug,
)
from stepgraph.models.families import FAMILIES, config_from_hf, family_named, family_of
from stepgraph.models.family import Family, HuggingFace, Piece, flops_per_token, num_params
from stepgraph.models.golf import Golf, GolfConfig, golf
from stepgraph.models.llama3 import (
    Llama3,
    Llama3Config,
    llama3_1b,
    llama3_8b,
    llama3_70b,
    llama3_405b,
    llama3_debug,
)
from stepgraph.models.loss import added_losses, next_token_loss
from stepgraph.models.moe import MoEConfig
from stepgraph.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, qwen3_30b_a3b
from stepgraph.models.rope import RopeScaling, YarnScaling
