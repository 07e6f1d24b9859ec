"""A rank's reports to the elastic agent's store, which outlives the rank."""

import json
import time

import torch.distributed as dist


def key(rank: int) -> str:
    """Where ``rank`` keeps ``[seconds since the epoch, what it is in, host, pid, seconds that the next rank has been
    silent]``, as JSON."""
    return f"rank-{rank}"


def last_told(store: dist.Store, rank: int) -> str:
    """``, 3 s after it was in step 13``: what ``rank`` reported last, if anything, to ``store`` (see
    `parallel.job_store`), by the clock of the machine that both are on."""
    if not store.check([key(rank)]):
        return ""
    at, what, *_ = json.loads(store.get(key(rank)))
    return f", {time.time() - at:.0f} s after it was in {what}"
