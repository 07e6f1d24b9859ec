"""The entry point of ``stepgraph`` and ``python -m stepgraph``."""

import gc
import sys
from typing import NoReturn

from stepgraph.cli import main
from stepgraph.errors import INTERRUPTED, end_process


def run() -> NoReturn:
    """`cli.main`. After Ctrl-C the process ends at once: Python's own end would wait for threads, compilers and its
    collector."""
    gc.disable()  # imports take a quarter less time; `main` enables it
    try:
        main()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            end_process(INTERRUPTED)
        triton = sys.modules.get("triton")
        if triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
            gc.unfreeze()  # it prints what Python's end does not collect as 30 lines of leaks
        raise


if __name__ == "__main__":
    run()
