"""Draws the loss curve of a run."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_INK, _MUTED, _GRID = "#1f2933", "#6b7785", "#e4e7eb"
_TRAIN, _VAL, _UNIGRAM = "#2f6fb5", "#d1495b", "#6b7785"


def loss_curve(records: Sequence[Mapping[str, Any]], png: Path, unigram_entropy: float | None) -> None:
    """Draws the training loss, its running mean and the validation losses over the steps of ``records``, with
    ``unigram_entropy`` (nats per token) as a dashed line, and writes ``png``. Needs no display.

    Steps without a finite loss are left out; a run without any gives empty axes.
    """
    train = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    val = [(record["step"], record["val_loss"]) for record in records if record.get("val_loss") is not None]

    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.margins(x=0.03)
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color=_TRAIN, alpha=0.35, linewidth=0.8, label="training, each step")
        axes.plot(steps, running_mean(losses), color=_TRAIN, linewidth=2.2, label="training, running mean")
    if val:
        axes.plot(*zip(*val, strict=True), "o", color=_VAL, markersize=7, markeredgecolor="white", label="validation")
        step, loss = val[-1]
        _label(axes, f"{loss:.3f}", step, loss, "center", _VAL)
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color=_UNIGRAM, linestyle=(0, (5, 3)), linewidth=1.4)
        _label(axes, f"unigram entropy {unigram_entropy:.3f}", axes.get_xlim()[1], unigram_entropy, "right", _UNIGRAM)
    _style(axes)
    figure.savefig(png)


def running_mean(values: Sequence[float]) -> list[float]:
    """Mean over a window centred on each value, a twenty-fifth of the run long, and shorter near the ends.

    Centred, so that it does not lag behind a falling loss.
    """
    sums = [0.0, *itertools.accumulate(values)]
    reach = len(values) // 50
    means = []
    for index in range(len(values)):
        side = min(reach, index, len(values) - 1 - index)
        means.append((sums[index + side + 1] - sums[index - side]) / (2 * side + 1))
    return means


def _label(axes: Axes, text: str, x: float, y: float, align: str, color: str) -> None:
    """Writes ``text`` just above the point (x, y)."""
    axes.annotate(
        text, xy=(x, y), xytext=(0, 7), textcoords="offset points", ha=align, color=color, weight="bold", fontsize=9.5
    )


def _style(axes: Axes) -> None:
    """Labels with units, quiet frame and grid."""
    axes.set_title("Loss", loc="left", color=_INK, fontsize=13, weight="bold", pad=10)
    axes.set_xlabel("step (optimizer updates)", color=_INK)
    axes.set_ylabel("cross-entropy (nats per token)", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_MUTED)
    axes.tick_params(colors=_INK, length=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=_INK)
