"""The entry point of ``stepgraph`` and ``python -m stepgraph``."""

import gc
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
        raise


if __name__ == "__main__":
    run()
