"""What ``stepgraph bench model`` found: ours over the best of the others."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.bench.rows import Row

OURS = "stepgraph"

#: Steps of a run whose time is compared from the built model on, capture and compilers included.
RUN = 1000


@dataclass(frozen=True)
class Ratios:
    """Ours against the best of the others for one model, each None where a side is missing. Speed, and the time of a
    run of ``RUN`` steps: above 1 is faster; memory and first step: below 1 is less."""

    model: str
    best: str | None
    speed: float | None
    memory: float | None
    first_step: float | None
    run: float | None = None


def ratios(model: str, rows: Sequence[Row]) -> Ratios:
    """For one model's ``rows``: speed over the fastest other provider, memory over the least of any other, the first
    step over that of ``torch.compile`` by default, a run over the fastest run. A provider with wrong losses counts for
    nothing."""
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
        min(map(_run_s, others)) / _run_s(ours),
    )


def _run_s(row: Row) -> float:
    return row.first_step_s + (RUN - 1) * row.step_ms / 1000
