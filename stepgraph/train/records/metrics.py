"""What a run leaves behind and shows meanwhile: the run folder, the progress line, and the figures in both."""

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter

from stepgraph.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The keys of ``summary.json``. A figure that a run did not measure is null."""

    status: str
    """finished: all steps done; interrupted: stopped by a signal after a checkpoint; failed: stopped by an error."""
    error: str | None = None
    """Why a failed run stopped, in one line."""
    preset: str
    """Preset the configuration started from."""
    params: int
    """Trainable parameters."""
    steps: int
    """Optimizer updates done, those before a resume included."""
    tokens: int
    """Training tokens seen in these steps."""
    train_loss_nats: float | None
    """Cross-entropy of the last step's batch, nats per token."""
    val_loss_nats: float | None
    """Cross-entropy on the validation data at the last validation, nats per token."""
    unigram_entropy_nats: float | None
    """Entropy of the training tokens' frequencies, nats per token: what a model that ignores context can reach."""
    tokens_per_s: float | None
    """Training tokens per second of all devices together, from the median step."""
    step_ms_median: float | None
    """Median time of a step, ms, without the first (compile) steps, validation and checkpoints."""
    mfu: float | None
    """Model FLOPs utilization in [0, 1] at ``tokens_per_s``; null where the device's peak is unknown."""
    capture_s: float | None
    """Seconds to capture the step graph and run its passes."""
    compile_s: float | None
    """Seconds that the compiler and CUDA graph capture took."""
    peak_mem_gib: float
    """Peak memory, GiB: allocated on the GPU, or resident in the process on a CPU."""
    wall_s: float
    """Seconds from start to end of this process's part of the run, everything included."""
    versions: dict[str, Any]
    """Versions of stepgraph, torch, triton, python, CUDA and cuDNN."""


class RunFolder:
    """The files of one run.

    ``config.json``, ``environment.json``, ``metrics.jsonl`` (one object a line), ``tb/`` (TensorBoard events),
    ``passes.txt`` and ``passes.json`` (pass report), ``graph.txt``, ``summary.json`` (``Summary``), ``loss.png``;
    ``checkpoints/`` and ``graphs/`` (``--dump-graphs``) are filled by others. JSON files appear whole or not at all,
    and are strict: a number that is not finite is null.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Makes the folder ``path``, or with ``resume_step`` continues it as it was after that many updates: metrics
        of later steps, which are about to be repeated, are dropped, and so is the summary of the part that ended.

        Raises ValueError when ``path`` is not empty and is not being resumed.
        """
        if resume_step is None:
            require_unused(path)
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.graphs = path / "graphs"
        self._metrics_file = path / "metrics.jsonl"
        path.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and self._metrics_file.exists():
            kept = [record for record in read_metrics(self._metrics_file) if record["step"] <= resume_step]
            _write_atomically(self._metrics_file, "".join(_json_line(record) for record in kept))
        (path / "summary.json").unlink(missing_ok=True)  # should this process be killed, it has none
        # Line buffering: each record reaches the file whole, so a killed run loses none that it reported.
        self._metrics = self._metrics_file.open("a", buffering=1, encoding="utf-8")
        purge = None if resume_step is None else resume_step + 1
        self._tensorboard = SummaryWriter(path / "tb", purge_step=purge, flush_secs=10)

    def write_config(self, config: TrainConfig) -> None:
        """Writes ``config.json``."""
        _write_atomically(self.path / "config.json", config.to_json())

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Writes ``environment.json``, as ``stepgraph.train.environment.environment`` gives it."""
        _write_json(self.path / "environment.json", environment)

    def write_passes(self, text: str, records: list[dict[str, Any]]) -> None:
        """Writes the pass report for people (``passes.txt``) and for programs (``passes.json``)."""
        _write_atomically(self.path / "passes.txt", text)
        _write_json(self.path / "passes.json", records)

    def write_graph(self, text: str) -> None:
        """Writes ``graph.txt``, the graph that runs, after all passes."""
        _write_atomically(self.path / "graph.txt", text)

    def log(self, step: int, **values: float | None) -> None:
        """Records ``values`` after update number ``step`` (from 1), in ``metrics.jsonl`` and for TensorBoard.

        The names used are ``loss`` (nats per token), ``grad_norm``, ``lr``, ``step_ms``, ``tokens_per_s``, ``mfu`` (in
        [0, 1]), ``mem_gib``, ``tokens`` (seen so far), and ``val_loss``; a name that starts with ``val_`` goes to
        TensorBoard's ``val/``, others to ``train/``.
        """
        self._metrics.write(_json_line({"step": step} | values))
        for name, value in values.items():
            if value is not None:
                tag = name.replace("val_", "val/", 1) if name.startswith("val_") else f"train/{name}"
                self._tensorboard.add_scalar(tag, value, step)

    def write_summary(self, summary: Summary) -> None:
        """Writes ``summary.json``."""
        _write_json(self.path / "summary.json", dataclasses.asdict(summary))

    def draw_loss(self, unigram_entropy: float | None) -> None:
        """Draws ``loss.png`` from the metrics so far; ``unigram_entropy`` in nats per token."""
        from stepgraph.train.records.plot import loss_curve  # matplotlib is slow to load and wanted only at the end

        loss_curve(self._metrics_file, self.path / "loss.png", unigram_entropy)

    def close(self) -> None:
        """Writes out what is buffered. The folder takes no more metrics."""
        self._metrics.close()
        self._tensorboard.close()


class SilentFolder:
    """The run folder of a rank that writes no records: `RunFolder`'s methods, doing nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.graphs = None

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    write_config = write_environment = write_passes = write_graph = write_summary = _nothing
    log = draw_loss = close = _nothing


