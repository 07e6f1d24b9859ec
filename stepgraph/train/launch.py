"""``stepgraph train --nproc N``: this machine's ranks, started as torchrun starts them."""

import os
import sys
import uuid

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stepgraph.train.watch import last_told


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
    )
    try:
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
