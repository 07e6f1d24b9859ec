"""A transport for tests that buffers nothing: a message leaves when its receive is posted, a communicator runs what is
posted on it in order, and a computation waits for all messages that its rank posted before, as if it waited for the
whole GPU. An order of messages that only buffers save ends in `TimeoutError`."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from stepgraph.kernels.comm import stage_sends
from stepgraph.run.program import ProgramRunner

SECONDS = 20


class Posted(dist.Work):
    """A message that was posted."""

    def __init__(self, future: Future):
        super().__init__()
        self.future = future

    def wait(self, timeout: object = None) -> bool:
        self.future.result(SECONDS)
        return True

    def is_completed(self) -> bool:
        return self.future.done()


class Transport:
    """``communicator``: the one that carries messages of a group to or from a peer; by default one for each peer of
    each group, as NCCL has it."""

    def __init__(self, communicator: Callable[[str, int], Hashable] = lambda group, peer: (group, peer)):
        self.communicator = communicator
        self.queues: dict[Hashable, ThreadPoolExecutor] = {}
        self.posted: list[Posted] = []  # kept: a message's work is not its tensor's to keep
        self.count = 0

    def _post(self, run: Callable, flat: torch.Tensor, group: dist.ProcessGroup, **peer: int) -> Posted:
        key = self.communicator(group.group_name, *peer.values())
        queue = self.queues.setdefault(key, ThreadPoolExecutor(1))
        self.posted.append(Posted(queue.submit(run, flat, group=group, **peer)))
        self.count += 1
        return self.posted[-1]

    def isend(self, flat: torch.Tensor, group: dist.ProcessGroup, group_dst: int, tag: int) -> Posted:
        return self._post(dist.send, flat, group, group_dst=group_dst)  # gloo's ends when the receive is posted

    def irecv(self, flat: torch.Tensor, group: dist.ProcessGroup, group_src: int) -> Posted:
        return self._post(dist.recv, flat, group, group_src=group_src)

    def drain(self) -> None:
        """Wait for everything that was posted."""
        for posted in self.posted:
            posted.wait()
        self.posted.clear()

    @contextlib.contextmanager
    def in_place(self) -> Iterator["Transport"]:
        """Messages between stages go this way."""
        run = ProgramRunner._run

        def waiting(runner: ProgramRunner, graph: str, flat: list[torch.Tensor]) -> object:
            if not graph.startswith(("send_", "receive_")):
                self.drain()
            return run(runner, graph, flat)

        ways = SimpleNamespace(isend=self.isend, irecv=self.irecv)
        with mock.patch.object(stage_sends, "dist", ways), mock.patch.object(ProgramRunner, "_run", waiting):
            yield self
