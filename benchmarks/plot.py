"""Draws the pictures of this folder: bars of providers, models compared with the best alternative, and each norm's
share of the speed of a copy, shape by shape.

python benchmarks/plot.py FILE.json ... PNG       # records of one benchmark; needs matplotlib
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepgraph.bench.model.table import ratios
from stepgraph.bench.norm.results import OURS, Comparison, NormRow, comparisons
from stepgraph.bench.results import kind_of, read
from stepgraph.bench.rows import Row, best_compile, title, where
from stepgraph.bench.train.results import OURS as STEPGRAPH
from stepgraph.bench.train.results import PEER, TrainRow, ratio

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
OURS_COLOR, _PEER, _EAGER = "#2f6fb5", "#a9b8c9", "#cfd6de"

Panel = tuple[str, str, Sequence[Any]]  # title, device, rows


@dataclass(frozen=True)
class Bars:
    """What a bar is: ``value(row, ms)`` of a row whose step takes ``ms``. ``unit``: of the axis. ``text(row, rows)``:
    the text next to a bar."""

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


#: Colour and marker of each provider of `bench model` that runs no stepgraph.
_OTHERS = {"eager": ("#9aa5b1", "o"), "liger": ("#c58f2c", "s"), "compile": ("#3f9b6c", "^")}


def model_chart(records: Sequence[tuple[dict[str, Any], dict[str, Any], Sequence[Row]]], png: Path) -> None:
    """Draws one row per model, with each provider's speed over that of the fastest but stepgraph, and writes ``png``.

    A line joins stepgraph's slowest and fastest round. Raises ValueError for a model that stepgraph or all others did
    not run.
    """
    measured = [(model, env, settings, [row for row in rows if row.model == model and row.step_ms])
                for env, settings, rows in records for model in settings["models"]]  # fmt: skip
    measured = [(*words, rows, ratios(words[0], rows)) for *words, rows in measured]
    if missing := [model for model, *_, found in measured if found.speed is None]:
        raise ValueError(f"no ratio for {', '.join(missing)}: stepgraph or every alternative did not run")
    measured.sort(key=lambda entry: entry[-1].speed)
    figure = Figure(figsize=(10, 0.36 * len(measured) + 1.1), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, (_, _, _, rows, found) in enumerate(measured):
        best = next(row.step_ms for row in rows if row.provider == found.best)
        for row in rows:
            if row.provider == STEPGRAPH:
                axes.barh(place, best / row.step_ms, height=0.62, color=OURS_COLOR, label=STEPGRAPH, zorder=1)
                axes.plot([best / ms for ms in (min(row.step_ms_all), max(row.step_ms_all))], [place] * 2, color=INK)
                end = best / min(row.step_ms_all)
                axes.annotate(f"{found.speed:.2f}x", (end, place), (6, 0), textcoords="offset points", va="center",
                              color=INK, weight="bold")  # fmt: skip
            elif row.provider in _OTHERS:
                color, marker = _OTHERS[row.provider]
                axes.plot(best / row.step_ms, place, marker, color=color, markeredgecolor="white", markersize=8,
                          label=row.provider if row.provider != "compile" else "torch.compile")  # fmt: skip
    axes.set_yticks(range(len(measured)), [title(model, settings) for model, _, settings, *_ in measured])
    axes.axvline(1, color=MUTED, linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.12 * max(found.speed for *_, found in measured))
    _, env, settings, *_ = measured[0]
    style(axes, "Speed of a training step, relative to the fastest alternative", where(env, settings))
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(labels.values(), labels.keys(), loc="lower right", frameon=False, fontsize=9)
    figure.savefig(png)


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


#: Colour and marker of each peer, in the order of the record.
_PEERS = [
    *(("#9aa5b1", "v"), ("#c58f2c", "s"), ("#8a5a12", "D"), ("#3f9b6c", "^")),
    *(("#b0508f", "P"), ("#7a66c2", "X"), ("#c0594a", "*")),
]

#: The timing that is drawn where a record holds several.
_TIMINGS = ("graph", "do_bench", "wall")

#: With more shapes than this only the first of each row length is named.
_MOST_NAMES = 48

Record = tuple[dict[str, Any], dict[str, Any], Sequence[NormRow]]  # environment, settings, rows


def norm_chart(records: Sequence[Record], png: Path) -> None:
    """Draws a panel for each op of each record, percent of copy against shape, and writes ``png``. Needs no display.

    Raises ValueError if nothing was measured.
    """
    panels = [
        (f"{op}, {settings['dtype']}, {timing}", where(env, settings), shapes, settings["providers"])
        for env, settings, rows in records
        for (op, timing), shapes in comparisons(rows).items()
        if timing == next(name for name in _TIMINGS if name in settings["timings"])
    ]
    if not panels:
        raise ValueError("no norm was measured in these records: nothing to draw")
    longest = max(len(shapes) for _, _, shapes, _ in panels)
    width = min(18.0, max(9.0, 0.28 * longest + 2))
    figure = Figure(figsize=(width, 4.3 * len(panels)), dpi=120, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12, hspace=0.04)
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (heading, device, shapes, providers) in zip(all_axes, panels, strict=True):
        _lines(axes, shapes, providers)
        style(axes, heading, device)
    figure.savefig(png)


def _lines(axes: Axes, shapes: Sequence[Comparison], providers: Sequence[str]) -> None:
    lengths = [shape.rows[0].n for shape in shapes]
    styles = dict(zip((name for name in providers if name != OURS), cycle(_PEERS), strict=False))
    if OURS in providers:
        styles[OURS] = OURS_COLOR, "o"  # last, and so on top
    for name, (color, marker) in styles.items():
        places: list[float] = []
        percents: list[float] = []
        for place, shape in enumerate(shapes):
            if place and lengths[place] != lengths[place - 1]:
                places.append(place - 0.5)
                percents.append(float("nan"))  # the line breaks where the row length changes
            row = shape.row(name)
            places.append(place)
            percents.append(row.pct_copy if row and row.ms else float("nan"))
        axes.plot(
            places,
            percents,
            color=color,
            marker=marker,
            markersize=5 if name == OURS else 3.5,
            linewidth=2 if name == OURS else 1,
            label=name,
        )
    axes.axhline(100, color=MUTED, linewidth=0.8, linestyle="--")
    if len(shapes) <= _MOST_NAMES:
        axes.set_xticks(range(len(shapes)), [shape.shape for shape in shapes], rotation=60, ha="right", fontsize=8)
        axes.set_xlabel("rows x row length", color=INK)
    else:
        firsts = [place for place, n in enumerate(lengths) if place == 0 or n != lengths[place - 1]]
        axes.set_xticks(firsts, [str(lengths[place]) for place in firsts], rotation=60, ha="right", fontsize=8)
        axes.set_xlabel("row length; within one, more rows to the right", color=INK)
    for place in range(1, len(shapes)):
        if lengths[place] != lengths[place - 1]:
            axes.axvline(place - 0.5, color=GRID, linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("% of copy", color=INK)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def _step_text(row: Row, rows: Sequence[Row]) -> str:
    best = best_compile(rows)
    ours = row.provider.startswith("stepgraph") and best is not None
    return f"{row.step_ms:.4g} ms" + (f"   {best.step_ms / row.step_ms:.2f}x torch.compile" if ours else "")


def _train_text(row: TrainRow, rows: Sequence[TrainRow]) -> str:
    used = "" if row.mfu is None else f"   MFU {row.mfu:.1%}"
    times = ratio(rows) if row.provider == STEPGRAPH else None
    return f"{row.tokens_per_s_per_gpu:,.0f}{used}" + ("" if times is None else f"   {times:.2f}x {PEER}")


#: The `Bars` of each benchmark.
_BARS = {
    "step": Bars("ms per training step, shorter is faster", lambda row, ms: ms, _step_text),
    "train": Bars(
        "tokens per second and device, longer is faster",
        lambda row, ms: row.tokens_per_s_per_gpu * row.step_ms / ms,
        _train_text,
    ),
}


def main(words: list[str]) -> None:
    """``words``: the records, and the picture to write."""
    *files, png = map(Path, words)
    records = [read(file) for file in files]
    kinds = {kind_of(settings) for _, settings, _ in records}
    if len(kinds) != 1:
        raise SystemExit("give the records of one benchmark, then the picture")
    (kind,) = kinds
    if kind == "norm":
        return norm_chart(records, png)
    if kind == "model":
        return model_chart(records, png)
    panels = [
        (title(model, settings), where(env, settings), [row for row in rows if row.model == model])
        for env, settings, rows in records
        for model in settings["models"]
    ]
    return bar_chart(panels, _BARS[kind], png)


if __name__ == "__main__":
    main(sys.argv[1:])
