"""The learning rate of every step: linear warm-up, then cosine, WSD or constant."""

import math

from stepgraph.config.train import TrainConfig


def lr_at(step: int, config: TrainConfig) -> float:
    """Learning rate of update ``step``, counted from 0 to ``config.steps - 1``.

    Warm-up: ``lr * (step + 1) / (warmup_steps + 1)``, never 0, so that no update is wasted and ``step ==
    warmup_steps`` is the first at the peak. With ``p`` the share of the decay that is done, in [0, 1), the rest is

    - cosine: ``low + (lr - low) * (1 + cos(pi * p)) / 2``.
      Source: Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, eq. 5, without restarts.
    - wsd (warm-up, stable, decay): ``lr``, then over the last ``decay_steps`` ``low + (lr - low) * (1 - sqrt(p))``.
      Source: Hu et al. 2024, "MiniCPM", arXiv 2404.06395, for the three phases; Hägele et al. 2024, "Scaling Laws and
      Compute-Optimal Training Beyond Fixed Training Durations", arXiv 2405.18392, for the shape of the decay.
    - constant: ``lr``.

    with ``low = min_lr_ratio * lr``, which step ``config.steps`` would be the first to reach.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    low = config.min_lr_ratio * config.lr
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
        return low + (config.lr - low) * (1 + math.cos(math.pi * done)) / 2
    if config.schedule == "wsd":
        done = max(0.0, (step - (config.steps - config.decay_steps)) / config.decay_steps)
        return low + (config.lr - low) * (1 - math.sqrt(done))
    return config.lr
