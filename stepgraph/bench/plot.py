"""A measurement of providers as a bar chart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
OURS_COLOR, _PEER, _EAGER = "#2f6fb5", "#a9b8c9", "#cfd6de"

Panel = tuple[str, str, Sequence[Any]]  # title, device, rows


@dataclass(frozen=True)
class Bars:
    """What a bar is: ``value(row, ms)`` of a row whose step takes ``ms``. ``unit``: of the axis. ``text(row, rows)``:
    what stands next to a bar."""

    unit: str
    value: Callable[[Any, float], float]
    text: Callable[[Any, Sequence[Any]], str]


def bar_chart(panels: Sequence[Panel], kind: Bars, png: Path) -> None:
    """Draws a panel for each model with a bar for each provider that ran, and writes ``png``. Needs no display.

    A bar is the median step's value, its whisker that of the fastest and the slowest. Raises ValueError if nothing ran.
    """
    panels = [(*words, [row for row in rows if row.step_ms]) for *words, rows in panels]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise ValueError("no provider ran in these records: nothing to draw")
    heights = [len(rows) + 1.6 for *_, rows in panels]  # in bars; the rest is the panel's title and axis
    figure = Figure(figsize=(9, 0.42 * sum(heights) + 0.5), dpi=150, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12, hspace=0.04)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (heading, device, rows) in zip(all_axes, panels, strict=True):
        for place, row in enumerate(rows):
            _bar(axes, place, row, kind, kind.text(row, rows))
        longest = max(kind.value(row, ms) for row in rows for ms in row.step_ms_all)
        axes.set_xlim(0, 1.45 * longest)  # room for the labels
        axes.set_yticks(range(len(rows)), [row.provider for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)  # the first provider on top
        style(axes, heading, device)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
    all_axes[-1].set_xlabel(f"{kind.unit} (dark line: fastest to slowest)", color=INK)
    figure.savefig(png)


def _bar(axes: Axes, place: int, row: Any, kind: Bars, text: str) -> None:
    """One bar from zero, a line from the lowest to the highest value over it, and ``text`` to its right."""
    value, whisker = kind.value(row, row.step_ms), [kind.value(row, bound(row.step_ms_all)) for bound in (min, max)]
    ours = row.provider.startswith("stepgraph")
    color = OURS_COLOR if ours else _EAGER if row.provider == "eager" else _PEER
    axes.barh(place, value, height=0.68, color=color)
    axes.plot(whisker, [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
    axes.annotate(
        text,
        xy=(max(*whisker, value), place),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=INK,
        fontsize=9.5,
        weight="bold" if ours else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},  # over the grid
    )


def style(axes: Axes, heading: str, device: str) -> None:
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
