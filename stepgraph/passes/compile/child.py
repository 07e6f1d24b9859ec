"""A child process that compiles for this one."""

import multiprocessing
import os
import subprocess
import sys
from typing import IO

#: Without Python's collector, which would take a quarter of the time to import torch, and find nothing.
_RUN = "import gc, importlib, sys; gc.disable(); importlib.import_module(sys.argv[1]).main(*map(int, sys.argv[2:]))"


class Child:
    """``MODULE.main(FD, ...)`` in a process group of its own, where each ``FD`` is its end of one of ``connections``.
    What it prints goes to ``output``."""

    def __init__(self, module: str, output: IO | int, connections: int = 1, **environment: str):
        pairs = [multiprocessing.Pipe() for _ in range(connections)]
        self.connections, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
        self.connection, *_ = self.connections
        numbers = [end.fileno() for end in theirs]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN, module, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
            pass_fds=numbers,
            process_group=0,
        )
        for end in theirs:
            end.close()
