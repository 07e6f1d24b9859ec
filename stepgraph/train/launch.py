"""``stepgraph train --nproc N``: starts ranks on this machine as torchrun does."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stepgraph.run.watch.heartbeat import last_told
from stepgraph.run.watch.signals import stopping
from stepgraph.train.faults.orphan import LAUNCHER


def launch(nproc: int, arguments: list[str], max_restarts: int = 0) -> int:
    """Run ``stepgraph train ARGUMENTS`` in ``nproc`` processes on this machine; the exit status of the run.

    If one fails, the others are ended and all start again, at most ``max_restarts`` times. The error names the rank
    whose failure was the last; an error of use, status 2, was reported by the first rank that made it.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # one line below reports it
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    os.environ[LAUNCHER] = str(os.getpid())
    # This process and the ranks share the store, and the agent, which runs in this process too, its server.
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    # Not torchrun's command line, which would take --nproc as the abbreviation of an option.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="static",
        rdzv_endpoint=f"localhost:{server.port}",
        rdzv_configs={"rank": 0},
        max_restarts=max_restarts,
        # The ranks handle the others themselves: they save and end with 0, and then the agent ends too.
        signals_to_handle="SIGQUIT",
    )
    try:
        with _passed_on(*stopping()):
            elastic_launch(config, sys.executable)("-u", "-m", "stepgraph", "train", *arguments)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode in (2, 130):  # the rank has said why
            return first.exitcode
        how = f"ended with status {first.exitcode}; its own message is above"
        if first.exitcode < 0:
            told = last_told(dist.PrefixStore(f"stepgraph/{config.run_id}", server), rank)
            how = f"was killed by {first.signal_name()}{told}; the others were ended"
        print(f"error: rank {rank} (pid {first.pid}) {how}", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 1
    return 0


@contextlib.contextmanager
def _passed_on(*numbers: signal.Signals) -> Iterator[None]:
    """Forward the first of these signals to this process's children; a second one, but for SIGHUP, ends this process as
    usual."""
    before = {number: signal.getsignal(number) for number in numbers}

    def restore(kept: int | None = None) -> None:
        for number, handler in before.items():
            if number != kept:
                signal.signal(number, handler)

    def pass_on(number: int, _frame: object) -> None:
        restore(kept=signal.SIGHUP)
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in numbers:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        restore()


def _children() -> list[int]:
    """Processes that this one started, from /proc on Linux, where containers may lack ``ps``; else from ``ps``."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            found[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    if not found:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        found = dict(map(int, line.split()) for line in listed.splitlines())
    return [pid for pid, parent in found.items() if parent == os.getpid()]
