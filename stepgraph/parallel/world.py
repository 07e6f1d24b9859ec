"""The processes of a run: what torchrun started, and the process group among them."""

import contextlib
import datetime
import gc
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.parallel.mesh import Mesh, MeshSpec

#: Collectives that torch's flight recorder keeps: all of a step's, also of a deep model in many microbatches.
_RECORDED = 20_000
#: Seconds that a rank waits for the others to start, as torch's own rendezvous does.
_STORE_TIMEOUT_S = 1800


def launched() -> bool:
    """Whether torchrun (or what it is made of) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Ranks that were started; 1 for a process that stands alone."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def job_store() -> dist.Store | None:
    """A store in the elastic agent's process, which outlives the ranks and their restarts: what one attempt writes,
    the next one reads. A connection of its own, whose calls raise ``DistError`` after 10 s without an answer. None for
    processes that no elastic agent (torchrun, ``--nproc``) started.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.PrefixStore(f"stepgraph/{os.environ['TORCHELASTIC_RUN_ID']}", _agent_store(10))


def _agent_store(timeout_s: float) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


def _init_process_group(backend: str) -> None:
    if not launched():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
    else:
        # The agent keeps its store over restarts, and torch would read the addresses of the ranks that are gone.
        attempt = f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        store = dist.PrefixStore(attempt, _agent_store(_STORE_TIMEOUT_S))
        rank, world = int(os.environ["RANK"]), world_size()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def gloo_group() -> dist.ProcessGroup | None:
    """A group of all ranks for what another thread than the main one does, on the CPU; all ranks make it at the same
    time. None where this process is alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    with compat.single_gloo_thread():
        return dist.new_group(backend="gloo")


@contextlib.contextmanager
def started(spec: MeshSpec | None, device_type: str) -> Iterator[Mesh | None]:
    """The mesh ``spec`` over the processes that were started, its process groups open while inside.

    Each rank of a machine takes the GPU of its local rank. CPU tensors go through gloo also where GPUs use NCCL. None,
    and nothing is opened, without a ``spec``. Raises ``ValueError`` where processes and mesh do not agree.
    """
    world = world_size()
    if spec is None:
        if world > 1:
            raise ValueError(f"this is one of {world} processes and no mesh says what for: add --mesh fsdp={world}")
        yield None
        return
    if world == 1 and spec.size > 1:
        raise ValueError(
            f"mesh {spec} has {spec.size} ranks and this process is alone: add --nproc {spec.size}, or start it with "
            f"torchrun --nproc-per-node {spec.size} -m stepgraph"
        )
    spec.check_world(world)
    backend = "gloo"
    if device_type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        _take_gpu()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED))
    with compat.single_gloo_thread():
        try:
            _init_process_group(backend)
        except dist.DistNetworkError as failure:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            reason = str(failure).splitlines()[0].partition(". ")[0]
            used = "it is in use, give another by --master-port" if "EADDRINUSE" in str(failure) else reason
            raise ValueError(f"the ranks cannot meet at {place}: {used}") from failure
    try:
        yield Mesh(spec, device_type)
    finally:
        gc.collect()  # NCCL waits for the end of CUDA graphs that hold its kernels before it closes
        dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this rank's process at once, its process groups open: closing them waits for ranks and collectives that may
    never come. The agent then ends the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _take_gpu() -> None:
    local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= there:
        raise ValueError(
            f"local rank {local} has no GPU, this machine has {there}: start at most {there} processes on it"
        )
    torch.cuda.set_device(local)
