"""Process groups, collectives, symmetric memory and the flight recorder."""

import contextlib
import functools
import itertools
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def all_reduce(tensor: torch.Tensor, op: str, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """``tensor`` reduced by ``op`` (``sum``, ``max``) over ``group``, as a new tensor; in a trace, as two nodes."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, op, group.group_name))


def all_to_all(parts: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Part r of equal ``parts`` along dimension 0 goes to rank r of ``group``; what came from rank r is part r of the
    result, a new tensor. In a trace, as two nodes."""
    return torch.ops._c10d_functional.wait_tensor(begin_all_to_all(parts, group))


def begin_all_to_all(parts: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """`all_to_all` that is not waited for: nothing may read the result before ``wait_tensor`` of it."""
    sizes = [parts.shape[0] // group.size()] * group.size()
    return torch.ops._c10d_functional.all_to_all_single(parts, sizes, sizes, group.group_name)


def all_gather(part: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """The equal ``part`` of each rank of ``group``, one after the other along dimension 0. In a trace, as two nodes."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(part, group.size(), group.group_name))


def reduce_scatter(terms: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """This rank's part, along dimension 0, of the sum of the ranks' ``terms``. In a trace, as two nodes."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(terms, "sum", group.size(), group.group_name))


def groups_of(mesh: torch.distributed.DeviceMesh) -> list[torch.distributed.ProcessGroup]:
    """Process groups to reduce over, one by one, for a sum over all ranks of ``mesh``."""
    if mesh.size() == torch.distributed.get_world_size():
        return [torch.distributed.group.WORLD]
    return mesh.get_all_groups()


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """``tensor`` with ``local`` as this rank's part, on any device: ``DTensor.from_local`` moves it to the mesh's."""
    return DTensor(local, tensor._spec, requires_grad=False)


def flight_records(device_type: str) -> list[dict[str, Any]]:
    """The latest collectives of this process, oldest first: NCCL's for ``cuda``, else gloo's.

    Each has ``process_group`` (name, description), ``profiling_name``, ``input_sizes``, ``time_created_ns`` (since the
    epoch), ``retired`` (it has ended) and ``state``, which NCCL updates (``completed``) and gloo does not. Collectives
    replayed by a CUDA graph are not recorded.
    """
    recorder = torch._C._distributed_c10d
    dump = recorder._dump_nccl_trace if device_type == "cuda" else recorder._dump_fr_trace
    return pickle.loads(dump(True, False, False)).get("entries", [])  # bytes that torch has just written


def register_work(tensor: torch.Tensor, work: torch.distributed.Work) -> None:
    """``wait_tensor(tensor)`` waits for ``work``."""
    torch._C._distributed_c10d._register_work(tensor, work)


@contextlib.contextmanager
def single_gloo_thread() -> Iterator[None]:
    """Gloo groups made inside run their collectives on one thread each.

    Torch gives each two, which write the name of the collective that they ended last into one string without a lock: a
    name that must be allocated (that of an all-gather) is then freed twice where two collectives of a group are in
    flight, and the process dies of a corrupt heap (torch 2.11 to 2.15).
    """
    c10d = torch.distributed.distributed_c10d
    base = c10d.ProcessGroupGloo

    class ProcessGroupGloo(base):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, enable_reconfigure: bool = False):
            if enable_reconfigure:  # torch 2.15; the options below have no place for it
                raise RuntimeError("a gloo group that is reconfigured cannot be made on one thread")
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options = base._Options()
            options._devices = [base.create_device(interface=n) for n in names] or [base.create_default_device()]
            options._timeout, options._threads = timeout, 1
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = ProcessGroupGloo
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = base


def several_gloo_threads(group: torch.distributed.ProcessGroup) -> bool:
    """Whether the collectives of ``group`` on CPU tensors are gloo's, on several threads (see `single_gloo_thread`)."""
    backend = group._get_backend(torch.device("cpu"))
    return backend.name() == "gloo" and backend.options._threads > 1


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group that a graph's nodes call ``name``."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def default_store() -> torch.distributed.Store:
    """The store in which the ranks of the default process group met."""
    return torch.distributed.distributed_c10d._get_default_store()


#: The names that `name_group` gave, and the groups' own.
_OWN_NAMES: dict[str, str] = {}


def name_group(group: torch.distributed.ProcessGroup, name: str) -> str:
    """Give ``group`` the second name ``name`` and return it: torch's own names differ from rank to rank. Where another
    group that is still open has the name, it is ``name.1``, and so on: the same on all ranks if they name groups in one
    order."""
    registry = torch._C._distributed_c10d
    for alias in itertools.chain([name], (f"{name}.{i}" for i in itertools.count(1))):
        try:
            held = registry._resolve_process_group(alias)
        except RuntimeError:  # never given, or to a group that is gone
            held = None
        if held not in torch.distributed.distributed_c10d._world.pg_names:  # destroyed, if it still is
            registry._unregister_process_group(alias)
            registry._register_process_group(alias, group)
            held = group
        if held == group:
            _OWN_NAMES[alias] = group.group_name
            return alias


def group_name(name: str) -> str:
    """torch's own name of the process group that a graph's nodes call ``name``."""
    return _OWN_NAMES.get(name, name)


def symmetric_memory(nbytes: int, group_name: str, device: torch.device) -> tuple[torch.Tensor, Any]:
    """(``nbytes`` of this rank's memory that all ranks of the group can write, the handle with the addresses of all
    ranks' memory and with flags, which are zero). NVLink multicast is off.

    All ranks call it together, and not while a CUDA graph is recorded. Raises ``RuntimeError`` if a rank cannot reach
    another's memory.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when memory is allocated
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("symmetric memory cannot be made while a CUDA graph is recorded: run the step once before")
    memory = torch._C._distributed_c10d._SymmetricMemory
    # torch 2.11 writes the ranks' addresses into memory of the current stream's pool without waiting for that stream: a
    # kernel queued before may still write there. Nothing is queued on a stream of its own. It also zeroes the memory on
    # the default stream, after all that is queued there, and does not wait: a faster rank's data would be lost.
    with torch.cuda.stream(_own_stream(device)):
        tensor = memory.empty_strided_p2p((nbytes,), [1], torch.uint8, device, group_name)
        torch.cuda.synchronize(device)
        return tensor, memory.rendezvous(tensor)


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def record_nccl_unregistered() -> None:
    """Keep NCCL from registering buffers while a CUDA graph is recorded, where memory is in expandable segments and
    the user has not set ``NCCL_GRAPH_REGISTER``: it takes a buffer for one allocation, such memory consists of several,
    and replays hang. NCCL reads the variable when it records for the first time. Source: pytorch issue 158029."""
    in_use = torch.cuda.is_initialized() and torch.distributed.is_initialized()
    if in_use and any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def init_fake_world(rank: int, world: int) -> None:
    """A default process group of ``world`` ranks of which only ``rank`` exists: collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
