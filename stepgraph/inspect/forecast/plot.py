"""Draws the schedule of a pipeline: a row for each rank, its computations over time, and the bubble between them."""

from collections import defaultdict
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from stepgraph.config.train import TrainConfig
from stepgraph.inspect.forecast.pipeline import PipelineForecast
from stepgraph.inspect.forecast.tables import time_text
from stepgraph.parallel.pipeline.schedules import SCHEDULES, rank_of
from stepgraph.parallel.pipeline.timeline import PipelineTime

_INK, _MUTED, _BUBBLE = "#1f2933", "#6b7785", "#e9ecef"
#: By kind: its name in the legend, the colour on a rank's first stage, and the paler one on its second.
_KINDS = {
    "forward": ("forward", "#2f6fb5", "#8fb6de"),
    "backward": ("backward", "#c2414f", "#e59aa2"),
    "backward_input": ("input gradients", "#e08a1e", "#f4c98b"),
    "backward_weight": ("weight gradients", "#3d8b5f", "#9dcbb0"),
    "gather": ("parameters gathered", "#7a5aa6", "#c0aedb"),
    "reduce": ("gradients reduced", "#4b5563", "#aeb4bd"),
}
_WIDTH, _WIDEST, _BOX = 12.0, 24.0, 0.18  # inches: of a figure, which is wider where boxes would be below _BOX
_ROW, _HIGHEST, _LEGIBLE = 0.36, 12.0, 0.14  # inches: of a row, of all rows at most, and of one with numbers at least
_DIGIT = 4.5  # points that a digit of a microbatch's number is wide
_FONT = 7


def schedule_figure(result: PipelineForecast) -> Figure:
    """The forecast of the run's own schedule.

    A box is one computation, the number in it its microbatch, left out where it has no room. The title has the share of
    the bubble, the line below it the step's time.
    """
    config, found = result.config, result.schedules[result.chosen]
    below = (
        f"{config.preset} on {config.mesh_spec.size:,} x {result.gpu.name} ({config.mesh_spec}), {_tokens(config)}; "
        f"{time_text(found.time.seconds)}, then {time_text(found.update_s)} for the update"
    )
    return _figure(found.name, f"{found.name}: bubble {found.time.bubble:.1%}", below, {"forecast": found.time})


def measured_figure(config: TrainConfig, times: Mapping[str, PipelineTime]) -> Figure:
    """The schedule of ``config``'s pipeline as it ran, below its forecast: ``times`` by label, each with its own time
    axis. The bubble is `PipelineTime.bubble`; the update, which is not drawn, follows."""
    shares = ", ".join(f"{time.bubble:.1%} {what.partition(' ')[0]}" for what, time in times.items())
    below = f"{config.preset} on {config.mesh_spec.size:,} ranks ({config.mesh_spec}), {_tokens(config)}"
    return _figure(config.pipeline_schedule, f"{config.pipeline_schedule}: bubble {shares}", below, times)


def _tokens(config: TrainConfig) -> str:
    return f"{config.accumulate} microbatches of {config.batch_size} x {config.seq_len}"


