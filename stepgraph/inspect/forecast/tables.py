"""The tables of a forecast: columns, sizes and times; and the table of time over peak."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from stepgraph.costs.hardware import ATTENTION_REACHED, MEMORY_REACHED, PRODUCTS_REACHED, Gpu
from stepgraph.costs.timeline import HostCopy
from stepgraph.passes import PassReport, parse_policy

#: Other peaks that are shown, between the least and where all is kept.
_OTHERS = 7


def time_over_peak(
    reports: Iterable[PassReport], memory: str, gpu_bytes: float, microbatches: int
) -> dict[str, Any] | None:
    """What ``memory="peak=..."`` costs a step, and what a smaller or larger peak would change: what `fit_memory`
    reports of the fullest graph, as plain values; None where no peak was asked for.

    ``asked``: bytes. ``chosen``: [bytes at the step's peak, seconds that the step takes longer than if all were kept].
    ``state_s``: those of them that copies of optimizer state take, at every peak here. ``curve``: the same as
    ``chosen`` for other peaks, from where all activations are kept to the least. ``others``: [bytes, seconds more or
    less than what was chosen] of some peaks, the largest first. ``gpu_bytes``: of the GPU's memory.
    """
    policy, reports = parse_policy(memory), list(reports)
    fits = [report for report in reports if report.peak_chosen and report.peak_curve]
    if policy.policy != "peak" or not fits:
        return None
    report = max(fits, key=lambda report: report.peak_chosen[0])
    asked = policy.peak * (gpu_bytes if policy.peak_is_fraction else 2**30)
    state_s = sum(report.added_s for report in reports)
    curve = [(size, state_s + microbatches * seconds) for size, seconds in report.peak_curve]
    chosen, (most, _), (least, _) = report.peak_chosen, curve[0], curve[-1]
    chosen = (chosen[0], state_s + microbatches * chosen[1])
    peaks = [round(most + i * (least - most) / (_OTHERS - 1)) for i in range(_OTHERS)] if most > least else [most]
    others = [(peak, min(s for size, s in curve if size <= peak) - chosen[1]) for peak in peaks]
    return {"asked": round(asked), "state_s": state_s, "chosen": chosen, "curve": curve, "others": others}


def peak_table(found: dict[str, Any]) -> Table:
    """Other peaks and what they would change."""
    added, most = found["chosen"][1], found["curve"][0][0]
    table = new_table("time over peak", [], ["peak", "added to the step", "next to the peak that was asked for"])
    rows = [(size, delta, False) for size, delta in found["others"]] + [(found["asked"], 0.0, True)]
    for size, delta, asked in sorted(rows, key=lambda row: -row[0]):
        change = f"{'-' if delta < 0 else '+'}{time_text(abs(delta))}" if delta else "the same"
        kept = "all but optimizer state" if found["state_s"] else "everything"
        change = (f"asked for, and {kept} is kept" if size >= most else "asked for") if asked else change
        table.add_row(size_text(size), time_text(added + delta), change)
    return table


def offload_text(copies: Iterable[HostCopy]) -> str:
    """The traffic of a step to host memory and back in one line; empty without any."""
    away, back = ([c for c in copies if c.back is way] for way in (False, True))
    if not (away or back):
        return ""
    out, again = (size_text(sum(c.bytes for c in way)) for way in (away, back))
    waits = sum(c.exposed_seconds for c in (*away, *back))
    return (
        f"offload: {out} to the host and {again} back in {len(away) + len(back)} copies of "
        f"{time_text(sum(c.seconds for c in (*away, *back)))}, of which computation waits for {time_text(waits)}"
    )


_PIPE_WIDTH = 1000


def new_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table; the columns ``words`` are aligned left, ``numbers`` right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 0)
    for column in words:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", overflow="fold")
    return table


def new_console() -> Console:
    """Standard output. A pipe has no width, so tables there are as wide as they are; a terminal folds long cells."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    return console


def assumed_rates(gpu: Gpu) -> str:
    """What a forecast for ``gpu`` assumes of its kernels."""
    return (
        f"Forecast for {gpu.name}; nothing was run. Matrix products at {PRODUCTS_REACHED:.0%} of the published FLOP/s, "
        f"attention at its kernels' rates (else {ATTENTION_REACHED:.0%}), other kernels at {MEMORY_REACHED:.1%} of the "
        "memory bandwidth, all measured on H200."
    )


def size_text(size: float) -> str:
    """Bytes in the largest binary unit that fits."""
    power = next((p for p in (3, 2, 1) if size >= 2 ** (10 * p)), 0)
    return f"{size / 2 ** (10 * power):,.{2 if power == 3 else 0}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def time_text(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
