"""The progress line: how far a run is, on a terminal or in a log."""

import re
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of this output is gone")  # rich would end the process


class Progress:
    """Shows how far a run is: one live line on a terminal, a line per update anywhere else. A context manager."""

    def __init__(self, total_steps: int, *, console: Console | None = None) -> None:
        """``console`` defaults to stdout's."""
        self._total = total_steps
        self._console = console or _Console(highlight=False)
        self._first: tuple[int, float] | None = None  # the first update shown, and when
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # No refresh thread: the line changes when a step ends, never during a step that is timed.
            self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, *, step_ms: float, **figures: float | Sequence[float] | None) -> None:
        """Shows update number ``step``, from 1, with the ``figures`` of `format_progress`."""
        line = format_progress(step, self._total, step_ms=step_ms, eta_s=self._eta(step, step_ms), **figures)
        if self._live is None:
            self._print(line)
            return
        row = Table.grid(padding=(0, 1))
        room = self._console.width
        width = 20 if 20 + 1 + len(line) <= room else 10 if room >= 60 else 0
        bar = [ProgressBar(total=self._total, completed=step, width=width)] if width else []
        row.add_row(*bar, Text(shortened(line, room - width - len(bar))))
        self._live.update(row, refresh=True)

    def note(self, text: str) -> None:
        """Prints ``text`` as a line that stays, above the live one: a validation, a checkpoint."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _eta(self, step: int, step_ms: float) -> float:
        """Seconds left, from the wall clock since the first update shown: this includes validation and checkpoints,
        but not compilation, which precedes it."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        per_step = (now - first_time) / (step - first_step) if step > first_step else step_ms / 1000
        return (self._total - step) * per_step


def format_progress(
    step: int,
    total_steps: int,
    *,
    loss: float,
    grad_norm: float,
    step_ms: float,
    tokens_per_s: float,
    mem_gib: float,
    eta_s: float,
    lr: float,
    mfu: float | None = None,
    expert_load: Sequence[float] = (),
) -> str:
    """The progress line, such as ``step 20/1000 | loss 4.1234 | lr 2.0e-03 | grad_norm 0.97 | 118 ms | 139k tok/s |
    mfu 41% | mem 48.9 GiB | eta 1.9m``; ``mfu`` in [0, 1], left out where it is None. ``expert_load``: one per layer
    with experts; the line shows the highest, as ``load 1.43``."""
    parts = [
        f"step {step}/{total_steps}",
        f"loss {loss:.4f}",
        f"lr {lr:.1e}",
        f"grad_norm {grad_norm:.2f}",
        *([f"load {max(expert_load):.2f}"] if expert_load else []),
        f"{_three_digits(step_ms)} ms",
        f"{_metric_prefix(tokens_per_s)} tok/s",
        *([] if mfu is None else [f"mfu {mfu:.0%}"]),
        f"mem {mem_gib:.1f} GiB",
        f"eta {format_seconds(eta_s)}",
    ]
    return " | ".join(parts)


#: Figures that a narrow terminal goes without, the first first; all are in the metrics.
_LEFT_OUT = (r"mem .*", r".* ms", r"load .*", r"grad_norm .*", r"lr .*", r"mfu .*", r".* tok/s", r"eta .*")


def shortened(line: str, width: int) -> str:
    """A progress line without as many of its figures as it takes to fit into ``width`` columns: a live line that wraps
    leaves its first part behind."""
    parts = line.split(" | ")
    for pattern in _LEFT_OUT:
        if len(" | ".join(parts)) > width:
            parts = [part for part in parts if not re.fullmatch(pattern, part)]
    return " | ".join(parts)[:width]


def format_seconds(seconds: float) -> str:
    """A duration in its largest fitting unit: ``45s``, ``1.9m``, ``3.2h``, ``2.1d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 0.99 * size:  # 59.9 s is 1.0m
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.0f}s"


def _metric_prefix(value: float) -> str:
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:  # 999,700 is 1.00M
            return f"{_three_digits(value / size)}{prefix}"
    return f"{value:.0f}"


def _three_digits(value: float) -> str:
    """``value`` with three significant digits, or more if it has more before the point."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
