"""``python -m stepgraph.kernels.compile_worker``: compiles Triton kernels for whoever started it.

Standard input: one pickled `Request`. Standard output: a line of JSON for each source that is done, with its kernel's
name and the error, or null. The results are in the folder ``cache``, Triton's cache on disk. A process of its own, with
children for each source: it has neither a GPU context nor threads, and so can fork, which a training process cannot.
"""

import json
import multiprocessing
import os
import pickle
import sys
from typing import Any, NamedTuple

from stepgraph import compat


class Request(NamedTuple):
    """Compile ``sources`` for ``target``, a ``GPUTarget``, into the folder ``cache``. ``launchers``: and what calls
    them, which is linked with the GPU's driver."""

    cache: str
    target: Any
    sources: list[compat.TritonSource]
    launchers: bool


def main() -> int:
    """Serves one request; the exit status is 0 whatever became of single sources."""
    try:
        request = pickle.load(sys.stdin.buffer)
    except EOFError:  # the one who asks is gone
        return 0
    os.environ["TRITON_CACHE_DIR"] = request.cache
    jobs = [(source, request.target, request.launchers) for source in request.sources]
    with multiprocessing.get_context("fork").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for name, error in pool.imap_unordered(_compiled, jobs):
            print(json.dumps([name, error]), flush=True)
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
