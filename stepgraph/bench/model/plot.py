"""The speeds of ``stepgraph bench model`` as a bar chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from stepgraph.bench.model.results import OURS, ModelRow, ratios
from stepgraph.bench.model.table import model_title, model_where
from stepgraph.bench.plot import OURS_COLOR, PEER_COLOR, bar, bars

Panel = tuple[str, dict[str, Any], dict[str, Any], Sequence[ModelRow]]  # model, environment, settings, its rows


def model_chart(panels: Sequence[Panel], png: Path) -> None:
    """Draws a panel for each model with a bar for each provider that ran, and writes ``png``. Needs no display.

    A bar is tokens or images a second, its whisker the slowest and the fastest round. Raises ValueError if nothing ran.
    """
    label = "tokens (ViT: images) per second, longer is faster (dark line: slowest to fastest round)"
    named = [(model_title(model, settings), model_where(env, settings), rows) for model, env, settings, rows in panels]
    bars(named, _bars, label, png)


def _bars(axes: Axes, rows: Sequence[ModelRow]) -> None:
    against = ratios(rows[0].model, rows)
    axes.set_xlim(0, 1.45 * max(row.per_s for row in rows))  # room for the labels
    for place, row in enumerate(rows):
        low, high = (row.per_s * row.step_ms / bound(row.step_ms_all) for bound in (max, min))
        ours = row.provider.startswith(OURS)
        label = f"{row.per_s:,.0f}"
        if row.provider == OURS and against.speed is not None:
            label += f"   {against.speed:.2f}x {against.best}"
        bar(axes, place, row.per_s, (low, high), OURS_COLOR if ours else PEER_COLOR, label, bold=ours)
