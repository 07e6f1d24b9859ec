"""The measured models: configurations of ``transformers`` and models of `written`, set out in models.json.

Sizes are from the models' authors (their ``config.json``), with fewer layers or experts where the name or ``MODELS``
says so; weights are random. Every model is built as its library makes it, in bf16 with SDPA attention, and gives the
loss itself: ``model(**batch).loss``.

In models.json ``like`` names the entry that one changes, and ``tiny`` what changes for a CPU.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph.bench.model import written
from stepgraph.errors import unknown_name

WEIGHT_SEED, BATCH_SEED = 0, 1

#: Share of the tokens that a masked language model is asked for: ModernBERT was trained with 0.3.
MASKED = 0.3

#: What the name of a model's tiny form ends with.
TINY = "-debug"


@dataclass(frozen=True)
class Model:
    """A model and its batch. ``config``: the class in ``transformers`` or model in `written`; ``sizes``: its arguments.

    ``seq_len``: tokens in a sequence; for images the patches and the class token, for audio the encoder's frames.
    """

    config: str
    sizes: dict[str, Any]
    batch_size: int
    seq_len: int
    gib: float
    """GiB that a compiled step of its takes at most, rounded up: how many models may live at once follows from it."""
    task: str
    """A key of ``TASKS``."""
    target_len: int = 0
    """Tokens that a decoder is asked for."""
    patches: int = 0
    """Patches on a side of the image of each sequence."""
    lora: int = 0
    """Rank of peft's adapters on all linear layers but the head; 0: every parameter is trained."""

    @property
    def unit(self) -> str:
        """What its speed is counted in."""
        return "images" if self.task in ("images", "noise") else "tokens"

    @property
    def units(self) -> int:
        """How many of them a batch has."""
        return self.batch_size * (1 if self.unit == "images" else self.seq_len + self.target_len)