def _figure(schedule: str, title: str, below: str, times: Mapping[str, PipelineTime]) -> Figure:
    first = next(iter(times.values()))
    ranks = first.ranks
    row = min(_ROW, _HIGHEST / ranks / len(times))  # many ranks share the height of a page
    width = min(max(_WIDTH, _BOX * len(first.spans) / ranks), _WIDEST)
    figure = Figure(figsize=(width, (row * ranks + 0.5) * len(times) + 0.9), dpi=150, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    panels = figure.subplots(len(times), squeeze=False)[:, 0]
    chunks: dict[str, set[int]] = {}
    for axes, (what, time) in zip(panels, times.items(), strict=True):
        _style(axes, schedule, time, what)
        narrowest = min(span.end - span.start for span in time.spans) / time.seconds * width
        chunks |= _boxes(axes, time, border=0.8 if narrowest > 0.05 else 0.0)  # a border would hide narrower boxes
    _entitle(panels[0], title, below)
    _legend(panels[0], chunks)
    figure.draw_without_rendering()  # only then do the axes have their width
    for axes, time in zip(panels, times.values(), strict=True):
        inches = axes.get_window_extent().width / figure.dpi
        _numbers(axes, time, points_per_second=72 * inches / time.seconds, high=row >= _LEGIBLE)
    return figure


def _legend(axes: Axes, chunks: Mapping[str, set[int]]) -> None:
    handles = [Patch(color=first, label=name) for kind, (name, first, _) in _KINDS.items() if kind in chunks]
    handles.append(Patch(color=_BUBBLE, label="bubble"))
    if any(1 in of for of in chunks.values()):
        handles.append(Patch(color=_KINDS["forward"][2], label="paler: a rank's second stage"))
    scale = axes.figure.dpi_scale_trans
    below = axes.transAxes + ScaledTranslation(0, -15 / 72, scale)  # in a line with the axis' name
    axes.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(1, 0), bbox_transform=below, borderaxespad=0, borderpad=0.2,
        ncols=len(handles), frameon=False, labelcolor=_INK, fontsize=9, handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip


def _boxes(axes: Axes, time: PipelineTime, border: float) -> dict[str, set[int]]:
    """Draw every computation. Returns the stages of a rank, 0 or 1, that have each kind."""
    places: dict[tuple[int, str, int], list[tuple[float, float]]] = defaultdict(list)
    for span in time.spans:
        kind, stage, _ = span.work
        places[span.rank, kind, int(stage >= time.ranks)].append((span.start, span.end - span.start))
    axes.barh(range(time.ranks), time.seconds, height=0.84, color=_BUBBLE, zorder=1)
    chunks: dict[str, set[int]] = defaultdict(set)
    for (rank, kind, chunk), boxes in places.items():
        style = {"facecolor": _KINDS[kind][1 + chunk], "edgecolor": "white", "linewidth": border, "zorder": 2}
        axes.broken_barh(boxes, (rank - 0.42, 0.84), antialiased=border > 0, **style)
        chunks[kind].add(chunk)
    return chunks


def _numbers(axes: Axes, time: PipelineTime, points_per_second: float, *, high: bool) -> None:
    """Write the microbatch on each box that is wide enough; on none where rows are not ``high`` enough."""
    if not high:
        return
    of_microbatches = [span for span in time.spans if span.work[2] is not None]
    room = _DIGIT * len(str(max(span.work[2] for span in of_microbatches))) + 3
    for span in of_microbatches:
        kind, stage, microbatch = span.work
        if (span.end - span.start) * points_per_second >= room:
            color = _INK if stage >= time.ranks or kind == "backward_input" else "white"
            middle = (span.start + span.end) / 2
            axes.text(
                middle, span.rank, str(microbatch), ha="center", va="center_baseline", fontsize=_FONT, color=color
            )


def _style(axes: Axes, schedule: str, time: PipelineTime, what: str) -> None:
    """The names of rows, and a time axis with its unit."""
    ranks = time.ranks
    where = [rank_of(SCHEDULES[schedule], ranks, stage) for stage in range(ranks * SCHEDULES[schedule].chunks)]
    names = []
    for rank in range(ranks):
        own = [str(stage) for stage, r in enumerate(where) if r == rank]
        names.append(f"rank {rank}, {'stages' if own[1:] else 'stage'} {' and '.join(own)}")
    shown = range(0, ranks, -(-ranks // 40))  # names that do not touch
    axes.set_yticks(shown, [names[rank] for rank in shown], fontsize=8.5)
    axes.set_ylim(ranks - 0.5, -0.5)  # the first rank on top
    axes.set_xlim(0, time.seconds)
    unit, scale = ("s", 1.0) if time.seconds >= 1 else ("ms", 1e3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds * scale:g}"))
    axes.set_xlabel(f"time in the step ({unit}, {what})", color=_INK, fontsize=9, loc="left")
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="x", colors=_INK, length=0, labelsize=9)
    axes.tick_params(axis="y", colors=_INK, length=0)


def _entitle(axes: Axes, title: str, below: str) -> None:
    axes.set_title(below, loc="left", color=_MUTED, fontsize=9)
    axes.annotate(
        title, (0, 1), xytext=(0, 24), xycoords="axes fraction", textcoords="offset points", color=_INK, fontsize=13,
        weight="bold",
    )  # fmt: skip
