"""The tokens per second of ``stepgraph bench train`` as a bar chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from stepgraph.bench.plot import INK, OURS_COLOR, PEER_COLOR, bars
from stepgraph.bench.train.results import OURS, PEER, TrainRow, ratio
from stepgraph.bench.train.table import train_title, train_where

Record = tuple[dict[str, Any], dict[str, Any], Sequence[TrainRow]]  # environment, settings, rows


def train_chart(records: Sequence[Record], png: Path) -> None:
    """Draws a panel for each record with a bar for each provider that ran, and writes ``png``. Needs no display.

    A bar is tokens a second and device at the median step, its whisker the slowest and the fastest step. Raises
    ValueError if nothing ran.
    """
    label = "tokens a second and device, longer is faster (dark line: slowest to fastest step)"
    panels = []
    for env, settings, rows in records:
        if rows:
            panels.append((train_title(rows[0].model, settings), train_where(env, settings), rows))
    bars(panels, _bars, label, png)


def _bars(axes: Axes, rows: Sequence[TrainRow]) -> None:
    times = ratio(rows)
    for place, row in enumerate(rows):
        speed = row.tokens_per_s_per_gpu
        low, high = (speed * row.step_ms / bound(row.step_ms_all) for bound in (max, min))
        axes.barh(place, speed, height=0.68, color=OURS_COLOR if row.provider == OURS else PEER_COLOR)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
        label = f"{speed:,.0f}"
        if row.mfu is not None:
            label += f"   MFU {row.mfu:.1%}"
        if row.provider == OURS and times is not None:
            label += f"   {times:.2f}x {PEER}"
        axes.annotate(
            label,
            xy=(max(high, speed), place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9.5,
            weight="bold" if row.provider == OURS else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},  # over the grid
        )
    axes.set_xlim(0, 1.5 * max(row.tokens_per_s_per_gpu for row in rows))  # room for the labels
    axes.set_yticks(range(len(rows)), [row.provider for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first provider on top
