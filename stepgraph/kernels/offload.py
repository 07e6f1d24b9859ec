"""Copies of results to page-locked host memory and back, on streams of their own.

    token = offload_begin(x)           the copy to the host begins once x is computed
    host = offload_end(token, x)       from here on the memory of x may be used again
    y = reload_begin(host, device)     memory for it, and the copy back begins
    x = reload_end(y)                  computation waits for it

State that stays on the host is reloaded likewise, and written back:

    token = store_begin(host, x)       the copy of x into host begins
    store_end(token, x)                from here on the memory of x may be used again

There is one stream for each direction, since a GPU has a copy engine for each. Host memory is allocated once, before a
CUDA graph records its address, and used again by later steps. On a CPU the same operators copy at once.
"""

import contextlib
import mmap
import sys
from collections import defaultdict
from typing import Any

import torch

from stepgraph.kernels.comm.exchange import Session, current, operator

Tensor = torch.Tensor


class _Locked(mmap.mmap):
    """Memory that a GPU copies from and to directly, until nothing holds it."""

    address: int | None = None

    def lock(self, address: int) -> None:
        if code := int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0)):
            raise RuntimeError(
                f"the host does not give {len(self) / 2**30:.2f} GiB of page-locked memory (CUDA error {code}): "
                "offload less, or raise the limit that ulimit -l shows"
            )
        self.address = address

    def __del__(self) -> None:
        if self.address is not None and not sys.is_finalizing():
            torch.cuda.synchronize()  # copies under way
            torch.cuda.cudart().cudaHostUnregister(self.address)


def page_locked(nbytes: int) -> Tensor:
    """Zeros (nbytes,), uint8, in page-locked host memory of that size: torch's own rounds it up to a power of two."""
    memory = _Locked(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # fewer pages to lock, where the system has large ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
    memory.lock(tensor.data_ptr())
    return tensor


class HostMemory:
    """Host memory for the copies of one captured step, and the copies under way.

    ``device``: that copies come from. ``nbytes``: of all buffers. A buffer is free again when what it holds was
    copied back, so that a step's microbatches and its next call use the same ones.
    """

    def __init__(self, device: torch.device):
        self.device, self.nbytes = device, 0
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._taken: dict[int, Tensor] = {}
        #: By the address of a token or of a result: the event of its copy (None: nothing to wait for), the host's copy.
        self._under_way: dict[int, tuple[Any, Tensor]] = {}

    def out(self, x: Tensor) -> Tensor:
        """Begin to copy ``x``, dense in memory; a token for `host_of`."""
        nbytes = _flat(x).numel() * x.element_size()
        if not self._free[nbytes]:
            on_gpu = self.device.type == "cuda"
            self._free[nbytes].append(page_locked(nbytes) if on_gpu else torch.empty(nbytes, dtype=torch.uint8))
            self.nbytes += nbytes
        buffer = self._free[nbytes].pop()
        host = buffer.view(x.dtype).as_strided(x.shape, x.stride())
        self._taken[host.data_ptr()] = buffer
        return self.store(host, x)

    def store(self, host: Tensor, x: Tensor) -> Tensor:
        """Begin to copy ``x`` into ``host``, of the same form; a token for `host_of`."""
        token = x.new_empty(1)
        self._under_way[token.data_ptr()] = self._copy(0, host, x), host
        return token

    def host_of(self, token: Tensor) -> Tensor:
        """The host's copy that `out` began and named by ``token``, once it is complete."""
        event, host = self._under_way.pop(token.data_ptr())
        self._wait(event)
        return host

    def back(self, host: Tensor) -> Tensor:
        """Memory for ``host`` on the device, which it is being copied to."""
        y = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.device)
        self._under_way[y.data_ptr()] = self._copy(1, y, host), host
        return y

    def arrived(self, y: Tensor) -> None:
        """Wait for the copy to ``y``, a result of `back`."""
        event, host = self._under_way.pop(y.data_ptr())
        self._wait(event)
        buffer = self._taken.pop(host.data_ptr(), None)
        if buffer is not None:  # else state, which stays where it is
            self._free[buffer.numel()].append(buffer)

    def join(self) -> None:
        """Let the current stream wait for all copies under way: a CUDA graph may not end before what it began."""
        for key, (event, host) in self._under_way.items():
            self._wait(event)
            self._under_way[key] = None, host

    def forget(self) -> None:
        """Drop what is under way, after a step that was broken off: its buffers are free."""
        if (self._taken or self._under_way) and self.streams:
            torch.cuda.synchronize(self.device)
        self._under_way.clear()
        for buffer in self._taken.values():
            self._free[buffer.numel()].append(buffer)
        self._taken.clear()

    def _copy(self, direction: int, to: Tensor, source: Tensor) -> Any:
        """Copy all elements as they lie in memory; the event after it, None on a CPU."""
        to, source = _flat(to), _flat(source)
        if not self.streams:
            to.copy_(source)
            return None
        stream = self.streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def _flat(x: Tensor) -> Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if span != x.numel():
        raise RuntimeError(f"a tensor {tuple(x.shape)} with strides {x.stride()} is to be offloaded and is not dense")
    return x.as_strided((span,), (1,))


def host_memory(device: torch.device, session: Session | None = None) -> HostMemory:
    """The host memory of ``session``, by default of the session that is entered, for ``device``."""
    session = session or current()
    if device not in session.host_memory:
        session.host_memory[device] = HostMemory(device)
    return session.host_memory[device]


def join(session: Session) -> None:
    """Make the current stream wait for all unfinished copies of ``session``."""
    for memory in session.host_memory.values():
        memory.join()


@operator("offload_begin(Tensor x) -> Tensor", lambda x: x.new_empty(1))
def _offload_begin(x: Tensor) -> Tensor:
    return host_memory(x.device).out(x)


@operator(
    "offload_end(Tensor token, Tensor x) -> Tensor",
    lambda token, x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu"),
)
def _offload_end(token: Tensor, x: Tensor) -> Tensor:
    return host_memory(x.device).host_of(token)


@operator(
    "reload_begin(Tensor host, Device device) -> Tensor",
    lambda host, device: torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device),
)
def _reload_begin(host: Tensor, device: torch.device) -> Tensor:
    return host_memory(device).back(host)


@operator("reload_end(Tensor(a) y) -> Tensor(a)", torch.ops.aten.alias.default)
def _reload_end(y: Tensor) -> Tensor:
    host_memory(y.device).arrived(y)
    return y


@operator("store_begin(Tensor(a!) host, Tensor x) -> Tensor", lambda host, x: x.new_empty(1))
def _store_begin(host: Tensor, x: Tensor) -> Tensor:
    return host_memory(x.device).store(host, x)


@operator("store_end(Tensor token, Tensor x) -> ()", lambda *_: None)
def _store_end(token: Tensor, x: Tensor) -> None:
    host_memory(x.device).host_of(token)