def require_unused(path: Path) -> None:
    """Raise ValueError unless ``path`` can be the folder of a new run: it is not there, or is empty."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"run folder {path} is a file: choose another --out")
    try:
        used = path.is_dir() and any(path.iterdir())
    except OSError as failure:
        raise ValueError(f"cannot read the run folder {path}: {failure.strerror}; choose another --out") from failure
    if used:
        raise ValueError(f"run folder {path} is not empty: choose another --out, or continue it with --resume {path}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``. A last line cut off by a crash is left out.

    Raises ValueError for a damaged line before the last.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path} line {number} is not JSON: repair or delete that line") from error
    return records


class Progress:
    """Shows how far a run is: one live line on a terminal, a line per update anywhere else. A context manager."""

    def __init__(self, total_steps: int, *, start_step: int = 0, console: Console | None = None) -> None:
        """``start_step``: updates done before this process (after a resume). ``console`` defaults to stdout's."""
        self._total, self._start_step = total_steps, start_step
        self._console = console or Console(highlight=False)
        self._first: tuple[int, float] | None = None  # the first update shown, and when
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # No refresh thread: the line changes when a step ends, never while one is timed.
            self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        step_ms: float,
        tokens_per_s: float,
        mem_gib: float,
        mfu: float | None = None,
    ) -> None:
        """Shows update number ``step``, from 1. ``mfu`` in [0, 1], None where it is unknown."""
        line = format_progress(
            step,
            self._total,
            loss=loss,
            grad_norm=grad_norm,
            step_ms=step_ms,
            tokens_per_s=tokens_per_s,
            mem_gib=mem_gib,
            mfu=mfu,
            eta_s=self._eta(step, step_ms),
        )
        if self._live is None:
            self._print(line)
            return
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._total, completed=step, width=20)
        fits = 20 + 1 + len(line) <= self._console.width
        row.add_row(*([bar] if fits else []), Text(line))
        self._live.update(row, refresh=True)

    def note(self, text: str) -> None:
        """Prints ``text`` as a line that stays, above the live one: a validation, a checkpoint."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _eta(self, step: int, step_ms: float) -> float:
        """Seconds left, from the wall clock since the first update shown: it counts validation and checkpoints, and
        leaves out compilation, which comes before it."""
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
    mfu: float | None = None,
) -> str:
    """The progress line, such as ``step 20/1000 | loss 4.1234 | grad_norm 0.97 | 118 ms | 139k tok/s | mfu 41% |
    mem 48.9 GiB | eta 1.9m``; without ``mfu`` where it is None."""
    parts = [
        f"step {step}/{total_steps}",
        f"loss {loss:.4f}",
        f"grad_norm {grad_norm:.2f}",
        f"{_three_digits(step_ms)} ms",
        f"{_metric_prefix(tokens_per_s)} tok/s",
        *([] if mfu is None else [f"mfu {mfu:.0%}"]),
        f"mem {mem_gib:.1f} GiB",
        f"eta {format_seconds(eta_s)}",
    ]
    return " | ".join(parts)


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
    """``value`` with three digits, or all those before the point."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _json_line(record: dict[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _write_json(path: Path, value: Any) -> None:
    _write_atomically(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """``value`` with every float that JSON cannot hold (nan, inf) as None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_atomically(path: Path, text: str) -> None:
    """Replaces ``path`` in one step: a crash leaves the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
