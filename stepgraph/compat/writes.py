"""Inductor's scheduler: reads of a buffer that was written in place, which torch forgets in two places.

The scheduler gives a buffer another name with each write, and reads after it refer to that one. torch 2.11 to 2.14
looks for reads of the first name alone where it asks whether one kernel may read a buffer and then write it:
``x[rows] = y; x += x.flip(0)`` read elements that the kernel had written (pytorch #198270; 2.15 looks for all names).
Where it computes a node's loops again, so that another can be fused with it, torch 2.11 to 2.13 forgets the name:
gradients of ``max_pool2d`` and ``cummax`` were read before they were written (pytorch #185509).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from stepgraph.compat.replaced import replaced


@contextlib.contextmanager
def writes_in_order() -> Iterator[None]:
    """Inside, Inductor keeps the order of reads and writes of a buffer, however often that is written."""
    from torch._inductor.scheduler import Scheduler, SchedulerNode

    fusable = functools.partialmethod(_fusable, Scheduler.fusable_weak_dep)
    recompute = functools.partialmethod(_recompute, SchedulerNode.recompute_size_and_body)
    with (
        replaced(Scheduler, fusable_weak_dep=fusable),
        replaced(SchedulerNode, recompute_size_and_body=recompute),
    ):
        yield


def _fusable(scheduler: Any, plain: Callable[..., bool], dependency: Any, reader: Any, writer: Any) -> bool:
    """Whether one kernel may be ``reader`` of a buffer, and ``writer`` in its memory: they must visit the same elements
    in the same order."""
    if not plain(scheduler, dependency, reader, writer):
        return False
    from torch._inductor.dependencies import MemoryDep

    first = scheduler.mutation_real_name
    buffer = first[dependency.mutating_buf]
    (write,) = (w for w in writer.read_writes.writes if w.name == dependency.mutating_buf)
    reads = (r for r in reader.read_writes.reads if first.get(r.name, r.name) == buffer)
    return all(isinstance(r, MemoryDep) and r.index == write.index and r.size == write.size for r in reads)


def _recompute(node: Any, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Compute the loops of ``node`` again, and keep the names of what it reads and its place among others."""
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    order = OrderedSet(read for read in node.read_writes.reads if isinstance(read, (StarDep, WeakDep)))
    plain(node, *args, **kwargs)
    node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))
