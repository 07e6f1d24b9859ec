"""Errors that end a run early: losses and gradient norms that are not finite, unless their steps are skipped and
counted; out of memory, reported with the memory policy that would fit; and errors that leave the weights as they are,
such as records that cannot be written: the run stops as for a signal, saves, and ends with the error.
"""

import contextlib
import errno
import math
import os
import re
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import torch

from stepgraph import compat
from stepgraph.config.device import is_out_of_memory, memory_bytes, pick_device, taken_by_others
from stepgraph.config.train import TrainConfig
from stepgraph.lower import StepSpec, peak_bytes_by_policy
from stepgraph.parallel.ranks import Ranks
from stepgraph.train.checkpoint.files import checkpoints, step_of


class NotFiniteError(RuntimeError):
    """A loss or a gradient norm is not finite."""


class Finite:
    """Holds a run to finite losses and norms. ``skipped``: steps that this process has left out."""

    def __init__(self, config: TrainConfig, folder: Path, ranks: Ranks):
        self.config, self.folder, self.ranks = config, folder, ranks
        self.skipped = self.in_a_row = 0

    def accepts(self, step: int, loss: float, grad_norm: float, batch: dict[str, torch.Tensor]) -> bool:
        """Whether the step counts; False if it was left out. Raises `NotFiniteError` where the run is to end, and keeps
        the batch."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        skips = self.config.on_nonfinite == "skip"
        self.skipped, self.in_a_row = self.skipped + skips, self.in_a_row + skips
        if skips and self.in_a_row < self.config.max_skipped:
            return False
        row = f" ({self.in_a_row} consecutive steps skipped)" if skips else ""
        updated = step > max(1, self.in_a_row)
        self.require(f"the loss of step {step}{row}", loss, step, batch, updated=updated)
        self.require(f"the gradient norm of step {step}{row}", grad_norm, step, batch, updated=updated)

    def require(
        self, what: str, value: float, step: int, batch: dict[str, torch.Tensor], *, updated: bool = True
    ) -> None:
        """Raise `NotFiniteError`, and keep the batch, if ``value`` is not finite: later steps would only spread it.

        ``updated``: whether an update came before it, whose learning rate may be to blame.
        """
        if math.isfinite(value):
            return
        rank = f"-rank-{self.ranks.rank}" if self.ranks.world > 1 else ""
        path = self.folder / f"bad-batch-step-{step}{rank}.pt"
        try:
            torch.save({k: v.cpu() for k, v in batch.items()}, path)
            kept = f"is kept in {path}"
        except (OSError, RuntimeError) as failure:  # torch has its own error for a full disk
            with contextlib.suppress(OSError):
                path.unlink()
            kept = f"could not be kept ({' '.join(str(failure).split())[:100]})"
        raise NotFiniteError(f"{what} is {value}; its batch {kept}; {self._advice(step, updated)}")

    def _advice(self, step: int, updated: bool) -> str:
        if not updated:
            there = self.config.init_from_hf
            return (
                f"no update came before it: look at {f'the weights in {there}' if there else 'the model'}, or the batch"
            )
        return f"{self._again(step)} with a lower --lr"

    def _again(self, step: int) -> str:
        """How to continue: from the newest checkpoint whose weights gave a finite loss in a later step. Skipped steps
        gave none and changed no weights."""
        step -= max(0, self.in_a_row - 1)
        saved = {step_of(path): path for path in checkpoints(self.folder / "checkpoints") if not path.suffix}
        sound = [at for at in saved if at < step - 1]
        return f"--resume {saved[max(sound)]}" if sound else "start again"


#: The share of a device's memory below which a step is not what fills it.
_LEAST_SHARE = 0.25


def memory_advice(failure: BaseException, config: TrainConfig, step: Callable[[], StepSpec]) -> str:
    """One line for a step that ran out of memory: what was asked for, and the ``--memory`` that would fit.

    ``step`` makes what the step is, an example of its batch included.
    """
    asked = f"out of memory: asked for {asked_for(failure)}{taken_by_others(pick_device(config.device))}"
    traceback.clear_frames(failure.__traceback__)  # they hold the failed step's activations
    try:
        spec = step()
    except RuntimeError as again:
        if not is_out_of_memory(again):
            raise
        return f"{asked}; a batch alone does not fit: lower --accumulate or --batch-size"
    try:
        peaks = peak_bytes_by_policy(spec)
    except RuntimeError as again:  # torch.OutOfMemoryError is one
        if not is_out_of_memory(again):
            raise
        return f"{asked}; the parameters and the optimizer's state alone do not fit: choose a smaller model"
    total = memory_bytes(spec.device)
    known = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in peaks.items())
    asked += f"; the step's estimated peak by --memory, of {total / 2**30:.1f} GiB: {known}"
    failed = peaks.get(config.memory, float("inf"))
    if failed < _LEAST_SHARE * total:
        return f"{asked}; the step needs little of that: end what else takes memory"
    # A tenth is left for memory outside the estimate: the CUDA context, workspaces, fragmentation.
    fits = next((name for name, size in peaks.items() if size < failed and size < 0.9 * total), None)
    if fits:
        return f"{asked}; try --memory {fits}"
    fix = "--seq-len" if config.batch_size == 1 else "--batch-size"
    return f"{asked}; no other policy fits: lower {fix}"


def asked_for(failure: BaseException) -> str:
    """The size of the allocation that failed, for people."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(failure))
    if not found:
        return "more than there is"
    return f"{int(found[1]) / 2**30:.1f} GiB" if found[2] == "bytes" else f"{found[1]} {found[2]}"


