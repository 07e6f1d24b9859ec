"""Work that the ranks of a run share: each rank does it, or only the first, and an error reaches all."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The processes of this run: torch.distributed's when it is initialized, otherwise this one alone.

    An error on one rank is raised on every rank, so none waits for ever for another that has failed. ``alone``: count
    this process by itself in any case. ``group``: what the ranks meet in, None for the default of all.
    """

    def __init__(self, alone: bool = False, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.distributed = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0
        self.world = dist.get_world_size() if self.distributed else 1

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank; all results in rank order."""
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            if not self.distributed:
                raise
            failure = error
        results = [(value, failure)]
        if self.distributed:
            results = [None] * self.world
            dist.all_gather_object(results, (value, failure), group=self.group)
        for _, error in results:
            if error is not None:
                raise error
        return [value for value, _ in results]

    def each(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; this rank's result."""
        kept: list[T] = []
        self.gather(lambda: kept.append(work()))
        return kept[0]

    def first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; its result on every rank."""
        return self.gather(lambda: work() if self.rank == 0 else None)[0]
