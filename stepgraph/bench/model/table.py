"""The tables of ``stepgraph bench model``: one a model, and the summary over all of them."""

from collections.abc import Sequence
from typing import Any

from stepgraph.bench.model.results import OURS, ModelRow, geometric_mean, ratios
from stepgraph.bench.table import align, where


def model_title(model: str, settings: dict[str, Any]) -> str:
    """The model and its batch, such as ``qwen3-0.6b, batch 8 x 2048, bf16``."""
    chosen = settings["models"][model]
    return f"{model}, batch {chosen['batch_size']} x {chosen['seq_len']}, bf16"


def model_where(env: dict[str, Any], settings: dict[str, Any]) -> str:
    """The device and the versions in one line."""
    return f"{where(env, settings)}, transformers {settings['transformers']}"


def model_section(model: str, env: dict[str, Any], settings: dict[str, Any], rows: Sequence[ModelRow]) -> str:
    """Everything about one model in Markdown. ``rows``: that model's."""
    chosen = settings["models"][model]
    eager = next((row.step_ms for row in rows if row.provider == "eager"), None)
    columns = ["provider", "step ms", "vs eager", f"{chosen['unit']}/s", "reserved GiB", "allocated GiB"]
    if settings["device"] != "cuda":
        columns[-2:] = ["peak GiB", ""]
    cells = [
        [
            row.provider,
            f"{row.step_ms:.4g}" if row.step_ms else "failed" if row.error else "none",
            f"{eager / row.step_ms:.2f}x" if eager and row.step_ms else "",
            f"{row.per_s:,.0f}" if row.per_s else "",
            f"{row.peak_mem_gib:.2f}" if row.peak_mem_gib is not None else "",
            f"{row.peak_allocated_gib:.2f}" if row.peak_allocated_gib is not None else "",
            f"{row.first_step_s:.1f}" if row.first_step_s is not None else "",
            f"{row.losses[0]:.4f}" if row.losses and row.losses[0] is not None else "",
        ]
        for row in rows
    ]
    columns += ["first step s", "loss"]
    if settings["device"] != "cuda":
        del columns[5]
        for line in cells:
            del line[5]
    lines = [f"### {model_title(model, settings)}", "", model_where(env, settings), "", *align(columns, cells), ""]
    return "\n".join([*lines, *(f"- {note}" for note in _notes(settings, chosen, rows))]) + "\n"


def _notes(settings: dict[str, Any], chosen: dict[str, Any], rows: Sequence[ModelRow]) -> list[str]:
    notes = [
        f"step ms: median of {settings['rounds']} rounds, each the median of {settings['steps']} steps; a process each",
        "every provider: bf16 parameters, SDPA attention, no dropout, clipping, torch's fused AdamW",
    ]
    if settings["together"] > 1:
        notes.append(f"up to {settings['together']} providers built and compiled at once: first steps took longer")
    notes.append(chosen["losses"])
    for row in rows:
        if row.unavailable:
            notes.append(f"{row.provider}: {row.unavailable}")
        if row.error:
            notes.append(f"{row.provider} failed: {row.error}")
        if row.cuda_graphs:
            notes.append(
                f"{row.provider}: {row.cuda_graphs}; capture {row.capture_s:.1f} s, compile {row.compile_s:.1f} s"
            )
    return notes


def summary(records: Sequence[tuple[str, Sequence[ModelRow]]]) -> str:
    """Over all models: ours beside the best of the others, model by model, and geometric means. ``records``: (model,
    its rows)."""
    found = [ratios(model, rows) for model, rows in records]
    columns = ["model", "best other", "speed", "memory", "first step"]
    cells = [[r.model, r.best or "", _times(r.speed), _times(r.memory), _times(r.first_step)] for r in found]
    means = [geometric_mean(getattr(r, name) for r in found) for name in ("speed", "memory", "first_step")]
    cells.append(["geometric mean", "", *map(_times, means)])
    return (
        "\n".join(
            [
                f"### {OURS} beside the others",
                "",
                *align(columns, cells),
                "",
                "- speed: over the fastest other provider; memory: over the least that any other takes; first step: "
                "over that of torch.compile by default",
            ]
            + [
                f"- {r.model}: not compared, as {OURS} or all others failed, disagreed or did not run"
                for r in found
                if r.speed is None
            ]
        )
        + "\n"
    )


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value is not None else ""
