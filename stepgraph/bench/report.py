"""``stepgraph bench report``: recorded measurements as Markdown tables, and as a chart."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph.bench.model.table import model_section, summary
from stepgraph.bench.norm.table import norm_section
from stepgraph.bench.results import kind_of, read
from stepgraph.bench.table import section
from stepgraph.bench.train.table import train_section
from stepgraph.config.command_line import parse, require_chart


@dataclass(frozen=True)
class ReportOptions:
    """Show what stepgraph bench step, train, model or norm recorded with --json."""

    plot: Path | None = None
    """Also draw them, as a PNG, into this file: step times, tokens or images a second, or percent of copy bandwidth."""


def main(argv: list[str]) -> int:
    """Prints the tables of the records named first in ``argv``. Raises ValueError, in one line, for a bad record."""
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    options = parse(
        ReportOptions(),
        argv[count:],
        usage="stepgraph bench report FILE.json ...",
        description=ReportOptions.__doc__ or "",
    )
    if not count:
        raise ValueError("no record given: write stepgraph bench report FILE.json ... [--plot PNG]")
    require_chart(options.plot)
    records = [read(Path(word)) for word in argv[:count]]
    kinds = [kind_of(settings) for _, settings, _ in records]
    if options.plot is not None and len(set(kinds)) > 1:
        given = " and of bench ".join(sorted(set(kinds)))
        raise ValueError(f"--plot draws records of one benchmark: give those of bench {given} apart")
    for kind, record in zip(kinds, records, strict=True):
        print(*_sections(kind, *record), sep="\n")
    if options.plot is not None:
        _draw(kinds[0], records, options.plot)
    return 0


def _sections(kind: str, env: dict[str, Any], settings: dict[str, Any], rows: list[Any]) -> list[str]:
    """What a record says, in Markdown."""
    if kind == "norm":
        return [norm_section(env, settings, rows)]
    if kind == "model":
        models = {model: _of(model, rows) for model in settings["models"]}
        return [*(model_section(model, env, settings, of) for model, of in models.items()), summary([*models.items()])]
    show = train_section if kind == "train" else section
    return [show(model, env, settings, _of(model, rows)) for model in settings["models"]]


def _draw(kind: str, records: list[Any], png: Path) -> None:
    panels = [(m, env, settings, _of(m, rows)) for env, settings, rows in records for m in settings.get("models", ())]
    match kind:  # matplotlib is slow to load
        case "model":
            from stepgraph.bench.model.plot import model_chart

            model_chart(panels, png)
        case "norm":
            from stepgraph.bench.norm.plot import norm_chart

            norm_chart(records, png)
        case "train":
            from stepgraph.bench.train.plot import train_chart

            train_chart(records, png)
        case _:
            from stepgraph.bench.plot import bar_chart

            bar_chart(panels, png)


def _of(model: str, rows: list[Any]) -> list[Any]:
    return [row for row in rows if row.model == model]
