"""The options that the benchmarks of a training step share, and what all their providers are given."""

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from stepgraph.config.idle import refuse_idle
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.errors import unknown_name
from stepgraph.options import StepOptions, values

#: Small and constant: at a preset's own peak rate, without its warm-up, a few steps on one batch are chaotic, and
#: rounding alone would drive the providers' losses apart.
LEARNING_RATE = 1e-4

MAX_GRAD_NORM = 1.0

#: Every data-parallel rank trains on one batch of its own again and again: a loss that falls shows that updates work.
BATCH_SEED = 1


def preset(name: str, **changed: Any) -> TrainConfig:
    """The preset's run with the default options of a step, no mesh, and ``changed``."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return dataclasses.replace(PRESETS[name](), **values(StepOptions(), StepOptions) | changed)


def described(kind: type, known: Collection[str]) -> str:
    """What ``--help`` says of the benchmark with the options ``kind``. ``known``: the providers that there are."""
    return f"{kind.__doc__} Presets: {', '.join(PRESETS)}. Providers: {', '.join(known)}."


def run_of(config: TrainConfig, words: list[str], **changed: Any) -> TrainConfig:
    """The run whose step is measured: ``config``, which ``words`` set, ``changed``. Raises ValueError, in one line, for
    an option that cannot be right."""
    refuse_idle(config, words)
    config = dataclasses.replace(config, lr=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM, **changed)
    config.validate()
    return config


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
