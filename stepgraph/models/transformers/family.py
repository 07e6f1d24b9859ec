"""Any causal language model of transformers as a `Family`."""

from stepgraph.models.family import Family, HuggingFace
from stepgraph.models.transformers.transformers import CausalLM, CausalLMConfig, read_config

_FORMAT = HuggingFace("transformers", lambda name: name, read_config, lambda config, dtype: {}, ())
_SHAPE = {"longest": lambda config: config.longest, "hugging_face": _FORMAT}
TRANSFORMERS = Family("transformers", CausalLMConfig, CausalLM, lambda config: {}, (), **_SHAPE)
