"""A failed rank reports one line, on stderr and to the elastic agent that started it."""

import os
import re
import socket
import sys
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from stepgraph import parallel

#: How long a rank that lost another one waits, so that the agent notices the other first.
_FIRST_S = 5.0


class RankError(RuntimeError):
    """Tells the elastic agent why a rank ended."""


def is_lost_rank(failure: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or does not answer.

    gloo raises a plain ``RuntimeError`` whose message begins with a place in gloo's sources.
    """
    if isinstance(failure, dist.DistError):
        return True
    return isinstance(failure, RuntimeError) and re.match(r"\[\S*\bgloo/\S+:\d+\]", str(failure)) is not None


def lost_rank(failure: BaseException, where: str) -> str:
    """One line for a collective that failed in ``where`` (``step 13``) because of another rank."""
    reason = re.sub(r"^\[\S*\] ", "", str(failure)).splitlines()[0].partition(". ")[0]
    return f"{where} lost another rank ({reason}), whose own message or agent says why"


def who() -> str:
    """``rank 3 (host, pid 123): ``, or nothing for a single process."""
    return f"rank {os.environ['RANK']} ({socket.gethostname()}, pid {os.getpid()}): " if parallel.launched() else ""


def report(error: str) -> None:
    """Print ``error``, one line, as this rank's, and hand it to the agent that started the rank."""
    print(f"error: {who()}{error}", file=sys.stderr, flush=True)
    try:
        raise RankError(error)
    except RankError as failure:
        get_error_handler().record_exception(failure)


def wait_for_the_agent(told: Callable[[], bool]) -> None:
    """Wait, at most 5 s, until the agent has ``told`` this rank to stop, having seen which rank failed first.

    The agent names the first rank that it finds ended as the cause, which must not be one that only lost another.
    """
    until = time.monotonic() + _FIRST_S
    while time.monotonic() < until and not told():
        time.sleep(0.05)
