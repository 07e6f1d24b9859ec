"""``python -m stepgraph.passes.compile.helper``: compiles pieces for whoever started it, into Inductor's cache on disk.

Standard input: one pickled `Request`. Standard output: a line when it can serve one, and for each piece in order, when
it is done, a line of JSON: null, or why it is not in the cache.
"""

import json
import os
import pickle
import select
import sys

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.inductor.library import Compiled
from stepgraph.inductor.packed import unpack
from stepgraph.passes.compile.helpers import Request  # and, as all passes are, the operators that pieces call

#: Seconds for which one waits for a request: a capture that fails, or that finds its step saved, has none.
_PATIENCE_S = 300


def main() -> int:
    """Serves one request; the exit status is 0 whatever became of single pieces."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print
    compat.import_inductor()  # while the one who started this traces
    print("ready", file=answers, flush=True)
    if not select.select([sys.stdin], [], [], _PATIENCE_S)[0]:
        return 0
    try:
        request: Request = pickle.load(sys.stdin.buffer)
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
        print(json.dumps(refused or _compiled(piece)), file=answers, flush=True)
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
    sys.exit(main())
