"""The tables of ``stepgraph bench model``: one per model, and a summary of all models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.bench.rows import (
    Row,
    align,
    geometric_mean,
    in_markdown,
    of_eager,
    problems_of,
    shown,
    step_ms,
    times_faster,
)


def model_section(model: str, env: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row]) -> str:
    """Everything about one model in Markdown. ``rows``: that model's."""
    columns = {
        "provider": lambda row: row.provider,
        "step ms": step_ms,
        "vs eager": times_faster(of_eager(rows)),
        f"{settings['models'][model]['unit']}/s": shown("per_s", ",.0f"),
    }
    if settings["device"] == "cuda":
        columns["reserved GiB"] = shown("peak_mem_gib", ".2f")
        columns["allocated GiB"] = shown("peak_allocated_gib", ".2f")
    else:
        columns["peak GiB"] = shown("peak_mem_gib", ".2f")
    columns["first step s"] = shown("first_step_s", ".1f")
    columns["loss"] = lambda row: f"{row.losses[0]:.4f}" if row.losses and row.losses[0] is not None else ""
    notes = _notes(settings, settings["models"][model], rows)
    return in_markdown(model, env, settings, columns, rows, notes)


def _notes(settings: dict[str, Any], chosen: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    notes = [
        f"step ms: median of {settings['rounds']} medians of {settings['steps']} steps; one process per provider",
        "every provider: bf16 parameters, SDPA attention, no dropout, clipping, torch's fused AdamW",
    ]
    at_once = settings["together"] * settings.get("models_together", 1)  # older records lack the second
    if at_once > 1:
        notes.append(f"up to {at_once} providers built and compiled at once: first steps took longer")
    notes.append(chosen["losses"])
    return (
        notes
        + problems_of(rows)
        + [
            f"{row.provider}: {row.cuda_graphs}; capture {row.capture_s:.1f} s, compile {row.compile_s:.1f} s"
            for row in rows
            if row.cuda_graphs
        ]
        + [f"{row.provider}: {where_line(row)}" for row in rows if row.where and row.step_ms]
        + [f"{row.provider}, profiled, failed: {row.profile_error}" for row in rows if row.profile_error]
    )


def where_line(row: Row) -> str:
    """Where the step of ``row`` spends its time: its limit, and what it takes beyond, by kind, the most first."""
    spent, limit = row.where["ms"], row.where["limit"]
    beyond = [(f"{kind} {ms - limit.get(kind, 0.0):.1f}", ms - limit.get(kind, 0.0)) for kind, ms in spent.items()]
    parts = [text for text, ms in sorted(beyond, key=lambda part: -part[1]) if abs(ms) >= 0.05]
    least = sum(limit.values())
    known = f"{least / row.step_ms:.0%} is products and attention at their measured peak ({least:.1f} ms); beyond: "
    return f"{known if limit else ''}{', '.join(parts)} ms"


def summary(records: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """Over all models: ours against the best of the others, model by model, with geometric means."""
    found = [ratios(model, rows) for model, rows in records]
    columns = ["model", "best other", "speed", "memory", "first step", f"{RUN:,} steps"]
    figures = [[getattr(r, name) for r in found] for name in ("speed", "memory", "first_step", "run")]
    cells = [
        [r.model, r.best or "", *map(_times, row)] for r, row in zip(found, zip(*figures, strict=True), strict=True)
    ]
    cells.append(["geometric mean", "", *(_times(geometric_mean(values)) for values in figures)])
    worst = [
        pick((value for value in values if value is not None), default=None)
        for pick, values in zip((min, max, max, min), figures, strict=True)
    ]
    cells.append(["least gain", "", *map(_times, worst)])
    lines = [
        f"### {OURS} and the others",
        "",
        *align(columns, cells),
        "",
        "- speed: over the fastest other provider; memory: over the least that any other takes; first step: "
        f"over that of torch.compile by default; {RUN:,} steps: over the fastest such run, compiling included; least "
        "gain: the worst of each column",
    ]
    shown = [
        (model, row) for model, rows in records for row in rows if row.provider == OURS and row.where and row.step_ms
    ]
    lines += [f"- {model}, {row.step_ms:.4g} ms: {where_line(row)}" for model, row in shown]
    why = f"not compared, as {OURS} or all others failed, disagreed or did not run"
    return "\n".join(lines + [f"- {r.model}: {why}" for r in found if r.speed is None]) + "\n"


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value is not None else ""


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
    step over that of ``torch.compile`` by default, a run over the fastest run. Wrong losses count for nothing."""
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
