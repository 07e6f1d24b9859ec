"""Pipelines over a transport without buffers: every schedule, with real messages between ranks."""

import functools
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stepgraph.kernels.comm.exchange import Session
from stepgraph.kernels.comm.stage_sends import sent
from stepgraph.parallel.pipeline import SCHEDULES
from stepgraph.parallel.pipeline.messages import calls_of, message_of
from stepgraph.parallel.pipeline.schedules import work_of
from tests.distributed import rendezvous
from tests.distributed.ranks import make_mesh, on_ranks
from tests.distributed.rendezvous import Transport
from tests.distributed.test_pipeline import DEEP, SHORT, check_gradients
from tests.parallel.pipeline.orders import begun_early, ranks_of

N, NUMEL = 4, 1 << 12


def run_messages(calls, where, groups, drain, numel=NUMEL, device="cpu"):
    """The messages among the calls of this rank, of ``numel`` floats: what is received is what was sent; how many are.
    ``groups``: for messages up and down. ``drain``: what a computation waits for."""
    rank, session, arrived = dist.get_rank(), Session(), []

    def content(message, microbatch):
        value = 100.0 * message.stage + microbatch + 0.5 * message.channel.forward
        return torch.full((numel,), value, device=device)

    with session:
        for call in calls[rank]:
            message = message_of(call, where)
            if message is None:
                drain()
                continue
            name = groups[(message.peer > rank) == message.sends].group_name
            if message.sends:
                torch.ops.stepgraph.send(content(message, call.microbatch), message.peer, None, name)
            else:
                form = ([numel], [1], torch.float32, torch.device(device))
                arrived.append((torch.ops.stepgraph.recv(*form, message.peer, None, name), message, call.microbatch))
        for found, message, microbatch in arrived:
            torch.ops._c10d_functional.wait_tensor(found)
            assert torch.equal(found, content(message, microbatch)), (message, microbatch)
        sent(session)
    return len(arrived)


def direction_groups():
    return {up: dist.new_group(group_desc=str(up)) for up in (True, False)}


def _check_messages(ranks):
    groups = direction_groups()
    for name in SCHEDULES:
        where = ranks_of(name, ranks)
        orders = work_of(name, ranks, 2 * ranks)
        with Transport().in_place() as transport:
            assert run_messages(calls_of(orders, where), where, groups, transport.drain) > 0
        dist.barrier()


@pytest.mark.parametrize("ranks", (pytest.param(2, marks=pytest.mark.long), 4))
def test_messages_of_every_schedule(ranks):
    on_ranks(ranks, _check_messages, ranks)


def _check_counterexamples():
    """The orders that the check refuses do hang here."""
    orders, where = work_of("1f1b", 2, N), [0, 1]
    early = begun_early(orders, where)
    both = Transport(lambda group, peer: peer)
    with mock.patch.object(rendezvous, "SECONDS", 1):
        for transport, drain in ((Transport(), Transport.drain), (both, lambda _: None)):
            groups = direction_groups()
            with transport.in_place(), pytest.raises(TimeoutError):
                run_messages(early, where, groups, functools.partial(drain, transport))
            dist.barrier()
    os._exit(0)  # threads that wait for ever would keep the process


def test_orders_that_only_buffers_save_hang():
    on_ranks(2, _check_counterexamples)


def _check_schedules():
    mesh = make_mesh("pp=2")
    for name in SCHEDULES:
        with Transport().in_place() as transport:
            check_gradients(mesh, name, N, SHORT if SCHEDULES[name].chunks == 1 else DEEP)
        assert transport.count > 0


def test_every_schedule_is_bitwise():
    on_ranks(2, _check_schedules)
