"""The tokens per second of ``stepgraph bench train`` as a bar chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stepgraph.bench.plot import GRID, INK, OURS_COLOR, PEER_COLOR, dress
from stepgraph.bench.train_results import OURS, PEER, TrainRow, ratio
from stepgraph.bench.train_table import train_title, train_where

Record = tuple[dict[str, Any], dict[str, Any], Sequence[TrainRow]]  # environment, settings, rows


def train_chart(records: Sequence[Record], png: Path) -> None:
    """Draws a panel for each record with a bar for each provider that ran, and writes ``png``. Needs no display.

    A bar is tokens a second and device at the median step, its whisker the slowest and the fastest step. Raises
    ValueError if nothing ran.
    """
    panels = [(env, settings, [row for row in rows if row.step_ms]) for env, settings, rows in records]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise ValueError("no provider ran in these records: nothing to draw")
    heights = [len(rows) + 1.6 for *_, rows in panels]  # in bars; the rest is the panel's title and axis
    figure = Figure(figsize=(9, 0.42 * sum(heights) + 0.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12, hspace=0.04)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (env, settings, rows) in zip(all_axes, panels, strict=True):
        _bars(axes, rows)
        dress(axes, train_title(rows[0].model, settings), train_where(env, settings))
        axes.grid(axis="x", color=GRID, linewidth=0.8)
    label = "tokens a second and device, longer is faster (dark line: slowest to fastest step)"
    all_axes[-1].set_xlabel(label, color=INK)
    figure.savefig(png)


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
