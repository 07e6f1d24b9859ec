"""``stepgraph bench report``: recorded measurements as Markdown tables, and as a bar chart."""

from dataclasses import dataclass
from pathlib import Path

from stepgraph.bench.results import read
from stepgraph.bench.table import section
from stepgraph.options import parse


@dataclass(frozen=True)
class ReportOptions:
    """Show what stepgraph bench step --json recorded."""

    plot: Path | None = None
    """Also draw the step times, as a PNG, into this file."""


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
    panels = []
    for record in (read(Path(word)) for word in argv[:count]):
        env, settings, rows = record
        for model in settings["models"]:
            mine = [row for row in rows if row.model == model]
            print(section(model, env, settings, mine))
            panels.append((model, env, settings, mine))
    if options.plot is not None:
        from stepgraph.bench.plot import bar_chart  # matplotlib is slow to load

        bar_chart(panels, options.plot)
    return 0