def _changed(entry: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    both = {key: _changed(entry[key], by[key]) for key in by if isinstance(by[key], dict) and key in entry}
    return entry | by | both


def _models() -> Iterator[tuple[str, Model]]:
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8")).items():
        like = entry.pop("like", None)
        entries[name] = fields = _changed(entries[like], entry) if like else entry
        whole = {key: value for key, value in fields.items() if key != "tiny"}
        yield name, Model(**whole)
        yield name + TINY, Model(**_changed(whole, {"batch_size": 2, "seq_len": 32, "gib": 1} | fields["tiny"]))


#: Name -> model; with `TINY` after a name a form of the model that takes seconds on a CPU. No model has dropout, as
#: models are trained now: three masks a layer would be most of GPT-2's eager time. Smaller than its authors', to fit
#: one GPU: qwen3-moe (experts, layers), deepseek-v3-8-layers (32 experts, hidden 1,024), gemma3-4b-12-layers (of 34;
#: without its vision part). mamba2-130m runs transformers' own torch code, with chunks of 64 instead of 256.
MODELS = dict(_models())

#: Those of their authors' sizes, which ``all`` names.
WHOLE = [name for name in MODELS if not name.endswith(TINY)]


def model_names(words: Sequence[str]) -> list[str]:
    """``words``, each once, ``all`` for all of `WHOLE`. Raises ValueError, in one line with the models there are, for
    an unknown name and for none."""
    allowed = f"all, {', '.join(WHOLE)}, and each with {TINY} for its tiny form"
    if not words:
        raise ValueError(f"no model given: name one or more of {allowed}")
    for word in words:
        if word not in MODELS and word != "all":
            said = str(unknown_name("model", word, MODELS))
            raise ValueError(f"{said if 'did you' in said else f'unknown model {word!r}'}; allowed: {allowed}")
    return list(dict.fromkeys(name for word in words for name in (WHOLE if word == "all" else [word])))


def require_packages(names: Sequence[str]) -> None:
    """Raises ValueError, in one line, where a package that a model of ``names`` comes from is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("bench model measures models of transformers, which is missing: pip install 'stepgraph[hf]'")
    adapted = [name for name in names if MODELS[name].lora]
    if adapted and importlib.util.find_spec("peft") is None:
        raise ValueError(f"{adapted[0]} has adapters of peft, which is missing: pip install peft")


def build(name: str, device: torch.device) -> nn.Module:
    """The model in bf16 on ``device``, training, its weights the same in every process on such a device."""
    model = MODELS[name]
    head = TASKS[model.task].auto_class
    torch.manual_seed(WEIGHT_SEED)
    if head is None:
        with device:
            return getattr(written, model.config)(**model.sizes).to(torch.bfloat16).train()
    import transformers

    config = getattr(transformers, model.config)(**model.sizes)
    with device:  # billions of normal numbers take a CPU a minute
        built = getattr(transformers, head).from_config(config, dtype=torch.bfloat16)  # SDPA where there is attention
    return _adapted(built.to(device), model.lora).train()


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    """``model`` with adapters of ``rank``, if any, in bf16 too, as peft makes them."""
    if not rank:
        return model
    import peft

    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)


def batch_of(name: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The batch as keyword arguments of the model, the same in every process. It is random."""
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


def _shifted(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    shape = (model.batch_size, model.seq_len + 1)
    tokens = torch.randint(model.sizes["vocab_size"], shape, generator=generator)
    return {"idx": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _seq2seq(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    inputs, labels = (
        torch.randint(model.sizes["vocab_size"], (model.batch_size, length), generator=generator)
        for length in (model.seq_len, model.target_len)
    )
    return {"input_ids": inputs, "labels": labels}


def _audio(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    labels = _seq2seq(model, generator)["labels"]  # the encoder's convolution halves the frames
    shape = (model.batch_size, model.sizes["num_mel_bins"], 2 * model.seq_len)
    return {"input_features": torch.randn(shape, generator=generator).to(torch.bfloat16), "labels": labels}


def _image_text(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """An image at the start of each sequence, whose tokens (four patches each) have no labels, and text."""
    sizes, count = model.sizes, (model.patches // 2) ** 2
    special = min(value for name, value in sizes.items() if name.endswith("token_id"))
    tokens = torch.randint(special - 10, (model.batch_size, model.seq_len), generator=generator)
    labels, kinds = tokens.clone(), torch.zeros_like(tokens)
    tokens[:, :count], labels[:, :count], kinds[:, :count] = sizes["image_token_id"], -100, 1
    pixels = torch.randn(model.batch_size * model.patches**2, 3 * 2 * 14 * 14, generator=generator)
    return {
        "input_ids": tokens,
        "labels": labels,
        "mm_token_type_ids": kinds,
        "pixel_values": pixels.to(torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, model.patches, model.patches]] * model.batch_size),
    }


def _noise(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    sizes = model.sizes
    shape = (2, model.batch_size, sizes["channels"], sizes["side"], sizes["side"])
    latents, noise = torch.randn(shape, generator=generator).to(torch.bfloat16)
    labels = torch.randint(sizes["classes"], (model.batch_size,), generator=generator)
    t = torch.rand(model.batch_size, generator=generator)
    return {"latents": latents, "noise": noise, "t": t, "labels": labels}


@dataclass(frozen=True)
class Task:
    """What a model learns. ``auto_class``: its head in ``transformers``, None: a model of `written`; ``batch(model,
    generator)``: its batch."""

    auto_class: str | None
    batch: Callable[[Model, torch.Generator], dict[str, torch.Tensor]]


TASKS = {
    "causal": Task("AutoModelForCausalLM", _causal),
    "masked": Task("AutoModelForMaskedLM", _masked),
    "images": Task("AutoModelForImageClassification", _images),
    "seq2seq": Task("AutoModelForSeq2SeqLM", _seq2seq),
    "audio": Task("AutoModelForSpeechSeq2Seq", _audio),
    "image_text": Task("AutoModelForImageTextToText", _image_text),
    "shifted": Task(None, _shifted),
    "noise": Task(None, _noise),
}
