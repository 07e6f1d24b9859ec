"""What ``stepgraph bench model`` found: a row for each model and provider, and ours over the best of the others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log

from stepgraph.bench.rows import ProviderRow

OURS = "stepgraph"


@dataclass(kw_only=True)
class ModelRow(ProviderRow):
    """One model under one provider. What was not or cannot be measured is null."""

    per_s: float | None = None
    """Tokens, of ViT images, per second at ``step_ms``."""
    peak_mem_gib: float | None = None
    """CUDA: most memory that torch's allocator reserved since the model was built, GiB. CPU: growth of the process's
    peak resident memory since then."""
    peak_allocated_gib: float | None = None
    """CUDA: the same of tensors alive."""
    params: int | None = None
    """Parameters of the model, tied ones once."""
    cuda_graphs: str | None = None
    """stepgraph on CUDA: how many CUDA graphs the step is, and how many nodes stay on the host."""
    notes: list[str] | None = None
    """stepgraph: what else passes noted, at most 20 lines."""


@dataclass(frozen=True)
class Ratios:
    """Ours against the best of the others for one model, each None where a side is missing. Speed: above 1 is faster;
    memory and first step: below 1 is less."""

    model: str
    best: str | None
    speed: float | None
    memory: float | None
    first_step: float | None


def ratios(model: str, rows: Sequence[ModelRow]) -> Ratios:
    """For one model's ``rows``: speed over the fastest other provider, memory over the least of any other, and the
    first step over that of ``torch.compile`` by default. A provider with wrong losses counts for nothing."""
    usable = [row for row in rows if row.step_ms and not row.error and not row.disagreement]
    ours = next((row for row in usable if row.provider == OURS), None)
    others = [row for row in usable if not row.provider.startswith(OURS)]
    compiled = next((row for row in others if row.provider == "compile"), None)
    if ours is None or not others:
        return Ratios(model, None, None, None, None)
    best = min(others, key=lambda row: row.step_ms)
    least = min((row.peak_mem_gib for row in others if row.peak_mem_gib), default=None)
    return Ratios(
        model,
        best.provider,
        best.step_ms / ours.step_ms,
        ours.peak_mem_gib / least if least and ours.peak_mem_gib is not None else None,
        ours.first_step_s / compiled.first_step_s if compiled else None,
    )


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the ``values`` that are not None; None if there is none."""
    found = [value for value in values if value is not None]
    return exp(sum(map(log, found)) / len(found)) if found else None
