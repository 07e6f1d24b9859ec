"""Llama 3 as a `Family`."""

from stepgraph.models.family import Family, HuggingFace
from stepgraph.models.llama3.hf import config_from_hf, config_to_hf, hf_name
from stepgraph.models.llama3.llama3 import TP_PLAN, TP_SIZES, Llama3, Llama3Config

LLAMA3 = Family(
    "llama3",
    Llama3Config,
    Llama3,
    lambda config: TP_PLAN,
    TP_SIZES,
    longest=lambda config: config.max_seq_len,
    hugging_face=HuggingFace(
        "Llama 3", hf_name, config_from_hf, config_to_hf, ("llama",), free=("max_seq_len", "attention")
    ),
)
