"""``main(FD, ...)``: helpers that compile pieces for whoever started them.

The results are in Inductor's cache on disk. One process imports, then forks a helper for each ``FD``, its end of a
`multiprocessing.Pipe`. A helper may first receive the number of a GPU to get ready for. It then receives a `Request`,
and sends for each piece, in order, None when it is done, or why it is not in the cache.
"""

import os
import signal
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx

from stepgraph import compat
from stepgraph.errors import first_line
from stepgraph.inductor.library import Compiled
from stepgraph.inductor.packed import pack, unpack

aten = torch.ops.aten
#: Seconds for which one waits for a request: a capture that fails, or that finds its step saved, has none.
_PATIENCE_S = 300
#: Forks of each helper that compile its kernels: a piece of a transformer's block has about ten.
_FORKS = 4


def main(*numbers: int) -> NoReturn:
    """Ends each helper when it has served, and the process that they are forks of after all of them."""
    connections = [Connection(number) for number in numbers]
    compat.import_inductor()  # while the one who started this traces
    for i, connection in enumerate(connections):
        if os.fork() == 0:
            for other in connections[i + 1 :]:  # whose helpers alone hold them, so that their ends are seen
                other.close()
            try:
                serve(connection)
            finally:  # without what Python does at its end, which would wait for the forks
                compat.end_forked_workers()
                end()
        connection.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ends the helpers, and with them this process
    for _ in connections:
        os.wait()
    end()


def end() -> NoReturn:
    """End this process at once: to take apart what was imported takes a second."""
    os._exit(0)


def serve(connection: Connection) -> None:
    """Serves one request."""
    try:
        request, device, refused = _received(connection), None, None
        if isinstance(request, int):
            device, refused = request, _without_device(request)
            if not connection.poll():  # Inductor does some work only at its first piece
                _compiled(_example(torch.device("cuda", device)))
            request = _received(connection)
    except EOFError:  # nobody asks any more
        return
    if request.device != device:
        refused = _without_device(request.device)
    if not compat.take_inductor_settings(request.settings, request.workers):
        refused = "Inductor has other settings there"
    elif request.place is not None and not _named(*request.place, request.groups):
        refused = "process groups have other names there"
    for piece in request.pieces:
        connection.send(refused or _compiled(piece))


def _received(connection: Connection) -> Any:
    """The next object that is sent. Raises ``EOFError`` if none comes in time."""
    if not connection.poll(_PATIENCE_S):
        raise EOFError
    return connection.recv()


def _without_device(device: int | None) -> str | None:
    """Fork the processes that compile kernels, then create a context on the GPU ``device``. Why that fails, or None."""
    try:
        if device is not None:
            compat.fork_compile_workers(_FORKS)
            torch.cuda.set_device(device)
    except RuntimeError as failure:  # such as of a fork of a process that has a GPU
        return first_line(failure)
    return None


def _example(device: torch.device) -> bytes:
    """A piece for ``device`` that the cache of graphs does not keep, so that it is compiled each time."""
    graph, mode = fx.Graph(), compat.FakeTensorMode()
    x = graph.placeholder("x")
    y = graph.call_function(aten.mm.default, (x, graph.call_function(aten.sin.default, (x,))))
    for node in (x, y):
        node.meta["val"] = compat.empty_fake(mode, (64, 64), (64, 1), torch.float32, device)
    graph.output((y,))
    return pack(fx.GraphModule({}, graph), {"fx_graph_cache": False})


def _named(rank: int, world: int, groups: dict[str, list[int]]) -> bool:
    """Make ``groups`` of ranks that are not there: Inductor asks how many ranks a group has. Whether all have their
    names."""
    compat.init_fake_world(rank, world)
    return all(compat.name_group(dist.new_group(ranks), name) == name for name, ranks in groups.items())


def _compiled(data: bytes) -> str | None:
    try:
        Compiled(*unpack(data))
    except Exception as failure:  # whoever asked compiles it then, and shows what is wrong
        return f"{type(failure).__name__}: {first_line(failure)}"
    return None
