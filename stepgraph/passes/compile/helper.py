"""``python -m stepgraph.passes.compile.helper FD``: compiles pieces for whoever started it.

The results are in Inductor's cache on disk. ``FD``: its end of a `multiprocessing.Pipe`. It sends True when it can
serve a `Request`, gets one, and sends for each piece in order, when it is done, None, or why it is not in the cache.
"""

import sys
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.inductor.library import Compiled
from stepgraph.inductor.packed import unpack
from stepgraph.passes.compile.helpers import Request  # and, as all passes are, the operators that pieces call

#: Seconds for which one waits for a request: a capture that fails, or that finds its step saved, has none.
_PATIENCE_S = 300


def main(connection: Connection) -> int:
    """Serves one request; the exit status is 0 whatever became of single pieces."""
    compat.import_inductor()  # while the one who started this traces
    connection.send(True)
    if not connection.poll(_PATIENCE_S):
        return 0
    try:
        request: Request = connection.recv()
    except EOFError:  # nobody asks any more
        return 0
    if request.device is not None:
        torch.cuda.set_device(request.device)
    refused = None
    if not compat.take_inductor_settings(request.settings, request.threads):
        refused = "Inductor has other settings there"
    elif request.place is not None and not _named(*request.place, request.groups):
        refused = "process groups have other names there"
    for piece in request.pieces:
        connection.send(refused or _compiled(piece))
    return 0


def _named(rank: int, world: int, groups: dict[str, list[int]]) -> bool:
    """Make ``groups`` of ranks that are not there: Inductor asks how many ranks a group has. Whether all have their
    names."""
    compat.init_fake_world(rank, world)
    return all(compat.name_group(dist.new_group(ranks), name) == name for name, ranks in groups.items())


def _compiled(data: bytes) -> str | None:
    try:
        Compiled(*unpack(data))
    except Exception as failure:  # whoever asked compiles it then, and shows what is wrong
        return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"
    return None


if __name__ == "__main__":
    sys.exit(main(Connection(int(sys.argv[1]))))
