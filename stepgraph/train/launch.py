"""``stepgraph train --nproc N``: starts ranks on this machine, in the environment that torchrun gives them.

torchrun imports torch and then starts the ranks, which import it again. Here the ranks start first.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepgraph.errors import end_process
from stepgraph.run.watch.signals import stopping

if TYPE_CHECKING:
    import torch.distributed as dist

#: Names the launcher's process to the ranks that ``--nproc`` starts.
LAUNCHER = "STEPGRAPH_LAUNCHER"

#: Seconds between two polls of the ranks, and of a rank for its launcher.
_POLL_S, _LAUNCHER_POLL_S = 0.1, 1.0

#: Seconds from SIGTERM to SIGKILL.
_GRACE_S = 30.0


def launch(nproc: int, arguments: list[str], max_restarts: int = 0) -> int:
    """Run ``stepgraph train ARGUMENTS`` in ``nproc`` processes on this machine; the exit status of the run.

    If one fails, the others are ended and all start again, at most ``max_restarts`` times. The error names the rank
    whose failure was the last; an error of use, status 2, was reported by the first rank that made it.
    """
    job = str(uuid.uuid4())
    with socket.create_server(("localhost", 0)) as listener:
        # Like torchrun's: `parallel.job_store` and the meeting of the ranks read it.
        common = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc))),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "TORCHELASTIC_RUN_ID": job,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            LAUNCHER: str(os.getpid()),
        }
        command = [sys.executable, "-u", "-m", "stepgraph", "train", *arguments]
        store = None
        for attempt in range(max_restarts + 1):
            own = os.environ | common | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
            ranks: list[subprocess.Popen] = []
            with _passed_on(ranks):
                try:
                    with _held(signal.SIGINT):  # until a rank can answer it
                        for rank in map(str, range(nproc)):
                            env = own | {"RANK": rank, "LOCAL_RANK": rank}
                            ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
                    store = store or _serve(listener, job)
                    failed = _first_failure(ranks)
                finally:
                    _end(ranks)
            if failed is None:
                return 0
        status, rank = ranks[failed].returncode, failed
        if status in (2, 130):  # the rank has said why
            return status
        how = f"ended with status {status}; its own message is above"
        if status < 0:
            from stepgraph.run.watch.heartbeat import last_told

            how = f"was killed by {signal.Signals(-status).name}{last_told(store, rank)}; the others were ended"
        print(f"error: rank {rank} (pid {ranks[rank].pid}) {how}", file=sys.stderr)
        return status if status > 0 else 1


@contextlib.contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    """Block the signal inside. Processes started there inherit the mask, and unblock it themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(listener: socket.socket, job: str) -> "dist.Store":
    """The store of the ranks of ``job``, which outlives them: its server answers at ``listener`` from now on."""
    import torch.distributed as dist  # which the ranks have begun to import too

    port = listener.getsockname()[1]
    server = dist.TCPStore(
        "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
    )
    return dist.PrefixStore(f"stepgraph/{job}", server)


def _first_failure(ranks: list[subprocess.Popen]) -> int | None:
    """Wait until a rank fails, and return it; None once all have exited with status 0. Of ranks that fail at the same
    time, one that was killed by a signal: its death may have failed the others."""
    while True:
        states = [rank.poll() for rank in ranks]
        if failed := [rank for rank, status in enumerate(states) if status]:
            return min(failed, key=lambda rank: (states[rank] > 0, rank))
        if None not in states:
            return None
        time.sleep(_POLL_S)


def _end(ranks: list[subprocess.Popen]) -> None:
    """Terminate the process groups of the ranks that still run, and kill the ones that do not exit within 30 s."""
    until = time.monotonic() + _GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, number)
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, until - time.monotonic()) if number == signal.SIGTERM else None)


@contextlib.contextmanager
def _passed_on(ranks: list[subprocess.Popen]) -> Iterator[None]:
    """Forward the first of the signals that ask a run to stop to the ``ranks``, which save and end; a second one, but
    for SIGHUP, ends this process as usual."""
    before = {number: signal.getsignal(number) for number in stopping()}

    def restore(kept: int | None = None) -> None:
        for number, handler in before.items():
            if number != kept:
                signal.signal(number, handler)

    def pass_on(number: int, _frame: object) -> None:
        restore(kept=signal.SIGHUP)
        for rank in ranks:
            rank.send_signal(number)

    for number in before:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        restore()


def end_with_launcher() -> None:
    """From now on, in a rank that ``--nproc`` or torchrun started, a thread ends this process within 2 s of its
    launcher's end, with status 1. A launcher that was killed with -9 can neither end its ranks nor start others: they
    would train on next to the run that is resumed, or wait for its store forever."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    threading.Thread(target=_wait_for_end, args=(launcher,), name="orphan", daemon=True).start()


def _wait_for_end(launcher: int) -> None:
    while os.getppid() == launcher:  # the kernel gives an orphan another parent
        time.sleep(_LAUNCHER_POLL_S)
    who = f"rank {os.environ['RANK']} (pid {os.getpid()})"
    end_process(1, f"error: {who}: its launcher (pid {launcher}) is gone; the run continues with --resume")
