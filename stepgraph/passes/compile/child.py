"""A process of our own that compiles for this one."""

import multiprocessing
import os
import subprocess
import sys
from typing import IO


class Child:
    """``python -m MODULE FD ...`` in a process group of its own, where each ``FD`` is its end of one of
    ``connections``. What it prints goes to ``output``."""

    def __init__(self, module: str, output: IO | int, connections: int = 1, **environment: str):
        pairs = [multiprocessing.Pipe() for _ in range(connections)]
        self.connections, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
        self.connection, *_ = self.connections
        numbers = [end.fileno() for end in theirs]
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
            pass_fds=numbers,
            process_group=0,
        )
        for end in theirs:
            end.close()
