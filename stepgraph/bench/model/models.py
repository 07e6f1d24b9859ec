"""The measured models: configurations of ``transformers``, written out in models.json so that nothing is downloaded.

Sizes are from the models' authors (their ``config.json``); weights are random. Every model is built as
``transformers`` makes it, in bf16 with SDPA attention, and gives the loss itself: ``model(**batch).loss``.
"""

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph.errors import unknown_name

WEIGHT_SEED, BATCH_SEED = 0, 1

#: Share of the tokens that a masked language model is asked for: ModernBERT was trained with 0.3.
MASKED = 0.3


@dataclass(frozen=True)
class Model:
    """A model and its batch. ``config``: name of the class in ``transformers``; ``sizes``: what it is given.

    ``seq_len``: tokens in a sequence; for images the patches and the class token.
    """

    config: str
    sizes: dict[str, Any]
    batch_size: int
    seq_len: int
    task: str = "causal"
    """A key of ``TASKS``."""

    @property
    def unit(self) -> str:
        """What its speed is counted in."""
        return "images" if self.task == "images" else "tokens"

    @property
    def units(self) -> int:
        """How many of them a batch has."""
        return self.batch_size if self.task == "images" else self.batch_size * self.seq_len


#: Name -> model. Those called ``-debug`` take seconds on a CPU. GPT-2 is without dropout, as models are trained
#: now: three masks a layer would be most of eager's time. qwen3-moe has few experts, and fits one GPU.
MODELS = {
    name: Model(**fields)
    for name, fields in json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8")).items()
}


def model_names(words: Sequence[str]) -> list[str]:
    """``words``, each once. Raises ValueError, in one line with the models there are, for one that is none of them and
    for no name at all."""
    if not words:
        raise ValueError(f"no model given: name one or more of {', '.join(MODELS)}")
    for word in words:
        if word not in MODELS:
            nearest = unknown_name("model", word, MODELS)
            raise ValueError(f"{nearest}; allowed: {', '.join(MODELS)}" if "did you" in str(nearest) else str(nearest))
    return list(dict.fromkeys(words))


def require_transformers() -> None:
    """Raises ValueError, in one line, where the package is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("bench model measures models of transformers, which is missing: pip install 'stepgraph[hf]'")


def build(name: str, device: torch.device) -> nn.Module:
    """The model in bf16 on ``device``, training, its weights the same in every process on such a device."""
    import transformers

    model = MODELS[name]
    config = getattr(transformers, model.config)(**model.sizes)
    kind = getattr(transformers, TASKS[model.task].auto_class)
    torch.manual_seed(WEIGHT_SEED)
    with device:  # billions of normal numbers take a CPU a minute
        built = kind.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return built.to(device).train()


def batch_of(name: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The batch as keyword arguments of the model, the same in every process. It is random, so that a step always has
    something to learn."""
    generator = torch.Generator().manual_seed(BATCH_SEED)
    batch = TASKS[MODELS[name].task].batch(MODELS[name], generator)
    return {key: value.to(device) for key, value in batch.items()}


def _causal(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(model.sizes["vocab_size"], (model.batch_size, model.seq_len), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    batch = _causal(model, generator)
    asked = torch.rand(batch["labels"].shape, generator=generator) < MASKED
    batch["labels"][~asked] = -100
    return batch


def _images(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    side = model.sizes["image_size"]
    pixels = torch.randn(model.batch_size, model.sizes["num_channels"], side, side, generator=generator)
    labels = torch.randint(model.sizes["num_labels"], (model.batch_size,), generator=generator)
    return {"pixel_values": pixels.to(torch.bfloat16), "labels": labels}


@dataclass(frozen=True)
class Task:
    """What a model learns. ``auto_class``: its head in ``transformers``; ``batch(model, generator)``: its batch."""

    auto_class: str
    batch: Callable[[Model, torch.Generator], dict[str, torch.Tensor]]


TASKS = {
    "causal": Task("AutoModelForCausalLM", _causal),
    "masked": Task("AutoModelForMaskedLM", _masked),
    "images": Task("AutoModelForImageClassification", _images),
}
