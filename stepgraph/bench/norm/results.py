"""The results of ``stepgraph bench norm``: rows, comparison with the others, and tables with notes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stepgraph.bench.rows import align, geometric_mean, where

#: Ours is slow where it takes more than this times the best peer's time.
SLOWER = 1.02

#: Above this much traffic a norm has no excuse for staying below the speed of a copy.
LARGE_BYTES = 128 * 2**20

OURS = "ours"

#: torch.compile under our rules: not a peer, but it should be as fast as hand-written kernels.
TUNED = "compile-tuned"

#: The share of the best kernel's speed that `TUNED` should reach, by direction.
WANTED = {"fwd": 0.95, "bwd": 0.9}

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(kw_only=True)
class NormRow:
    """One operation on one shape by one provider, timed in one way. What was not or cannot be measured is null."""

    op: str
    """Such as ``rms_norm fwd`` or ``layer_norm bwd``."""
    m: int
    """Rows."""
    n: int
    """Length of a row."""
    dtype: str
    """Of x, y and their gradients: bf16, fp16 or fp32."""
    provider: str
    """A name of ``bench.norm.providers.PROVIDERS``."""
    timing: str
    """``graph`` or ``wall``: see ``bench.norm.timing``; in older records also ``do_bench``, Triton's."""
    ms: float | None = None
    """Median time of a call, ms."""
    gbps: float | None = None
    """GB/s of the least traffic (`least_bytes`) at ``ms``."""
    pct_copy: float | None = None
    """The same in percent of the copy bandwidth that was measured in the same run."""
    wrong: str | None = None
    """How far the result is from float64, in one line: then it is not timed."""
    error: str | None = None
    """Why the provider failed, in one line."""

    def set_time(self, ms: float, copy_gbps: float) -> None:
        """Fills in ``ms`` and what follows from it."""
        self.ms = ms
        self.gbps = least_bytes(self) / (ms * 1e6)
        self.pct_copy = 100 * self.gbps / copy_gbps


def least_bytes(row: NormRow) -> int:
    """Bytes that must be moved: x and y forward; x, dy and dx backward. Weights and statistics are left out."""
    passes = 2 if row.op.endswith("fwd") else 3
    return passes * row.m * row.n * ITEM_BYTES[row.dtype]


@dataclass(frozen=True)
class Comparison:
    """All providers on one shape, for one op and timing."""

    rows: tuple[NormRow, ...]

    @property
    def shape(self) -> str:
        return f"{self.rows[0].m}x{self.rows[0].n}"

    def row(self, provider: str) -> NormRow | None:
        return next((row for row in self.rows if row.provider == provider), None)

    @cached_property
    def ours(self) -> NormRow | None:
        """Our row, where it has a time."""
        row = self.row(OURS)
        return row if row and row.ms else None

    @cached_property
    def best(self) -> NormRow | None:
        """The fastest of the peers that are right."""
        peers = (row for row in self.rows if row.provider not in (OURS, TUNED) and row.ms)
        return min(peers, key=lambda row: row.ms, default=None)

    @cached_property
    def tuned(self) -> float | None:
        """Speed of `TUNED` as a part of the best of all others."""
        row = self.row(TUNED)
        others = [other.ms for other in (self.ours, self.best) if other]
        return min(others) / row.ms if row and row.ms and others else None

    def ratio(self, peer: NormRow | None) -> float | None:
        """How many times as fast as ``peer`` ours is."""
        return peer.ms / self.ours.ms if peer and peer.ms and self.ours else None

    @property
    def slower(self) -> bool:
        """Ours takes more than `SLOWER` times the best peer's time, or gives no right result where a peer does."""
        return self.best is not None and (self.ours is None or self.ours.ms > SLOWER * self.best.ms)


def comparisons(rows: Sequence[NormRow]) -> dict[tuple[str, str], list[Comparison]]:
    """(op, timing) -> its shapes, by row length and then by rows."""
    found: dict[tuple[str, str], dict[tuple[int, int], list[NormRow]]] = {}
    for row in rows:
        found.setdefault((row.op, row.timing), {}).setdefault((row.n, row.m), []).append(row)
    return {key: [Comparison(tuple(shapes[at])) for at in sorted(shapes)] for key, shapes in found.items()}


def findings(shapes: Sequence[Comparison]) -> list[str]:
    """Lines: how many times as fast as each other provider ours is over the shapes that both ran, where it is slower
    than the best peer, worst first, how near to a copy where there is much to move, and how near to the best kernel
    `TUNED` is."""
    names = list(dict.fromkeys(row.provider for shape in shapes for row in shape.rows if row.provider != OURS))
    means = {name: [r for shape in shapes if (r := shape.ratio(shape.row(name)))] for name in names}
    means["the best peer"] = [r for shape in shapes if (r := shape.ratio(shape.best))]
    words = [f"{name} {geometric_mean(ratios):.2f}x ({len(ratios)})" for name, ratios in means.items() if ratios]
    lines = ["geometric mean of times as fast (shapes): " + ", ".join(words)]
    slow = sorted((shape for shape in shapes if shape.slower), key=lambda shape: shape.ratio(shape.best) or 0.0)
    words = [f"{s.shape} ({1 / r:.2f}x {s.best.provider})" if (r := s.ratio(s.best)) else s.shape for s in slow]
    compared = sum(shape.best is not None for shape in shapes)
    lines.append(_listed(f"slower than {SLOWER}x the best peer at {len(slow)} of {compared} shapes", words))
    if large := [shape.ours for shape in shapes if shape.ours and least_bytes(shape.ours) > LARGE_BYTES]:
        least = min(large, key=lambda row: row.pct_copy)
        mean = sum(row.pct_copy for row in large) / len(large)
        lines.append(
            f"over {LARGE_BYTES >> 20} MiB of traffic: at least {least.pct_copy:.1f}% of copy ({least.m}x{least.n}), "
            f"mean {mean:.1f}%, over {len(large)} shapes"
        )
    if tuned := sorted((shape.tuned, shape.shape) for shape in shapes if shape.tuned):
        wanted = WANTED[shapes[0].rows[0].op[-3:]]
        low = [f"{name} ({part:.2f})" for part, name in tuned if part < wanted]
        line = (
            f"{TUNED} at {geometric_mean(part for part, _ in tuned):.2f} of the best kernel's speed (geometric mean), "
            f"below {wanted} at {len(low)} of {len(tuned)} shapes"
        )
        lines.append(_listed(line, low))
    return lines


def _listed(line: str, shapes: Sequence[str]) -> str:
    return line + (": " + ", ".join(shapes) if shapes else "")


_TIMINGS = {
    "do_bench": "triton.testing.do_bench, launches included",
    "graph": "CUDA-graph replay over rotating buffers, kernel time alone",
    "wall": "wall clock",
}


def norm_section(env: dict[str, Any], settings: dict[str, Any], rows: Sequence[NormRow]) -> str:
    """Everything about one record: tables, findings and notes."""
    lines = []
    for (op, timing), shapes in comparisons(rows).items():
        lines += [f"### {op}, {settings['dtype']}, {_TIMINGS[timing]}", "", where(env, settings), ""]
        lines += [*table(shapes, settings["providers"]), ""]
        if OURS in settings["providers"]:
            lines += [f"- {line}" for line in findings(shapes)] + [""]
    return "\n".join(lines + [f"- {note}" for note in _notes(settings, rows)]) + "\n"


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
