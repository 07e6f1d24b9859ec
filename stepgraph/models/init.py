"""Initial weights: every number is a function of the seed, its parameter's name and its position in the parameter.

So a rank that holds a shard of a parameter can fill the shard alone, with the numbers of the whole model.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

#: Numbers drawn from one seed of the generator; for a shard, only the chunks that it touches are drawn.
CHUNK = 2**18
#: Numbers drawn before they are copied to their parameter: 64 MiB.
STAGED = 2**24


@dataclass(frozen=True)
class Part:
    """A process's shard of a parameter: ``tensor`` is ``whole[region]``, with ``region`` as (start, stop) in each
    dimension of the whole, whose shape is ``shape``."""

    tensor: torch.Tensor
    shape: torch.Size
    region: tuple[tuple[int, int], ...]


@torch.no_grad()
def init_parameters(
    model: nn.Module, n_layers: int, seed: int | None = None, parts: Mapping[str, Part] | None = None
) -> None:
    """Fill ``model``'s parameters in place; those on the meta device are left alone.

    Matrices are N(0, 0.02); matrices that write to the residual stream (``o_proj``, ``down_proj``) are scaled by ``1 /
    sqrt(2 * n_layers)``, so that the stream's variance does not grow with depth. Vectors are one.

    Numbers are drawn in fp32 on the CPU, by all its cores, and copied: a seed gives the same model on every device.
    Without ``seed``, torch's default CPU generator draws one. ``parts``: this process's shard of each parameter, by
    name; None: it holds all parameters whole.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, section 2.3.
    """
    residual_std = 0.02 / math.sqrt(2 * n_layers)
    found = parts if parts is not None else {name: whole_part(param) for name, param in model.named_parameters()}
    real = {name: part for name, part in found.items() if not part.tensor.is_meta}
    if seed is None and real:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    staging = _Staging(any(part.tensor.is_cuda for part in real.values()))
    with ThreadPoolExecutor(_threads()) as pool:
        for name, part in real.items():
            if len(part.shape) == 1:
                part.tensor.fill_(1.0)
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            _fill_normal(part, std, f"{seed}/{name}", pool, staging)


def whole_part(param: torch.Tensor) -> Part:
    """The shard of a process that holds all of ``param``."""
    return Part(param, param.shape, tuple((0, size) for size in param.shape))


def _threads() -> int:
    """Threads to draw with: the machine's, divided by the processes that torchrun started on it."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class _Staging:
    """Two alternating buffers to draw into: while a GPU copies one, the other fills. For GPUs they are pinned."""

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._buffers = [torch.empty(0, device="cpu"), torch.empty(0, device="cpu")]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def take(self, size: int) -> torch.Tensor:
        """(size,) fp32 on the CPU, free to write."""
        self._buffers.reverse()
        self._copied.reverse()
        if self._copied[0] is not None:
            self._copied[0].synchronize()
        if self._buffers[0].numel() < size:
            self._buffers[0] = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=self._pinned)
        return self._buffers[0][:size]

    def copy(self, values: torch.Tensor, target: torch.Tensor, columns: tuple[slice, ...]) -> None:
        """Copies the columns of ``values``, in the buffer that `take` gave last, to ``target``. A GPU gets whole rows:
        it slices and rounds them faster than the host, which draws the next in that time."""
        there = values.to(target.device, non_blocking=True)
        target.copy_(there[(slice(None), *columns)])
        if target.is_cuda:
            self._copied[0] = torch.cuda.Event()
            self._copied[0].record(torch.cuda.current_stream(target.device))


def _fill_normal(part: Part, std: float, key: str, pool: ThreadPoolExecutor, staging: _Staging) -> None:
    """Fill ``part`` with its numbers, N(0, std). Whole rows are drawn, some at a time, and sliced to its columns."""
    (first, last), row = part.region[0], math.prod(part.shape[1:])
    columns = tuple(slice(low, high) for low, high in part.region[1:])
    rows = max(1, STAGED // max(1, row))
    for top in range(first, last, rows):
        bottom = min(last, top + rows)
        drawn = staging.take((bottom - top) * row)
        _draw(drawn, top * row, part.shape[0] * row, std, key, pool)
        staging.copy(drawn.view(bottom - top, *part.shape[1:]), part.tensor[top - first : bottom - first], columns)


def _draw(drawn: torch.Tensor, start: int, end: int, std: float, key: str, pool: ThreadPoolExecutor) -> None:
    """Draw the numbers of a parameter of ``end`` elements, from element ``start`` on, into ``drawn``."""
    stop = start + drawn.numel()

    def draw(chunk: int) -> None:
        begin = chunk * CHUNK
        size = min(CHUNK, end - begin)
        low, high = max(start, begin), min(stop, begin + size)
        place = drawn[low - start : high - start]
        # A chunk needed only in part is drawn whole, in memory of its own.
        whole = place if high - low == size else torch.empty(size, dtype=torch.float32, device="cpu")
        # torch's CPU generator uses 32 bits of a seed. A few hundred of a 405B model's million chunks share a seed.
        digest = hashlib.blake2b(f"{key}/{chunk}".encode(), digest_size=4).digest()
        whole.normal_(0.0, std, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))
        if whole is not place:
            place.copy_(whole[low - begin : high - begin])

    chunks = range(start // CHUNK, -(-stop // CHUNK)) if stop > start else range(0)
    list(pool.map(draw, chunks))
