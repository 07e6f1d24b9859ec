"""``main(FD)``: compiles Triton kernels for whoever started it.

``FD``: its end of a `multiprocessing.Pipe`. It gets `Request` after `Request`, and sends (the request's number, a
kernel's name, the error or None) for each source that is done. The results are in Triton's cache on disk. A process of
its own, with children for each source: it has neither a GPU context nor threads, and so can fork, which a training
process cannot.
"""

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from stepgraph import compat

#: Seconds after which a process that is asked for nothing ends.
_IDLE_S = 300


class Request(NamedTuple):
    """Compile ``sources`` for ``target``, a ``GPUTarget``, in ``environment``, which names Triton's cache.
    ``launchers``: and what calls them, which is linked with the GPU's driver."""

    number: int
    environment: dict[str, str]
    target: Any
    sources: list[compat.TritonSource]
    launchers: bool


def main(number: int) -> None:
    """Serves requests until the one who asks is gone, whatever becomes of single sources."""
    import triton  # noqa: F401  before the first request comes; who starts this process may have none

    connection = Connection(number)
    while connection.poll(_IDLE_S):
        try:
            request = connection.recv()
        except EOFError:
            break
        os.environ.clear()
        os.environ.update(request.environment)
        jobs = [(source, request.target, request.launchers) for source in request.sources]
        with multiprocessing.get_context("fork").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
            for name, error in pool.imap_unordered(_compiled, jobs):
                connection.send((request.number, name, error))


def _compiled(job: tuple[compat.TritonSource, Any, bool]) -> tuple[str, str | None]:
    source, target, launchers = job
    try:
        compiled = compat.triton_compiled(source, target)
        if launchers:
            compat.build_triton_launcher(compiled)
    except Exception as failure:
        lines = str(failure).strip().splitlines() or [""]
        return source.function[1], f"{type(failure).__name__}: {lines[-1]}"
    return source.function[1], None
