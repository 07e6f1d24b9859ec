"""``stepgraph bench report``: recorded measurements as Markdown tables."""

from pathlib import Path
from typing import Any

from stepgraph.bench.model.table import model_section, summary
from stepgraph.bench.norm.results import norm_section
from stepgraph.bench.results import kind_of, read
from stepgraph.bench.rows import section
from stepgraph.bench.train.results import train_section
from stepgraph.config.command_line import parse
from stepgraph.config.commands import ReportOptions


def main(argv: list[str]) -> int:
    """Prints the tables of the records named first in ``argv``. Raises ValueError, in one line, for a bad record."""
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    parse(
        argv[count:], "stepgraph bench report FILE.json ...", ReportOptions(), description=ReportOptions.__doc__ or ""
    )
    if not count:
        raise ValueError("no record given: write stepgraph bench report FILE.json ...")
    records = [read(Path(word)) for word in argv[:count]]
    kinds = [kind_of(settings) for _, settings, _ in records]
    for kind, record in zip(kinds, records, strict=True):
        print(*_sections(kind, *record), sep="\n")
    measured = [record for kind, record in zip(kinds, records, strict=True) if kind == "model"]
    if measured:  # one summary of all records
        print(summary([(model, _of(model, rows)) for _, settings, rows in measured for model in settings["models"]]))
    return 0


def _sections(kind: str, env: dict[str, Any], settings: dict[str, Any], rows: list[Any]) -> list[str]:
    if kind == "norm":
        return [norm_section(env, settings, rows)]
    show = {"train": train_section, "model": model_section}.get(kind, section)
    return [show(model, env, settings, _of(model, rows)) for model in settings["models"]]


def _of(model: str, rows: list[Any]) -> list[Any]:
    return [row for row in rows if row.model == model]
