"""The run folder: every record that a run leaves behind, as strict JSON that is never half written; with ``--log
wandb`` the metrics are also in Weights & Biases, which is an optional package.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import json
import math
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from stepgraph.config.train import TrainConfig
from stepgraph.errors import read_json, require_file, write_text

#: The metrics of a run that rewinds, until its first checkpoint.
REWOUND = ".metrics.jsonl.new"

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
    skipped_steps: int
    """Steps since the run began or was resumed that changed nothing, as their loss or gradient norm was not finite."""
    repeated_steps: int
    """Repetitions in that time of steps whose experts needed larger buffers; they leave no other trace."""
    train_loss_nats: float | None
    """Cross-entropy of the last step's batch, nats per token."""
    val_loss_nats: float | None
    """Cross-entropy on the validation data at the last validation, nats per token."""
    tokens_per_s: float | None
    """Training tokens per second of all devices together, from the median step."""
    step_ms_median: float | None
    """Median time of a step, ms, without the first (compile) steps, validation and checkpoints."""
    mfu: float | None
    """Model FLOPs utilization in [0, 1] at ``tokens_per_s``; null where the device's peak is unknown."""
    bubble: float | None
    """Share of a pipeline's schedule, in [0, 1], in which ranks do not compute, in the median step, or null."""
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

    ``checkpoints/`` and ``graphs/`` (``--dump-graphs``) are filled elsewhere. JSON files are never half written, and
    strict: a number that is not finite is null.
    """

    def __init__(
        self, path: Path, config: TrainConfig | None = None, *, resume_step: int | None = None, rewinds: bool = False
    ) -> None:
        """Makes the folder ``path``, with ``config`` in it from its first moment on, or with ``resume_step`` continues
        it as it was after that many updates: metrics of later steps, which will be repeated, are dropped, and so is the
        summary; where it ``rewinds``, to an earlier checkpoint than the newest, not before `settle`.

        Raises ValueError when ``path`` is not empty and is not being resumed, or while another process has the run.
        """
        if resume_step is None:
            require_unused(path)
            if config is not None and not path.exists():
                _create(path, config)
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.graphs = path / "graphs"
        self._metrics_file = path / "metrics.jsonl"
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path)
        #: Where metrics go as well, if anywhere.
        self.tracker: Wandb | None = None
        #: What a resumed run has recorded: the loss of its last step, and the step of its last validation.
        self.last_loss: float | None = None
        self.validated: int | None = None
        rewound, self._rewinds = path / REWOUND, rewinds
        reached = max((record["step"] for record in read_metrics(rewound)), default=-1) if rewound.exists() else -1
        if not rewinds and resume_step is not None and reached >= resume_step:
            rewound.replace(self._metrics_file)  # killed in `settle`
        if resume_step is not None and self._metrics_file.exists():
            kept = [record for record in read_metrics(self._metrics_file) if record["step"] <= resume_step]
            self.last_loss = next((record["loss"] for record in reversed(kept) if "loss" in record), None)
            self.validated = max((record["step"] for record in kept if "val_loss" in record), default=None)
            self._metrics_file = rewound if rewinds else self._metrics_file
            write_text(self._metrics_file, "".join(json_line(record) for record in kept))
        if not rewinds:
            rewound.unlink(missing_ok=True)
            (path / "summary.json").unlink(missing_ok=True)  # a run that is killed has none
        # Line buffering: each record reaches the file at once, so a killed run loses none.
        self._metrics = self._metrics_file.open("a", buffering=1, encoding="utf-8")
        self._purge_step = None if resume_step is None else resume_step + 1

    @functools.cached_property
    def _tensorboard(self) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # slow to load, and needed when the first step is done

        return SummaryWriter(self.path / "tb", purge_step=self._purge_step, flush_secs=10)

    def settle(self) -> None:
        """A run that rewinds has written a checkpoint: its records replace the later ones."""
        if self._rewinds:
            (self.path / "summary.json").unlink(missing_ok=True)
            self._metrics_file = self._metrics_file.replace(self.path / "metrics.jsonl")
            self._rewinds = False

    def write_config(self, config: TrainConfig) -> None:
        write_text(self.path / "config.json", config.to_json())

    def write(self, name: str, content: Any) -> None:
        """Writes the file ``name``: text as it is, anything else as JSON."""
        (write_text if isinstance(content, str) else write_json)(self.path / name, content)

    def log(self, step: int, **values: float | Sequence[float] | str | None) -> None:
        """Records ``values`` after update number ``step`` (from 1), in ``metrics.jsonl`` and for TensorBoard.

        A name that starts with ``val_`` goes to TensorBoard's ``val/``, others to ``train/``; a list to a tag for each
        element. ``expert_load`` lists, for each layer with experts, the highest load of an expert over the mean.
        """
        self._metrics.write(json_line({"step": step} | values))
        scalars: dict[str, float] = {}
        for name, value in values.items():
            if value is None:
                continue
            tag = name.replace("val_", "val/", 1) if name.startswith("val_") else f"train/{name}"
            if isinstance(value, str):
                self._tensorboard.add_text(tag, value, step)
                continue
            several = (
                {f"{tag}/{i}": item for i, item in enumerate(value)} if isinstance(value, Sequence) else {tag: value}
            )
            scalars |= several
        for tag, scalar in scalars.items():
            self._tensorboard.add_scalar(tag, scalar, step)
        if self.tracker is not None:
            self.tracker.log(step, scalars)

    def write_summary(self, summary: Summary) -> None:
        """Writes ``summary.json``; not while that of before a rewind stays."""
        if not self._rewinds:
            write_json(self.path / "summary.json", dataclasses.asdict(summary))

    def close(self) -> None:
        """Flushes and closes the metrics, and frees the run for another process. Raises OSError for a full disk."""
        with self._lock, self._metrics:
            if "_tensorboard" in vars(self):
                self._tensorboard.close()
            if self.tracker is not None:
                self.tracker.close()


class SilentFolder:
    """The run folder of a rank that writes no records: `RunFolder`'s methods, doing nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.graphs = None
        self.validated = None

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    settle = write_config = write = write_summary = _nothing
    log = close = _nothing


