"""A mesh's gloo groups run on one thread, whoever opened the default group: with two, several all-gathers in flight
corrupt the heap (see `compat.single_gloo_thread`)."""

import os

import pytest
import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.parallel import Mesh, MeshSpec
from tests.distributed.ranks import on_processes

IN_FLIGHT, ROUNDS = 12, 50


def _rank(rank: int, world: int, text: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)  # as users do
    assert compat.several_gloo_threads(dist.group.WORLD)
    mesh = Mesh(MeshSpec.parse(text), "cpu")
    groups = [mesh.axis(name).get_group() for name in mesh.names]
    assert not any(map(compat.several_gloo_threads, groups))
    gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
    for i in range(ROUNDS):
        for group in groups:
            flying = [
                gather(torch.full((24 + n,), group.rank() + i), group.size(), group.group_name)
                for n in range(IN_FLIGHT)
            ]
            for n, whole in enumerate(map(wait, flying)):
                assert whole.view(group.size(), 24 + n).unique(dim=1).flatten().tolist() == [i, i + 1]
    dist.destroy_process_group()


@pytest.mark.parametrize("text, world", [("fsdp=2", 2), ("hsdp=2x2", 4)])
def test_gathers_in_flight(text, world, tmp_path):
    on_processes(world, _rank, (world, text, os.path.join(tmp_path, "store")))