OUTPUT = "the output cannot be written"
_NOBODY_READS = "the reader of this output is gone"


class StoppedError(RuntimeError):
    """The run was saved, and ends for an error that has nothing to do with its weights."""


class RecoverableErrors:
    """``first``: the first such error, in one line, or None."""

    def __init__(self) -> None:
        self.first: str | None = None

    @contextlib.contextmanager
    def noted(self, *kinds: type[Exception], what: str = "the records cannot be written") -> Iterator[None]:
        """Keep an OSError, or one of ``kinds``, that is raised inside, and continue after the block. ``what``: the
        words for an error of the system that names no file."""
        try:
            yield
        except BrokenPipeError:
            silence()
            self.first = self.first or _NOBODY_READS
        except (OSError, *kinds) as failure:
            if isinstance(failure, OSError) and failure.errno == errno.EIO and silence():  # a terminal hung up
                self.first = self.first or _NOBODY_READS
                return
            text = " ".join(str(failure).split())
            nameless = isinstance(failure, OSError) and failure.errno is not None and failure.filename is None
            self.first = self.first or (f"{what} ({text})" if nameless else text)

    def of_threads(self) -> contextlib.AbstractContextManager[None]:
        """Keep the OSErrors that end threads inside, such as TensorBoard's writer."""
        before = threading.excepthook

        def note(ended: threading.ExceptHookArgs) -> None:
            if not isinstance(ended.exc_value, OSError):
                return before(ended)
            with self.noted():
                raise ended.exc_value

        return compat.replaced(threading, excepthook=note)

    def say(self, *text: object) -> None:
        """Print, at once: a pipe shows each line when it is said, and keeps it when the run is killed."""
        with self.noted(what=OUTPUT):
            print(*text, flush=True)


def silence() -> bool:
    """From now on what is printed goes nowhere, if nobody reads it any more; whether that is so."""
    streams = [getattr(stream, "rich_proxied_file", stream) for stream in (sys.stdout, sys.stderr)]  # of a live line
    gone = [stream for stream in streams if _is_gone(stream)]
    for stream in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    return bool(gone)


def _is_gone(stream: TextIO) -> bool:
    """Whether it is a pipe that nobody reads, or was a terminal."""
    try:
        stream.flush()
        found = os.fstat(stream.fileno())
        device = stat.S_ISCHR(found.st_mode) and found.st_rdev != os.stat(os.devnull).st_rdev
        return device and not stream.isatty()
    except OSError as failure:  # tests' streams have no number
        return failure.errno in (errno.EPIPE, errno.EIO)