def died_early(run: Path) -> bool:
    """Whether ``run`` is a run folder without a checkpoint of a run that did not end well, and so can begin again."""
    ours = (run / "lock").is_file() and (run / "config.json").is_file()
    return ours and not any((run / "checkpoints").glob("step-*")) and status_of(run) in (None, "failed")


def _create(path: Path, config: TrainConfig) -> None:
    """Make the run folder with its lock and config.json in one step: without, no run could begin again in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.mkdir(exist_ok=True)
    (made / "lock").touch()
    write_text(made / "config.json", config.to_json())
    made.rename(path)


def _lock(path: Path) -> TextIO:
    """Take the run for this process until the file that is returned is closed or the process ends, however it ends."""
    lock = (path / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise ValueError(f"run folder {path} is in use by {holder}: wait for its end, or end it") from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


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
    """The records of a ``metrics.jsonl``, without a last line cut off by a crash. ValueError for another bad line."""
    require_file(path)
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # of JSON, or of UTF-8
            if number < len(lines):
                raise ValueError(f"{path} line {number} is not JSON: repair or delete that line") from error
            break
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ValueError(f"{path} line {number} has no step: repair or delete that line")
        records.append(record)
    return records


def status_of(run: Path) -> str | None:
    """The status in the summary.json of ``run``; None without one."""
    try:
        found = read_json(run / "summary.json")
    except (OSError, ValueError):
        return None
    return found.get("status") if isinstance(found, dict) else None


def json_line(record: dict[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """``value`` with every float that JSON cannot hold (nan, inf) as None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Wandb:
    """The run of ``config`` in Weights & Biases; what is set up for it (``WANDB_MODE``, ``WANDB_PROJECT``, ...) holds.

    The run folder keeps its id in ``wandb.json``, so that a resumed run continues the same one.

    Raises ValueError, in one line, where the package is missing or does not start.
    """

    def __init__(self, config: TrainConfig, path: Path):
        wandb, file = package(), path / "wandb.json"
        if not file.exists():
            write_json(file, {"id": uuid.uuid4().hex[:12]})
        options = json.loads(config.to_json())
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "stepgraph"),
                name=path.name,
                id=json.loads(file.read_text())["id"],
                resume="allow",
                dir=str(path),
                config=options,
            )
        except Exception as failure:  # its own kinds of error, and its service's
            raise ValueError(
                f"wandb does not start ({_one_line(failure)}): log in, or set WANDB_MODE=offline"
            ) from failure

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        """Record ``scalars`` by their TensorBoard tags. A step that was recorded before a resume is not again. OSError,
        in one line, where the package fails."""
        with _failing():
            self._run.log(scalars, step=step)

    def close(self) -> None:
        """Send what is left. OSError as of `log`."""
        with _failing():
            self._run.finish()


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Turns any error of the package, which has its own error types, into an OSError in one line."""
    try:
        yield
    except Exception as failure:
        raise OSError(
            f"wandb failed ({_one_line(failure)}): continue without --log wandb, or with WANDB_MODE=offline"
        ) from failure


def _one_line(failure: Exception) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:200]


def package() -> ModuleType:
    """The package. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ValueError("--log wandb needs the package wandb: pip install 'stepgraph[wandb]'") from error
