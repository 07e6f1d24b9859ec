"""Language models as plain ``nn.Module``s that know nothing of graphs or meshes."""

from stepgraph.models.flops import flops_per_token, num_params
from stepgraph.models.golf.model import Golf, GolfConfig, golf
from stepgraph.models.llama3.model import (
    Llama3,
    Llama3Config,
    llama3_1b,
    llama3_8b,
    llama3_70b,
    llama3_405b,
    llama3_debug,
)
from stepgraph.models.loss import next_token_loss
from stepgraph.models.rope import RopeScaling

__all__ = [
    "Golf",
    "GolfConfig",
    "Llama3",
    "Llama3Config",
    "RopeScaling",
    "flops_per_token",
    "golf",
    "llama3_1b",
    "llama3_8b",
    "llama3_70b",
    "llama3_405b",
    "llama3_debug",
    "next_token_loss",
    "num_params",
]
