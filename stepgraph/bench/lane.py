"""A provider in its own process: the parent's side, `Lane`, and the child's, `take_job` and `requests`.

The first line of the child's stdin is its job; each further line is a request. Answers are lines of JSON on its stdout.
"""

import contextlib
import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from stepgraph.bench.harness import Run, times
from stepgraph.bench.results import in_one_line
from stepgraph.bench.rows import SPEAKS_EVERY_S, Row, note

Item = TypeVar("Item")


class Lane:
    """The process of ``command`` and the row of its provider. Once it has failed it answers nothing. A context manager.

    ``limit_s``: seconds that an answer may take from its request, None: no limit; ``until``: by when it must have come
    in any case, of ``time.monotonic()``. What takes longer is a failure.
    """

    def __init__(self, row: Row, command: Sequence[str], limit_s: float | None = None, until: float = math.inf):
        self.row, self.command, self.limit_s, self.until = row, command, limit_s, until
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Lane":
        self._folder = tempfile.TemporaryDirectory(prefix="stepgraph-bench-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._log = folder / "stderr"
        # Compile caches of its own: every provider compiles from nothing, and none finds another's kernels.
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
        note(self.row, "start")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | caches,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(30 if kind is None else 0)  # Ctrl-C waits for nobody
        self._folder.cleanup()

    def close(self, patience_s: float = 30) -> None:
        """Ends the process, so that its memory is free for the next. ``patience_s``: how long it may take to end."""
        if self.process is not None:
            try:
                # The end of its stdin ends it, and its compile workers.
                self.process.communicate(timeout=patience_s)
            except subprocess.TimeoutExpired:  # it is in the middle of a step
                self.process.kill()
                self.process.communicate()
            self.process = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to ``request``; empty once the provider has failed, which sets the row's ``error``."""
        self.send(request)
        return self.receive()

    def send(self, request: dict[str, Any]) -> None:
        """Hands over ``request`` without waiting; `receive` gives the answer."""
        self._sent = time.monotonic()
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended: `receive` says how
                print(json.dumps(request), file=self.process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """The answer to the last message, as from `ask`."""
        if self.process is None:
            return {}
        patience_s = 30.0
        by = min(self.until, math.inf if self.limit_s is None else self._sent + self.limit_s)
        if line := self._line(by):
            answer = json.loads(line)
        elif line is not None:
            code = self.process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            answer = {"error": f"its process {how}"}
        else:
            answer, patience_s = {"error": f"not finished after {by - self._sent:.4g} s"}, 0.0
        if "error" in answer:
            self.row.error = answer["error"]
            note(self.row, f"failed: {self.row.error}")
            print(self._log.read_text(errors="replace")[-2000:], file=sys.stderr)
            self.close(patience_s)
            return {}
        return answer

    def _line(self, by: float) -> str | None:
        """What the process says next; None if it says nothing until then."""
        while (left := by - time.monotonic()) > 0:
            # One answer a request: none is left in the buffer of stdout.
            if select.select([self.process.stdout], [], [], min(left, SPEAKS_EVERY_S))[0]:
                return self.process.stdout.readline()
            note(self.row, f"waiting, {time.monotonic() - self._sent:.0f} s")
        return None

    def keep(self, answer: dict[str, Any]) -> None:
        """Writes the figures of an answer into the row."""
        for name, value in answer.items():
            setattr(self.row, name, value)


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """``items`` from number ``by`` on, then those before it."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def measured(
    groups: Iterable[Sequence[Lane]],
    job: dict[str, Any],
    rounds: int,
    steps: int,
    conclude: Callable[[Lane], None],
    *,
    build_apart: bool = False,
) -> Iterator[list[Row]]:
    """Rows of the providers of one model after another, as they are done. The lanes of a group live at once, those of a
    model next to each other, and build at once; only when all are built is the first one timed.

    A model's providers take turns, each time beginning with another one, so that what else the machine does falls on
    the same for all: ``rounds`` rounds of ``steps`` steps. ``conclude(lane)``: computes the derived figures.
    ``build_apart``: one builds after the other, which on a CPU would take its processors.
    """
    for group in groups:
        with contextlib.ExitStack() as stack:
            begun = [stack.enter_context(lane) for lane in group if _begins(lane)]
            if not build_apart:
                for lane in begun:
                    lane.send(_job(job, lane))
            for lane in begun:
                lane.keep(first := lane.ask(_job(job, lane)) if build_apart else lane.receive())
                if lane.row.unavailable:
                    note(lane.row, lane.row.unavailable)
                    lane.close()
                elif first:
                    note(lane.row, f"first step {lane.row.first_step_s:.1f} s, losses {lane.row.losses}")
            for _, lanes in itertools.groupby(group, lambda lane: lane.row.model):
                yield _timed([*lanes], rounds, steps, conclude)


def _begins(lane: Lane) -> bool:
    """Whether time is left for ``lane``; its row says so if not."""
    if over := time.monotonic() >= lane.until:
        lane.row.error = "not started: out of time"
        note(lane.row, lane.row.error)
    return not over


def _job(job: dict[str, Any], lane: Lane) -> dict[str, Any]:
    return job | {"model": lane.row.model, "provider": lane.row.provider}


def _timed(lanes: Sequence[Lane], rounds: int, steps: int, conclude: Callable[[Lane], None]) -> list[Row]:
    """The rows of one model's ``lanes``, which are built, once they are timed. Ends their processes."""
    for number in range(rounds):
        for lane in rotated(lanes, number):
            if answer := lane.ask({"do": "round", "steps": steps}):
                lane.row.step_ms_all.append(answer["step_ms"])
    for lane in lanes:
        lane.keep(lane.ask({"do": "finish", "steps": steps}))
        _conclude(lane.row)
        conclude(lane)
        lane.close()
    return [lane.row for lane in lanes]


def _conclude(row: Row) -> None:
    """A provider that failed has no step time."""
    if row.error or not row.step_ms_all:
        row.step_ms_all = []
        return
    row.step_ms = median(row.step_ms_all)
    if "compile" in row.provider:
        row.compile_s = row.first_step_s - row.step_ms / 1000
    note(row, f"{row.step_ms:.4g} ms per step")


def take_job() -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """In the child: (its job, what answers). From here on whatever prints, compilers too, prints to stderr, and an
    error that ends the process is its last answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    def fail(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        sys.__excepthook__(kind, error, trace)
        answer({"error": in_one_line(error)})

    sys.excepthook = fail
    return json.loads(sys.stdin.readline()), answer


def requests() -> Iterator[dict[str, Any]]:
    """In the child: the requests, until stdin ends."""
    for line in sys.stdin:
        yield json.loads(line)


def serve(run: Run, answer: Callable[[dict[str, Any]], None]) -> None:
    """In the child: ``run.first_steps()``, then the rounds of `measured`, and requests by the methods of ``run``."""
    answer(run.first_steps())
    for request in requests():
        if request["do"] == "round":  # steps queued one after another as a training loop does
            answer({"step_ms": median(times(run.device, run.step, request["steps"]))})
        else:
            answer(getattr(run, request["do"])(request))
