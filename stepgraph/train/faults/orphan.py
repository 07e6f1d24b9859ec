"""A rank ends when the launcher that started it is gone: killed with -9, it can neither end its ranks nor start others,
and they would train on next to the run that is resumed, or wait for its store forever."""

import os
import threading
import time

from stepgraph.errors import end_process

#: Names the launcher's process to the ranks that ``--nproc`` starts.
LAUNCHER = "STEPGRAPH_LAUNCHER"
_POLL_S = 1.0


def end_with_launcher() -> None:
    """From now on, in a rank that ``--nproc`` or torchrun started, a thread ends this process within 2 s of its
    launcher's end, with status 1. It needs no answer of the main thread, which may be inside a collective."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    threading.Thread(target=_wait_for_end, args=(launcher,), name="orphan", daemon=True).start()


def _wait_for_end(launcher: int) -> None:
    while os.getppid() == launcher:  # the kernel gives an orphan another parent
        time.sleep(_POLL_S)
    who = f"rank {os.environ['RANK']} (pid {os.getpid()})"
    end_process(1, f"error: {who}: its launcher (pid {launcher}) is gone; the run continues with --resume")
