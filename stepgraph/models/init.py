"""How the models' weights start: every weight is a function of the seed, its parameter's name and its place in it.

So whoever holds a part of a parameter can fill that part alone, and gets what a whole model would have there.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

#: Numbers drawn from one state of the generator; a part of a parameter is drawn in the chunks that it touches.
CHUNK = 2**18


@dataclass(frozen=True)
class Part:
    """What one process holds of a parameter: ``tensor`` is ``whole[region]``, with ``region`` as (start, stop) in each
    dimension of the whole, whose shape is ``shape``."""

    tensor: torch.Tensor
    shape: torch.Size
    region: tuple[tuple[int, int], ...]


@torch.no_grad()
def init_parameters(
    model: nn.Module, n_layers: int, seed: int | None = None, parts: Mapping[str, Part] | None = None
) -> None:
    """Fill ``model``'s parameters in place; those on the meta device are left alone.

    Matrices are N(0, 0.02); those that write to the residual stream (``o_proj``, ``down_proj``) are scaled by
    ``1 / sqrt(2 * n_layers)``, so that the stream's variance does not grow with depth. Vectors (norm weights and
    residual scales) are one.

    Numbers are drawn in fp32 on the CPU and copied: a seed gives the same model on every device. Without one, torch's
    default CPU generator chooses it. ``parts``: what this process holds of each parameter by name; None: all of it.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, section 2.3.
    """
    residual_std = 0.02 / math.sqrt(2 * n_layers)
    found = parts if parts is not None else {name: whole_part(param) for name, param in model.named_parameters()}
    real = {name: part for name, part in found.items() if not part.tensor.is_meta}
    if seed is None and real:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    with ThreadPoolExecutor(_threads()) as pool:
        for name, part in real.items():
            if len(part.shape) == 1:
                part.tensor.fill_(1.0)
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            part.tensor.copy_(_normal(part, std, f"{seed}/{name}", pool))


def whole_part(param: torch.Tensor) -> Part:
    """A process that holds all of ``param``."""
    return Part(param, param.shape, tuple((0, size) for size in param.shape))


def _threads() -> int:
    """Threads to draw with: the machine's, shared between the processes that torchrun started on it."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _normal(part: Part, std: float, key: str, pool: ThreadPoolExecutor) -> torch.Tensor:
    """The part's numbers, N(0, std), fp32 on the CPU. Rows are drawn whole, and columns cut from them."""
    (first, last), row = part.region[0], math.prod(part.shape[1:])
    start, stop, end = first * row, last * row, part.shape[0] * row
    drawn = torch.empty(stop - start, dtype=torch.float32, device="cpu")
    base = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")

    def draw(chunk: int) -> None:
        begin = chunk * CHUNK
        size = min(CHUNK, end - begin)
        # torch's CPU generator takes 32 bits of a seed: consecutive ones keep a parameter's chunks apart.
        generator = torch.Generator().manual_seed((base + chunk) % 2**32)
        values = torch.empty(size, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
        low, high = max(start, begin), min(stop, begin + size)
        drawn[low - start : high - start] = values[low - begin : high - begin]

    chunks = range(start // CHUNK, -(-stop // CHUNK)) if stop > start else range(0)
    list(pool.map(draw, chunks))
    columns = tuple(slice(low, high) for low, high in part.region[1:])
    return drawn.view(last - first, *part.shape[1:])[(slice(None), *columns)]
