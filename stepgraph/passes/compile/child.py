"""A process of our own that compiles for this one."""

import multiprocessing
import os
import subprocess
import sys
from typing import IO


class Child:
    """``python -m MODULE FD``, where ``FD`` is its end of ``connection``. What it prints goes to ``output``."""

    def __init__(self, module: str, output: IO | int, **environment: str):
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
                pass_fds=[theirs.fileno()],
            )
