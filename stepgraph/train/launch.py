"""``stepgraph train --nproc N``: this machine's ranks, started as torchrun starts them."""

import contextlib
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

from stepgraph.train.faults.watch import last_told


def launch(nproc: int, arguments: list[str], max_restarts: int = 0) -> int:
    """Run ``stepgraph train ARGUMENTS`` in ``nproc`` processes of this machine; the exit status of the run.

    When one fails the others are ended, and all start again, at most ``max_restarts`` times. The message names the
    one that failed last.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # The store is this process's and the ranks'; the agent, which runs in this process too, shares its server.
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    # Not torchrun's own command line: it would take --nproc for an abbreviation of an option.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="static",
        rdzv_endpoint=f"localhost:{server.port}",
        rdzv_configs={"rank": 0},
        max_restarts=max_restarts,
        # The ranks heed SIGTERM and Ctrl-C themselves: they save and end with 0, and the agent, left alone, with them.
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    try:
        with _passed_on(signal.SIGINT, signal.SIGTERM):
            elastic_launch(config, sys.executable)("-u", "-m", "stepgraph", "train", *arguments)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        how = f"ended with status {first.exitcode}; its own message is above"
        if first.exitcode < 0:
            told = last_told(dist.PrefixStore(f"stepgraph/{config.run_id}", server), rank)
            how = f"was killed by {first.signal_name()}{told}; the others were ended"
        print(f"error: rank {rank} (pid {first.pid}) {how}", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 1
    return 0


@contextlib.contextmanager
def _passed_on(*numbers: signal.Signals) -> Iterator[None]:
    """The first of these signals goes to this process's children; a second one ends it as it would have."""
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def pass_on(number: int, _frame: object) -> None:
        restore()
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
    """Processes that this one started. Linux says so in /proc, which a container has also where it has no ``ps``."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            found[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    if not found:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        found = dict(map(int, line.split()) for line in listed.splitlines())
    return [pid for pid, parent in found.items() if parent == os.getpid()]
