"""A ``python`` whose programs are forks of a process that has torch and stepgraph imported, for tests whose point is
what a program does and not how it starts: an import takes five processor-seconds a process.

It takes ``[-u] -m MODULE ...`` and ``[-u] FILE ...``, and gives streams, folder, arguments, environment, signals, and
exit status as a real one does. torch and Triton read some variables when they are imported: a program whose environment
sets others than the server's runs in a real Python.
"""

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
from multiprocessing.connection import wait
from pathlib import Path

from tests.distributed.ranks import preload

#: How the names of variables begin that may differ from one fork to another: they are read when they are needed.
FREE = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "PYTEST_",
    "PYTHON",
)
FREE += ("STEPGRAPH_", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "COLUMNS")
FREE += ("LINES", "_")


def python() -> str:
    """The path of the ``python``, the same for all tests of this process."""
    if not _served:
        folder = tempfile.TemporaryDirectory(prefix="stepgraph-forks-")
        path = Path(folder.name, "python")
        path.write_text(f"#!{sys.executable} -S\n" + Path(__file__).with_name("forked_client.py").read_text())
        path.chmod(0o755)
        preload()
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(os.path.join(folder.name, "socket"))
            door.listen(64)
            server = multiprocessing.get_context("forkserver").Process(target=_serve, args=(door,))
            server.start()
        atexit.register(server.terminate)
        _served.extend([str(path), folder, server.pid])
    return _served[0]


_served: list = []  # the path, the folder that lives as long as this process, and the server's number


def environment() -> dict[str, str]:
    """The environment that the fork has: other tests may have changed that of this process since."""
    python()
    pairs = Path(f"/proc/{_served[2]}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def _serve(door: socket.socket) -> None:
    gc.freeze(), gc.set_threshold(20_000)  # as in `tests.conftest`, for all that it forks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who attend
    parent = multiprocessing.parent_process().sentinel
    while parent not in wait([door, parent]):
        client, _ = door.accept()
        if os.fork() == 0:
            door.close()
            _attend(client)
        client.close()


def _attend(client: socket.socket) -> None:
    """Fork the program of ``client``; it ends when its client does, and its client as it did."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, *_ = socket.recv_fds(client, 4, 3)
    request = json.loads(client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    if any(not name.startswith(FREE) for name, _ in request[1].items() ^ os.environ.items()):
        client.sendall(bytes(4))
        os._exit(0)
    if (program := os.fork()) == 0:
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(*request)
    for stream in streams:
        os.close(stream)
    client.sendall(program.to_bytes(4, "big"))
    if client in wait([client, os.pidfd_open(program)]):
        os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def _run(words: list[str], environment: dict[str, str], folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    status = 0
    try:
        tempfile.tempdir = None  # asked for again
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        words = words[words[0] == "-u" :]
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, folder)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status & 255)
