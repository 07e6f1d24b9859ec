"""The processes of a run: what torchrun started, and the process group among them."""

import contextlib
import datetime
import gc
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.errors import end_process
from stepgraph.parallel.mesh import Mesh, MeshSpec

#: Collectives that torch's flight recorder keeps: all of a step's, also of a deep model in many microbatches.
_RECORDED = 20_000
#: Seconds that a rank waits for an answer of the store where ranks meet, once all have come; torch's own default.
_STORE_TIMEOUT_S = 1800
#: Seconds that a rank waits for the others to come, until it says so.
_SPEAKS_AFTER_S = 15


def launched() -> bool:
    """Whether torchrun or the like started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """The number of ranks; 1 for a single process."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def job_store() -> dist.Store | None:
    """A store in the elastic agent's process, which outlives the ranks and their restarts: what one attempt writes,
    the next one reads. A connection of its own, whose calls raise ``DistError`` after 10 s without an answer. None for
    processes that no elastic agent (torchrun, ``--nproc``) started.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.PrefixStore(f"stepgraph/{_text('TORCHELASTIC_RUN_ID')}", _agent_store(10))


def says_first(text: str) -> bool:
    """Whether no rank of this start has said ``text`` before. True for a process that no elastic agent started, and
    where the agent does not answer: better twice than never."""
    with contextlib.suppress(dist.DistError):
        if (store := job_store()) is not None:
            digest = hashlib.sha256(text.encode()).hexdigest()
            return store.add(f"said/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{digest}", 1) == 1
    return True


def starts_again() -> bool:
    """Whether an elastic agent would restart the ranks after one ends with a nonzero status."""
    done, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(done) < int(most)


def _agent_store(timeout_s: float) -> dist.Store:
    return dist.TCPStore(*_address(), is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


def _init_process_group(backend: str, timeout_s: float) -> None:
    if not launched():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    rank, world = int(os.environ["RANK"]), world_size()
    with said_if_long(f"rank {rank} waits for the other ranks of {world} at {_place()}, {timeout_s:g} s at most"):
        store = _meet(rank, world, timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _meet(rank: int, world: int, timeout_s: float) -> dist.Store:
    """The store of all ranks, when all have come. Raises ``ValueError``, in one line, where one does not."""
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # The agent keeps its store over restarts, and torch would read the addresses of the ranks that are gone.
            attempt = f"attempt-{_text('TORCHELASTIC_RESTART_COUNT')}"
            store = dist.PrefixStore(attempt, _agent_store(timeout_s))
        else:
            store = _own_store(rank, timeout_s)
    except dist.DistNetworkError as failure:
        reason = str(failure).splitlines()[0].partition(". ")[0]
        used = "it is in use, use another by --master-port" if "EADDRINUSE" in str(failure) else reason
        raise ValueError(f"the ranks cannot meet at {_place()}: {used}") from failure
    keys = [f"here/{other}" for other in range(world)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout_s))
    except dist.DistError as failure:
        missing = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
        raise ValueError(
            f"the ranks cannot meet at {_place()}: rank {rank} of {world} waited {timeout_s:g} s for {missing}; start "
            "them all, or raise --comm-timeout"
        ) from failure
    store.set_timeout(datetime.timedelta(seconds=_STORE_TIMEOUT_S))
    return store


def _own_store(rank: int, timeout_s: float) -> dist.Store:
    """The store of ranks that no elastic agent started; rank 0 has its server."""
    timeout = datetime.timedelta(seconds=timeout_s)
    server = {"is_master": rank == 0, "wait_for_workers": False, "multi_tenant": True}
    return dist.TCPStore(*_address(), timeout=timeout, **server)


def _text(name: str) -> str:
    if not os.environ.get(name):
        raise ValueError(f"the environment's {name} is not set: start ranks by torchrun or --nproc, which set it")
    return os.environ[name]


def _address() -> tuple[str, int]:
    """Host and port where the ranks meet."""
    return _text("MASTER_ADDR"), int(_text("MASTER_PORT"))


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


@contextlib.contextmanager
def said_if_long(text: str) -> Iterator[None]:
    """Print ``text`` where what is inside takes long."""
    timer = threading.Timer(_SPEAKS_AFTER_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def gloo_group() -> dist.ProcessGroup | None:
    """A CPU group of all ranks for use outside the main thread; all ranks create it at the same
    time. None where this process is alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    with compat.single_gloo_thread():
        return dist.new_group(backend="gloo")


@contextlib.contextmanager
def started(spec: MeshSpec | None, device_type: str, timeout_s: float = _STORE_TIMEOUT_S) -> Iterator[Mesh | None]:
    """The mesh ``spec`` over the processes that were started, its process groups open while inside.

    Each rank of a machine takes the GPU of its local rank. CPU tensors go through gloo also where GPUs use NCCL. None,
    and nothing is opened, without a ``spec``. Raises ``ValueError`` where processes and mesh do not agree, and where
    not all ranks have come within ``timeout_s``.
    """
    world = world_size()
    if spec is None:
        if world > 1:
            raise ValueError(f"this is one of {world} processes and there is no mesh: add --mesh fsdp={world}")
        yield None
        return
    if world == 1 and spec.size > 1:
        raise ValueError(
            f"mesh {spec} has {spec.size} ranks and this process is alone: start {spec.size} with torchrun "
            f"--nproc-per-node {spec.size}, or give stepgraph train --nproc {spec.size}"
        )
    spec.check_world(world)
    backend = "gloo"
    if device_type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        _take_gpu()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED))
    with compat.single_gloo_thread():
        _init_process_group(backend, timeout_s)
    try:
        yield Mesh(spec, device_type)
    finally:
        gc.collect()  # NCCL waits for the end of CUDA graphs that hold its kernels before it closes
        dist.destroy_process_group()


def in_own_process(function: Callable[..., None], args: tuple, method: str) -> None:
    """Run ``function(*args)`` in a process that multiprocessing starts by ``method``, and wait for its end. Ctrl-C is
    this process's: it ends the other one. Raises as ``torch.multiprocessing.spawn``."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a new program inherits it, from its first moment on
    try:
        context = torch.multiprocessing.start_processes(_alone, (function, args), join=False, start_method=method)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        for process in context.processes:
            process.kill()
        raise


def _alone(_: int, function: Callable[..., None], args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    function(*args)


def leave(status: int) -> NoReturn:
    """End this rank's process at once, its process groups open: closing them waits for ranks and collectives that may
    never come. The agent then ends the other ranks."""
    end_process(status)


def _take_gpu() -> None:
    local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= there:
        raise ValueError(
            f"local rank {local} has no GPU, this machine has {there}: start at most {there} processes on it"
        )
    torch.cuda.set_device(local)
