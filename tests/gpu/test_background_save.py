"""Checkpoints behind a run on a GPU: what is written is the state as it was, the copy is page-locked, and neither its
memory nor the writing waits for the GPU."""

import copy
import threading

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepgraph import parallel
from stepgraph.parallel import MeshSpec
from stepgraph.train.checkpoint.background import BackgroundSaves
from stepgraph.train.checkpoint.checkpointer import Checkpointer


def test_the_state_is_copied_before_the_next_step_changes_it(tmp_path):
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    saves = BackgroundSaves(Checkpointer(tmp_path / "checkpoints"))
    for number in (1, 2):
        step()
        as_it_was = copy.deepcopy([p.detach() for p in model.parameters()])
        waited = saves.begin(number, {"model": model, "optimizer": optimizer})
        step()  # while it is written
        saves.finish()
        print(f"waited {waited:.3f} s", saves.check())
        assert all(t.is_pinned() for t in saves._copies.values() if t.dim())
        saves.checkpointer.load(saves.checkpointer.folder, {"model": model, "optimizer": optimizer}, rng=False)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), as_it_was, strict=True))


def test_memory_is_taken_and_files_are_written_while_the_gpu_works(tmp_path):
    model = nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    saves = BackgroundSaves(Checkpointer(tmp_path / "checkpoints"))
    stream, cycles = torch.cuda.current_stream(), 8_000_000_000  # some four seconds
    stream.synchronize()
    saves.prepare(state)
    saves._preparing.join()
    taken = {name: tensor.data_ptr() for name, tensor in saves._copies.items()}
    saves.begin(1, state)
    torch.cuda._sleep(cycles)
    saves.finish()
    assert not stream.query()
    assert {name: tensor.data_ptr() for name, tensor in saves._copies.items()} == taken
    print(saves.check())
    assert saves.checkpointer.latest().name == "step-00000001"


def test_shards_are_copied_to_page_locked_memory_too(tmp_path):
    with parallel.started(MeshSpec.parse("fsdp=1"), "cuda"):
        mesh = torch.distributed.init_device_mesh("cuda", (1,))
        one, other = (nn.Linear(512, 256, bias=False, device="cuda") for _ in range(2))
        for layer in (one, other):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        saves = BackgroundSaves(Checkpointer(tmp_path / "checkpoints"), parallel.gloo_group())
        saves.prepare({"model": one})
        saves._preparing.join()
        copy = saves._copies["model.weight"]
        assert isinstance(copy, DTensor) and copy.to_local().is_pinned()
        saves.begin(1, {"model": one})
        saves.finish()
        assert saves._copies["model.weight"] is copy
        saves.checkpointer.load(saves.checkpointer.folder, {"model": other}, rng=False)
        assert torch.equal(one.weight.to_local(), other.weight.to_local())


def test_page_locked_memory_can_be_taken_while_another_thread_records_a_graph():
    """A run takes it for its checkpoints when steps may still be recorded, as when experts need larger buffers."""
    x = torch.ones(1024, device="cuda")
    (x + 1).sum()
    graph, taken = torch.cuda.CUDAGraph(), []
    taker = threading.Thread(target=lambda: taken.append(torch.empty(2**26, pin_memory=True)))
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x + 1
        taker.start()
        taker.join()
        z = y * 2
    graph.replay()
    assert taken and taken[0].is_pinned() and z.eq(4).all()
