"""``stepgraph bench report``: recorded measurements as Markdown tables, and as a chart."""

from dataclasses import dataclass
from pathlib import Path

from stepgraph.bench.norm_table import norm_section
from stepgraph.bench.results import is_norm, read
from stepgraph.bench.table import section
from stepgraph.options import parse


@dataclass(frozen=True)
class ReportOptions:
    """Show what stepgraph bench step or bench norm recorded with --json."""

    plot: Path | None = None
    """Also draw them, as a PNG, into this file: step times, or percent of copy bandwidth against shape."""


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
    records = [read(Path(word)) for word in argv[:count]]
    norms = [is_norm(settings) for _, settings, _ in records]
    if options.plot is not None and len(set(norms)) > 1:
        raise ValueError("--plot draws records of one benchmark: give those of bench step and of bench norm apart")
    panels = []
    for env, settings, rows in records:
        if is_norm(settings):
            print(norm_section(env, settings, rows))
        for model in settings.get("models", ()):
            mine = [row for row in rows if row.model == model]
            print(section(model, env, settings, mine))
            panels.append((model, env, settings, mine))
    if options.plot is not None:
        # matplotlib is slow to load
        if all(norms):
            from stepgraph.bench.norm_plot import norm_chart

            norm_chart(records, options.plot)
        else:
            from stepgraph.bench.plot import bar_chart

            bar_chart(panels, options.plot)
    return 0
