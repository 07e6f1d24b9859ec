"""What a rank tells the elastic agent's store of itself: it outlives the rank."""

import json
import time

import torch.distributed as dist


def key(rank: int) -> str:
    """Where ``rank`` keeps ``[seconds since the epoch, what it is in, host, pid]``, as JSON."""
    return f"rank-{rank}"


def last_told(store: dist.Store, rank: int) -> str:
    """``, 3 s after it was in step 13``: what ``rank`` told ``store`` (see `parallel.job_store`) last, if anything."""
    if not store.check([key(rank)]):
        return ""
    at, what, *_ = json.loads(store.get(key(rank)))
    return f", {time.time() - at:.0f} s after it was in {what}"
