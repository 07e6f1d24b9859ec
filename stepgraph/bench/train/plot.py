"""The tokens per second of ``stepgraph bench train`` as a bar chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from stepgraph.bench.plot import OURS_COLOR, PEER_COLOR, bar, bars
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
        ours = row.provider == OURS
        label = f"{speed:,.0f}"
        if row.mfu is not None:
            label += f"   MFU {row.mfu:.1%}"
        if ours and times is not None:
            label += f"   {times:.2f}x {PEER}"
        bar(axes, place, speed, (low, high), OURS_COLOR if ours else PEER_COLOR, label, bold=ours)
    axes.set_xlim(0, 1.5 * max(row.tokens_per_s_per_gpu for row in rows))  # room for the labels
