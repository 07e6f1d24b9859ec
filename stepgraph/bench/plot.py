"""The step times of ``stepgraph bench step`` as a bar chart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stepgraph.bench.results import Row
from stepgraph.bench.table import best_compile, title, where

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
OURS_COLOR, PEER_COLOR, _EAGER = "#2f6fb5", "#a9b8c9", "#cfd6de"

Panel = tuple[str, dict[str, Any], dict[str, Any], Sequence[Row]]  # model, environment, settings, its rows


def bar_chart(panels: Sequence[Panel], png: Path) -> None:
    """Draws a panel for each model with a bar for each provider that ran, and writes ``png``. Needs no display.

    A bar is the median step in ms, its whisker the fastest and the slowest repeat. Raises ValueError if nothing ran.
    """
    label = "ms per training step, shorter is faster (dark line: fastest to slowest repeat)"
    named = [(title(model, settings), where(env, settings), rows) for model, env, settings, rows in panels]
    bars(named, _bars, label, png)


def bars(panels: Sequence[tuple[str, str, Sequence[Any]]], draw: Callable, label: str, png: Path) -> None:
    """One panel for each (title, device, rows) below another: ``draw(axes, rows)`` of the rows that have a ``step_ms``.

    Raises ValueError if none has.
    """
    panels = [(*words, [row for row in rows if row.step_ms]) for *words, rows in panels]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise ValueError("no provider ran in these records: nothing to draw")
    heights = [len(rows) + 1.6 for *_, rows in panels]  # in bars; the rest is the panel's title and axis
    figure = Figure(figsize=(9, 0.42 * sum(heights) + 0.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12, hspace=0.04)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (heading, device, rows) in zip(all_axes, panels, strict=True):
        draw(axes, rows)
        axes.set_yticks(range(len(rows)), [row.provider for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)  # the first provider on top
        dress(axes, heading, device)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
    all_axes[-1].set_xlabel(label, color=INK)
    figure.savefig(png)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    best = best_compile(rows)
    longest = max(max(row.step_ms_all) for row in rows)
    axes.set_xlim(0, 1.3 * longest)  # room for the labels
    for place, row in enumerate(rows):
        ours = row.provider.startswith("stepgraph")
        color = OURS_COLOR if ours else _EAGER if row.provider == "eager" else PEER_COLOR
        label = f"{row.step_ms:.4g} ms"
        if ours and best:
            label += f"   {best.step_ms / row.step_ms:.2f}x torch.compile"
        bar(axes, place, row.step_ms, (min(row.step_ms_all), max(row.step_ms_all)), color, label, bold=ours)


def bar(
    axes: Axes, place: int, value: float, whisker: tuple[float, float], color: str, label: str, *, bold: bool
) -> None:
    """One bar from zero to ``value``, a line from low to high over it, and ``label`` to its right."""
    axes.barh(place, value, height=0.68, color=color)
    axes.plot(whisker, [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
    axes.annotate(
        label,
        xy=(max(whisker[1], value), place),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=INK,
        fontsize=9.5,
        weight="bold" if bold else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},  # over the grid
    )


def dress(axes: Axes, heading: str, device: str) -> None:
    """Title, device and a quiet frame."""
    axes.annotate(
        heading, (0, 1), xytext=(0, 22), xycoords="axes fraction", textcoords="offset points", color=INK,
        fontsize=12, weight="bold",
    )  # fmt: skip
    axes.annotate(
        device, (0, 1), xytext=(0, 7), xycoords="axes fraction", textcoords="offset points", color=MUTED, fontsize=9
    )
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(MUTED)
    axes.tick_params(colors=INK, length=0)
