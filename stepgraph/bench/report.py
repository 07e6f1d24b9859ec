"""``stepgraph bench report``: recorded measurements as Markdown tables, and as a chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgraph.bench.model.table import model_section, ratios, summary
from stepgraph.bench.norm.results import norm_section
from stepgraph.bench.results import kind_of, read
from stepgraph.bench.rows import Row, best_compile, section, title, where
from stepgraph.bench.train.results import OURS, PEER, TrainRow, ratio, train_section
from stepgraph.config.command_line import parse, require_chart
from stepgraph.config.commands import ReportOptions


def main(argv: list[str]) -> int:
    """Prints the tables of the records named first in ``argv``. Raises ValueError, in one line, for a bad record."""
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    (options,) = parse(
        argv[count:], "stepgraph bench report FILE.json ...", ReportOptions(), description=ReportOptions.__doc__ or ""
    )
    if not count:
        raise ValueError("no record given: write stepgraph bench report FILE.json ... [--plot PNG]")
    require_chart(options.plot)
    records = [read(Path(word)) for word in argv[:count]]
    kinds = [kind_of(settings) for _, settings, _ in records]
    if options.plot is not None and len(set(kinds)) > 1:
        given = " and of bench ".join(sorted(set(kinds)))
        raise ValueError(f"--plot draws records of one benchmark: give the records of bench {given} separately")
    for kind, record in zip(kinds, records, strict=True):
        print(*_sections(kind, *record), sep="\n")
    measured = [record for kind, record in zip(kinds, records, strict=True) if kind == "model"]
    if measured:  # one summary of all records
        print(summary([(model, _of(model, rows)) for _, settings, rows in measured for model in settings["models"]]))
    if options.plot is not None:
        _draw(kinds[0], records, options.plot)
    return 0


def _sections(kind: str, env: dict[str, Any], settings: dict[str, Any], rows: list[Any]) -> list[str]:
    if kind == "norm":
        return [norm_section(env, settings, rows)]
    show = {"train": train_section, "model": model_section}.get(kind, section)
    return [show(model, env, settings, _of(model, rows)) for model in settings["models"]]


def _draw(kind: str, records: list[Any], png: Path) -> None:
    from stepgraph.bench.plot import Bars, bar_chart  # matplotlib is slow to load

    if kind == "norm":
        from stepgraph.bench.plot import norm_chart

        return norm_chart(records, png)
    panels = [
        (title(model, settings), where(env, settings), _of(model, rows))
        for env, settings, rows in records
        for model in settings["models"]
    ]
    return bar_chart(panels, Bars(*_BARS[kind]), png)


def _step_text(row: Row, rows: Sequence[Row]) -> str:
    best = best_compile(rows)
    ours = row.provider.startswith("stepgraph") and best is not None
    return f"{row.step_ms:.4g} ms" + (f"   {best.step_ms / row.step_ms:.2f}x torch.compile" if ours else "")


def _train_text(row: TrainRow, rows: Sequence[TrainRow]) -> str:
    used = "" if row.mfu is None else f"   MFU {row.mfu:.1%}"
    times = ratio(rows) if row.provider == OURS else None
    return f"{row.tokens_per_s_per_gpu:,.0f}{used}" + ("" if times is None else f"   {times:.2f}x {PEER}")


def _model_text(row: Row, rows: Sequence[Row]) -> str:
    against = ratios(row.model, rows)
    times = against.speed if row.provider == OURS else None
    return f"{row.per_s:,.0f}" + ("" if times is None else f"   {times:.2f}x {against.best}")


#: The `Bars` of each benchmark.
_BARS = {
    "step": ("ms per training step, shorter is faster", lambda row, ms: ms, _step_text),
    "train": (
        "tokens per second and device, longer is faster",
        lambda row, ms: row.tokens_per_s_per_gpu * row.step_ms / ms,
        _train_text,
    ),
    "model": (
        "tokens (ViT: images) per second, longer is faster",
        lambda row, ms: row.per_s * row.step_ms / ms,
        _model_text,
    ),
}


def _of(model: str, rows: list[Any]) -> list[Any]:
    return [row for row in rows if row.model == model]
