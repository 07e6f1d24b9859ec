"""``stepgraph train --nproc N``: this machine's ranks, started as torchrun starts them."""

import os
import sys
import uuid

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(nproc: int, arguments: list[str]) -> int:
    """Run ``stepgraph train ARGUMENTS`` in ``nproc`` processes of this machine; the exit status of the run.

    When one fails the others are ended, and the message names it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # What `torchrun --standalone` does. Its own command line would take --nproc for an abbreviation of an option.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "stepgraph", "train", *arguments)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        print(f"error: rank {rank} ended with status {first.exitcode}; its own message is above", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 1
    return 0
