"""Checkpoints of two ranks with DTensors."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepgraph.train.checkpoint.background import BackgroundSaves
from stepgraph.train.checkpoint.checkpointer import Checkpointer
from tests.distributed.ranks import on_ranks
from tests.train.checkpoint.cases import Loader, equal


def sharded(placement, mesh, seed: int) -> dict:
    """A model of DTensors over two ranks and its stepped AdamW; every rank builds the same full values."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 4)
    for name, param in list(model.named_parameters()):
        place = placement if param.dim() == 2 else Replicate()
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [place])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for param in model.parameters():
        param.grad = distribute_tensor(torch.randn(param.shape), mesh, param.placements)
    return {"model": model, "optimizer": optimizer, "loader": Loader()}


def two_ranks(folder: Path) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    state = sharded(Shard(0), mesh, 1)
    state["optimizer"].step()
    state["loader"].position = 10 + rank
    torch.manual_seed(100 + rank)
    checkpointer = Checkpointer(folder / "run")
    checkpointer.save(1, state)
    path = checkpointer.save(2, state)
    stream = torch.rand(2)

    other = sharded(Shard(1), mesh, 2)  # other placements, a never-stepped optimizer
    checkpointer.load(path, other)
    assert torch.equal(torch.rand(2), stream) and other["loader"].position == 10 + rank
    for a, b in zip(state["model"].parameters(), other["model"].parameters(), strict=True):
        assert b.placements == ((Shard(1),) if b.dim() == 2 else (Replicate(),))
        assert torch.equal(a.full_tensor(), b.full_tensor())
        slots = state["optimizer"].state[a], other["optimizer"].state[b]
        assert torch.equal(slots[0]["step"], slots[1]["step"])
        assert slots[1]["exp_avg"].placements == b.placements
        assert torch.equal(slots[0]["exp_avg"].full_tensor(), slots[1]["exp_avg"].full_tensor())

    if rank == 1:
        file = path / "__1_0.distcp"
        file.write_bytes(b"x" + file.read_bytes()[1:])
    dist.barrier()
    for broken in (path, folder / "nowhere"):
        with pytest.raises(ValueError, match=r"__1_0\.distcp does not match .*step-00000001 is intact|is not there"):
            checkpointer.load(broken, other)
    state["loader"].position = object() if rank == 1 else 0  # an error on one rank reaches both
    with pytest.raises(ValueError, match=r"loader\.position has type object"):
        checkpointer.save(3, state)
    state["loader"].position = 0
    behind = BackgroundSaves(checkpointer, dist.new_group(backend="gloo"))
    as_it_was = [p.to_local().detach().clone() for p in state["model"].parameters()]
    behind.begin(4, state)
    with torch.no_grad():
        [p.add_(1) for p in state["model"].parameters()]  # while it is written
    dist.barrier()
    behind.finish()
    assert len(behind.check()) == 1
    checkpointer.load(checkpointer.folder / "step-00000004", state)
    assert equal([p.to_local().detach() for p in state["model"].parameters()], as_it_was)
    if rank == 0:
        torch.save([p.full_tensor() for p in state["model"].parameters()], folder / "full.pt")
    else:
        [p.full_tensor() for p in state["model"].parameters()]


def test_two_ranks_with_dtensors(tmp_path):
    on_ranks(2, two_ranks, tmp_path)
    # One process reads what two ranks wrote: the weights, but not streams and positions that it has no ranks for.
    path, model = tmp_path / "run" / "step-00000001", nn.Linear(6, 4)
    Checkpointer(path.parent).load(path, {"model": model}, rng=False)
    assert equal([p.detach() for p in model.parameters()], torch.load(tmp_path / "full.pt"))
    with pytest.raises(ValueError, match="of 2 ranks and this run has 1; run with 2"):
        Checkpointer(path.parent).load(path, {"model": model})
