"""What every benchmark of a training step records per provider, and how it reports a provider's end in one line."""

import dataclasses
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: Seconds between two lines about a provider that is waited for.
SPEAKS_EVERY_S = 30.0


@dataclass(kw_only=True)
class ProviderRow:
    """One model under one provider. What was not or cannot be measured is null."""

    model: str
    """Name of the preset, or of the model."""
    provider: str
    """A name of the benchmark's ``PROVIDERS``."""
    step_ms: float | None = None
    """Median time of a step, ms."""
    step_ms_all: list[float] = dataclasses.field(default_factory=list)
    """What that is the median of, ms: the median step of each repeat, or each step, on its slowest rank."""
    peak_mem_gib: float | None = None
    """CUDA: most memory that torch's allocator reserved, GiB; of ``bench model`` since the model was built. CPU: growth
    of the process's peak resident memory since then, or since its imports; compilers included. ``bench train``: see
    `TrainRow`."""
    losses: list[float | None] = dataclasses.field(default_factory=list)
    """Losses that are compared, nats per token; null where not finite."""
    first_step_s: float | None = None
    """To the end of the first step, s, capture and compilation included: from the built model, over ranks from the
    start of the processes."""
    capture_s: float | None = None
    """stepgraph: capture and passes, s, compilers left out."""
    compile_s: float | None = None
    """stepgraph: compilers and recording of CUDA graphs, s. Others that compile: the first step, less a step."""
    passes: list[str] | None = None
    """stepgraph: what each pass did, line by line."""
    versions: dict[str, Any] | None = None
    """Versions of packages in the provider's process."""
    unavailable: str | None = None
    """Why the provider was not measured, in one line: it is not installed, or cannot do this work. No failure."""
    error: str | None = None
    """Why it failed, in one line. Figures taken before are kept."""
    disagreement: str | None = None
    """Which loss is not that of the provider compared with, in one line."""


@dataclass(kw_only=True)
class Row(ProviderRow):
    """One model under one provider of ``bench step`` or ``bench model``. What was not or cannot be measured is null."""

    host_ms: float | None = None
    """CUDA: time until the call of a step returns, ms, from an idle device."""
    tokens_per_s: float | None = None
    """``bench step``: tokens per second at ``step_ms``."""
    step_mem_gib: float | None = None
    """CPU: most bytes of tensors that a step has alive beyond those alive between steps, GiB."""
    loss: float | None = None
    """Loss of the first step, nats per token."""
    spread: list[float] | None = None
    """eager: how far each of ``losses`` moves, as a share of it, by rounding alone; the most of a few trials."""
    per_s: float | None = None
    """``bench model``: tokens, of ViT images, per second at ``step_ms``."""
    peak_allocated_gib: float | None = None
    """CUDA: the same as ``peak_mem_gib``, of tensors alive."""
    params: int | None = None
    """Parameters of the model, tied ones once."""
    cuda_graphs: str | None = None
    """stepgraph on CUDA: how many CUDA graphs the step is, and how many nodes stay on the host."""
    where: dict[str, dict[str, float]] | None = None
    """``bench model``, stepgraph on CUDA: ``ms`` of a step by kind of kernel, and ``limit``, ms of its products and
    attention at the rates measured on such a GPU."""
    profile_error: str | None = None
    """Why there is no ``where``, in one line; the other figures are right."""
    notes: list[str] | None = None
    """stepgraph: what else passes noted, at most 20 lines."""


def note(row: ProviderRow, text: str) -> None:
    """Print how far the provider of ``row`` is; on stderr, so that stdout holds the result alone."""
    print(f"{row.model} | {row.provider} | {text}", file=sys.stderr, flush=True)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the ``values`` that are not None; None if there is none."""
    found = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None
