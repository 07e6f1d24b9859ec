"""How the models' weights start."""

import math

import torch
from torch import nn


@torch.no_grad()
def init_parameters(model: nn.Module, n_layers: int, generator: torch.Generator | None = None) -> None:
    """Fill ``model``'s parameters in place, in construction order.

    Matrices are N(0, 0.02); those that write to the residual stream (``o_proj``, ``down_proj``) are scaled by
    ``1 / sqrt(2 * n_layers)``, so that the stream's variance does not grow with depth. Vectors (norm weights and
    residual scales) are one.

    Without a generator, numbers come from the default one of each parameter's device. With one, they are drawn in fp32
    on the generator's device and copied: the same seed then gives the same model on every device.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, section 2.3.
    """
    residual_std = 0.02 / math.sqrt(2 * n_layers)
    for name, param in model.named_parameters():
        if param.ndim == 1:
            param.fill_(1.0)
            continue
        std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        if generator is None:
            param.normal_(0.0, std)
        else:
            drawn = torch.empty(param.shape, dtype=torch.float32, device=generator.device)
            param.copy_(drawn.normal_(0.0, std, generator=generator))
