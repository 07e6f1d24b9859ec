"""The options that the benchmarks of a training step share, and what all their providers are given."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro
from torch import nn

from stepgraph.config.command_line import parse, refuse_idle, require_folder
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import ModelConfig, TrainConfig
from stepgraph.errors import unknown_name
from stepgraph.passes import StepOptions

#: Small and constant: at a preset's own peak rate, without its warm-up, a few steps on one batch are chaotic, and
#: rounding alone would drive the providers' losses apart.
LEARNING_RATE = 1e-4

MAX_GRAD_NORM = 1.0

#: Every data-parallel rank trains on one batch of its own again and again: a loss that falls shows that updates work.
BATCH_SEED = 1

DEFAULT_PRESET = "llama3-debug"


@dataclass(frozen=True)
class BenchOptions(StepOptions):
    """What the benchmarks of a preset's training step share. The options of the step are for stepgraph's providers."""

    batch_size: int = 8
    """Sequences in the batch; over several devices in that of one data-parallel rank."""

    seq_len: int = 256
    """Tokens in a sequence."""

    precision: Literal["fp32", "bf16-autocast", "bf16"] = "fp32"
    """As in stepgraph train."""

    providers: str = ""
    """Names with commas between."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU, otherwise cpu."""

    json: Path | None = None
    """Write the record to this file, after each provider; stepgraph bench report reads it."""

    model: ModelConfig = dataclasses.field(default_factory=lambda: PRESETS[DEFAULT_PRESET]().model)
    """Shape of the model."""

    preset: Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress] = DEFAULT_PRESET
    """Name of the preset that the options started from."""

    def run(self, *names: str, **values: Any) -> TrainConfig:
        """The run whose step is measured: the preset's with the options that all benchmarks share, those called
        ``names``, and ``values``. Raises ValueError, in one line, for an option that cannot be right."""
        require_folder(self.json)
        step = (field.name for field in dataclasses.fields(StepOptions))
        taken = {name: getattr(self, name) for name in (*step, "batch_size", "seq_len", "precision", "model", *names)}
        config = dataclasses.replace(
            PRESETS[self.preset](), **taken, lr=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM, **values
        )
        config.validate()
        return config


Options = TypeVar("Options", bound=BenchOptions)


def of_preset(kind: type[Options], name: str, *names: str) -> Options:
    """Options of ``kind`` with the preset's model, batch, precision, and what ``names`` say."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    taken = ("model", "batch_size", "seq_len", "precision", *names)
    return kind(preset=name, **{field: getattr(PRESETS[name](), field) for field in taken})


def parse_options(default: Options, words: list[str], usage: str, known: Collection[str]) -> Options:
    """``default`` with what ``words`` set. Raises ValueError, in one line, for an unknown option or provider and for a
    bad value. ``known``: the providers that there are."""
    text = f"{type(default).__doc__} Presets: {', '.join(PRESETS)}. Providers: {', '.join(known)}."
    options = parse(default, words, usage=usage, description=text)
    provider_names(options.providers, known)
    options.validate_step()
    refuse_idle(options, words)
    return options


def provider_names(text: str, known: Collection[str]) -> list[str]:
    """The providers of ``--providers``, in order, each once. Raises ValueError for one that is not ``known``."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise unknown_name("provider", name, known)
    return names


def random_batch(config: TrainConfig, place: int = 0) -> dict[str, torch.Tensor]:
    """``tokens`` and ``targets``, int64 (accumulate * B, T) on the CPU, of the data-parallel rank at ``place``: the
    same in every process. They are random, so a step always has something to learn."""
    generator = torch.Generator().manual_seed(BATCH_SEED + place)
    shape = (config.accumulate * config.batch_size, config.seq_len)
    return {k: torch.randint(config.model.vocab_size, shape, generator=generator) for k in ("tokens", "targets")}


def fused_adamw(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every provider."""
    return torch.optim.AdamW(model.parameters(), config.lr, config.betas, config.eps, config.weight_decay, fused=True)
