"""Sends and receives between two ranks, as operators that return at once.

    send(x, peer, group_name)                            x travels to the rank at place ``peer`` of the group
    recv(like, size, stride, dtype, peer, group_name)    what that rank sends, received into the tensor that returns

Memory travels as it lies: dense tensors, in the strides that both ends know. Messages from one rank to another in one
group arrive in the order in which they are sent. ``wait_tensor`` waits for a receive; a sent tensor is kept until
it has left (see `sent`).
"""

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.kernels.comm.exchange import Session, current, operator

Tensor = torch.Tensor


def _flat(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


@operator("send(Tensor x, int peer, str group_name) -> Tensor", lambda x, *_: x.new_empty(0))
def _send(x: Tensor, peer: int, group_name: str) -> Tensor:
    group, session = compat.process_group(group_name), current()
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):  # events of a recording cannot be queried
        session.sends = [(work, kept) for work, kept in session.sends if not work.is_completed()]
    flat = _flat(x)
    session.sends.append((dist.isend(flat, group=group, group_dst=peer), flat))
    return x.new_empty(0)


@operator(
    "recv(int[] size, int[] stride, ScalarType dtype, Device device, int peer, str group_name) -> Tensor",
    lambda size, stride, dtype, device, *_: torch.empty_strided(size, stride, dtype=dtype, device=device),
    "CompositeExplicitAutograd",
)
def _recv(
    size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device, peer: int, group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    flat = _flat(made)
    compat.register_work(made, dist.irecv(flat, group=group, group_src=peer))
    return made


def sent(session: Session) -> None:
    """Wait until all that was sent has left; on a GPU the current stream waits, not the host."""
    for work, _ in session.sends:
        work.wait()
    session.sends = []
    for mail in session.mail.values():
        mail.join()
