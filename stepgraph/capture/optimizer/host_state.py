"""Optimizer state in page-locked host memory: put there, brought back, and read once the GPU has written it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from weakref import WeakSet

import torch

from stepgraph import compat
from stepgraph.capture.state import unwrap, wrap
from stepgraph.costs.hardware import free_host_memory
from stepgraph.graph.host_copies import may_stay_on_host
from stepgraph.kernels.offload import page_locked

Tensor = torch.Tensor

#: Optimizers whose `state_dict` waits for the GPU first.
_waiting: WeakSet[torch.optim.Optimizer] = WeakSet()


def local(tensor: Tensor) -> Tensor | None:
    """The one plain tensor that ``tensor`` is or wraps, outside autograd; None where it wraps several."""
    parts, _ = unwrap(tensor)  # detached afterwards: a wrapper would dispatch that
    return parts[0].detach() if len(parts) == 1 else None


def held_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Mapping[str, object]:
    """The state of ``param``. An entry that nothing is in is not made: ``step`` may ask whether there is one."""
    return optimizer.state.get(param, {})


def stays(value: object, param: Tensor) -> bool:
    """Whether ``value`` of the state of ``param`` is what may stay on the host."""
    own, held = local(param), local(value) if isinstance(value, Tensor) else None
    return own is not None and held is not None and may_stay_on_host(held, own)


def place(optimizer: torch.optim.Optimizer, param: Tensor, on_host: bool) -> None:
    """Move the state of ``param``, a parameter on a GPU, to page-locked memory; or to the GPU, if it is on the host."""
    own = local(param)
    if own is None or own.device.type != "cuda" or compat.is_fake(own):
        return
    for key, value in held_of(optimizer, param).items():
        if not stays(value, param):
            continue
        held, (_, wrapping) = local(value), unwrap(value)
        if held.is_pinned() if on_host else held.is_cuda:
            continue
        if on_host:
            memory = page_locked(held.nbytes).view(held.dtype)
            moved = memory.as_strided(held.shape, held.stride())
        else:
            moved = torch.empty_like(held, device=own.device)
        moved.copy_(held)
        optimizer.state[param][key] = wrap([moved], wrapping)
    if on_host and optimizer not in _waiting:
        optimizer.register_state_dict_pre_hook(_wait)
        _waiting.add(optimizer)


def device_bytes(optimizer: torch.optim.Optimizer, param: Tensor) -> int:
    """Bytes of the state of ``param`` that may stay on the host and is on its GPU."""
    state = held_of(optimizer, param).values()
    return sum(local(value).nbytes for value in state if stays(value, param) and local(value).is_cuda)


def require_room(optimizer: torch.optim.Optimizer, param: Tensor, params: Iterable[Tensor], room: float) -> None:
    """Raise ``ValueError``, in one line, if the state of ``params`` does not fit into host memory. The state of
    ``param`` gives the bytes per element. ``room``: bytes that stay on the GPU."""
    own, free = local(param), free_host_memory()
    if own is None or own.device.type != "cuda" or compat.is_fake(own) or free is None:
        return
    held = [local(value) for value in held_of(optimizer, param).values() if stays(value, param)]
    each = sum(t.nbytes for t in held if not t.is_pinned()) / own.numel()
    need = each * sum(part.numel() for part in map(local, params) if part is not None) - room
    if need > free:
        raise ValueError(
            f"offload_optimizer needs {need / 2**30:.1f} GiB of host memory for each rank and {free / 2**30:.1f} GiB "
            "are free: shard the model over more ranks (fsdp), or leave it out"
        )


@contextlib.contextmanager
def on_device(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, all state is where its parameter is, as eager's ``step`` needs it; then the host has what it became."""
    held = [
        (state, key, value)
        for optimizer in optimizers
        for param, state in optimizer.state.items()
        for key, value in state.items()
        if stays(value, param) and local(value).device != local(param).device
    ]
    try:
        for optimizer, param in [(o, p) for o in optimizers for p in o.state] if held else ():
            place(optimizer, param, on_host=False)
        yield
    finally:
        for state, key, value in held:
            local(value).copy_(local(state[key]))
            state[key] = value


def _wait(optimizer: torch.optim.Optimizer) -> None:
    """A step returns before the GPU has written the state that it leaves on the host."""
    torch.cuda.synchronize()
