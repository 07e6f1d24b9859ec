"""The tables of ``stepgraph bench norm``: one per op and timing, with notes on how to read them."""

from collections.abc import Sequence
from typing import Any

from stepgraph.bench.norm.results import (
    OURS,
    Comparison,
    NormRow,
    comparisons,
    geometric_means,
    large_shapes,
    slow_shapes,
    summary,
    tuned_shapes,
)
from stepgraph.bench.table import align, where

_TIMINGS = {
    "do_bench": "triton.testing.do_bench, launches included",
    "graph": "CUDA-graph replay over rotating buffers, kernel time alone",
    "wall": "wall clock",
}


def norm_section(env: dict[str, Any], settings: dict[str, Any], rows: Sequence[NormRow]) -> str:
    """Everything about one record: tables, findings, notes, and last the summary."""
    lines = []
    for (op, timing), shapes in comparisons(rows).items():
        lines += [f"### {op}, {settings['dtype']}, {_TIMINGS[timing]}", "", where(env, settings), ""]
        lines += [*table(shapes, settings["providers"]), ""]
        if OURS in settings["providers"]:
            found = [geometric_means(shapes), slow_shapes(shapes), large_shapes(shapes), tuned_shapes(shapes)]
            lines += [f"- {line}" for line in found if line] + [""]
    lines += [f"- {note}" for note in _notes(settings, rows)] + ["", summary(rows)]
    return "\n".join(lines) + "\n"


def table(shapes: Sequence[Comparison], providers: Sequence[str]) -> list[str]:
    """The lines of one table: a row a shape. A peer's cell is its ms, and how many times as fast as it ours is."""
    peers = [name for name in providers if name != OURS]
    columns = ["M x N", "ours ms", "GB/s", "% copy", "vs best", *peers]
    cells = []
    for shape in shapes:
        mine, ratio = shape.row(OURS), shape.ratio(shape.best)
        row = [shape.shape, _ms(mine)]
        row += [f"{mine.gbps:.0f}", f"{mine.pct_copy:.1f}"] if mine and mine.ms else ["", ""]
        row.append(f"{ratio:.2f}x {shape.best.provider}" if ratio else "")
        for name in peers:
            peer = shape.row(name)
            times = shape.ratio(peer)
            row.append(_ms(peer) + (f" {times:.2f}x" if times else ""))
        cells.append(row)
    return align(columns, cells)


def _ms(row: NormRow | None) -> str:
    if row is None:
        return ""
    return f"{row.ms:.4f}" if row.ms else "wrong" if row.wrong else "failed"


def _notes(settings: dict[str, Any], rows: Sequence[NormRow]) -> list[str]:
    start, *end = settings["copy_gbps"]
    notes = [
        "vs best, and the second number of a peer's cell: how many times as fast ours is",
        f"% copy: GB/s of the least traffic (2 passes forward, 3 backward) in percent of a copy_, {start:.0f} GB/s"
        + "".join(f" ({value:.0f} at the end of the run)" for value in end),
    ]
    if settings["device"] == "cpu":
        notes.append(
            "on a CPU the figures are good for ratios only: no kernel of ours runs, and other work disturbs them"
        )
    notes += [f"missing: {name}: {reason}" for name, reason in settings["missing"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in settings["packages"].items())
    notes += [f"packages: {versions}"] if versions else []
    for kind in ("wrong", "error"):
        found: dict[tuple[str, str, str], dict[str, str]] = {}
        for row in rows:
            if reason := getattr(row, kind):
                key = row.provider, row.op, reason.split(" ")[0] if kind == "wrong" else reason  # dx, y, ... is off
                found.setdefault(key, {}).setdefault(f"{row.m}x{row.n}", reason)
        for (name, op, _), shapes in found.items():
            verb = "is wrong" if kind == "wrong" else "failed"
            notes.append(f"{name} {verb}: {op} {', '.join(shapes)}: {next(iter(shapes.values()))}")
    if settings["left_out"]:
        notes.append(f"out of budget ({settings['budget_s']:g} s), left out: {', '.join(settings['left_out'])}")
    return notes
