"""The measured models: configurations of ``transformers``, written out so that nothing is downloaded.

Sizes are those that the models' authors published (their ``config.json``); weights are random. Every model is built as
``transformers`` makes it, in bf16 with SDPA attention, and gives the loss itself: ``model(**batch).loss``.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def _qwen3(**sizes: Any) -> dict[str, Any]:
    shared = {
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    return shared | sizes


#: Llama 3.2's rotary embeddings, made for 128k tokens.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Qwen3-MoE with few experts, which fits one GPU with its optimizer.
_QWEN3_MOE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_LLAMA32_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_GEMMA3_1B = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,  # five layers of six; rotary bases 10,000 there and 1,000,000 in the sixth, by default
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
#: Without dropout, as language models are pre-trained since: three masks a layer would be most of eager's time.
_GPT2_MEDIUM = {
    "vocab_size": 50257,
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_SMOLLM3_3B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000.0,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
_MODERNBERT = {"vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128}
_VIT = {"image_size": 224, "patch_size": 16, "num_channels": 3, "num_labels": 1000}

_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

#: Name -> model. Those called ``-debug`` take seconds on a CPU.
MODELS: dict[str, Model] = {
    "qwen3-0.6b": Model("Qwen3Config", _qwen3(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28), 8, 2048),
    "qwen3-1.7b": Model("Qwen3Config", _qwen3(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28), 4, 2048),
    "llama-3.2-1b": Model("LlamaConfig", _LLAMA32_1B, 4, 4096),
    "gemma3-1b": Model("Gemma3TextConfig", _GEMMA3_1B, 4, 2048),
    "gpt2-medium": Model("GPT2Config", _GPT2_MEDIUM, 8, 2048),
    "smollm3-3b": Model("SmolLM3Config", _SMOLLM3_3B, 2, 2048),
    "qwen3-moe": Model("Qwen3MoeConfig", _QWEN3_MOE, 4, 2048),
    "modernbert-base": Model(
        "ModernBertConfig",
        _MODERNBERT
        | {"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12},
        16,
        1024,
        "masked",
    ),
    "modernbert-large": Model(
        "ModernBertConfig",
        _MODERNBERT
        | {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16},
        16,
        1024,
        "masked",
    ),
    "vit-l": Model(
        "ViTConfig",
        _VIT | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        128,
        197,
        "images",
    ),
    "qwen3-debug": Model("Qwen3Config", _qwen3(**_TINY, **_TINY_HEADS), 2, 32),
    "gemma3-debug": Model(
        "Gemma3TextConfig", _GEMMA3_1B | _TINY | _TINY_HEADS | {"sliding_window": 8, "query_pre_attn_scalar": 16}, 2, 32
    ),
    "gpt2-debug": Model(
        "GPT2Config",
        _GPT2_MEDIUM
        | {"vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
        2,
        32,
    ),
    "qwen3-moe-debug": Model(
        "Qwen3MoeConfig",
        _QWEN3_MOE | _TINY | _TINY_HEADS | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
        2,
        32,
    ),
    "modernbert-debug": Model(
        "ModernBertConfig",
        _MODERNBERT
        | _TINY
        | {"num_attention_heads": 4, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
        | {"bos_token_id": 1, "eos_token_id": 2},
        2,
        32,
        "masked",
    ),
    "vit-debug": Model(
        "ViTConfig",
        {"image_size": 32, "patch_size": 16, "num_channels": 3, "num_labels": 10}
        | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        2,
        5,
        "images",
    ),
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
