"""What tests of several ranks share: the ranks themselves, a small model, and its batches."""

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.models import Llama3, Llama3Config
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import Mesh, MeshSpec, layouts, parallelize

# The vocabulary's rows do not divide over 2 x 2 ranks, nor do those of the key and value projections over 3: padded.
TINY = Llama3Config(
    dim=48, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=80, vocab_size=130, max_seq_len=64, rope_theta=10_000.0
)
BATCH, SEQ = 2, 16


def on_ranks(world: int, function: Callable, *args: Any) -> None:
    """Run ``function(*args)`` on ``world`` gloo ranks, processes of their own; a failure of one is raised."""
    with tempfile.TemporaryDirectory() as folder:
        on_processes(world, _rank, (world, os.path.join(folder, "store"), function, args))


def on_processes(count: int, function: Callable, args: tuple) -> None:
    """Run ``function(rank, *args)`` in ``count`` processes; a failure of one is raised."""
    preload()
    # Preloaded modules ask CUDA for its devices; processes forked after that cannot use a GPU.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    torch.multiprocessing.start_processes(function, args, nprocs=count, start_method=method)


def preload() -> None:
    """What ranks import is imported once, not once a rank."""
    multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])


def in_fake_world(rank: int, world: int, function: Callable, *args: Any) -> None:
    """Run ``function(*args)`` as ``rank`` of a world that is not there, in a process of its own: DTensor keeps what it
    knows of a mesh, its groups' names with it, beyond the world's end."""
    on_processes(1, _faked, (rank, world, function, args))


def _faked(_: int, rank: int, world: int, function: Callable, args: tuple) -> None:
    compat.init_fake_world(rank, world)
    function(*args)
    dist.destroy_process_group()


def _rank(rank: int, world: int, store: str, function: Callable, args: tuple) -> None:
    faulthandler.enable()  # a rank that aborts says where
    torch.set_num_threads(1)
    with compat.single_gloo_thread():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        function(*args)
        dist.barrier()
    except BaseException:
        traceback.print_exc()  # what is raised by `on_ranks` may be another rank's, which this one's end cut off
        raise
    finally:
        dist.destroy_process_group()


def whole_model(config: Llama3Config = TINY) -> Llama3:
    """The model on one rank, the same on every rank."""
    torch.manual_seed(0)
    model = Llama3(config)
    for param in model.parameters():
        if param.ndim == 1:  # norm weights that are not all one
            param.data.normal_(1.0, 0.1)
    return model


def parallel_model(mesh: Mesh, config: Llama3Config = TINY, **options: Any) -> Llama3:
    return parallelize(whole_model(config), mesh, TP_PLAN, **options)


def make_mesh(text: str) -> Mesh:
    return Mesh(MeshSpec.parse(text), "cpu")


def global_batch(step: int, dp: int, batch: int = BATCH) -> dict[str, torch.Tensor]:
    """The batch of all data-parallel ranks together, with targets that do not count in every rank's part alike."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, TINY.vocab_size, (dp * batch, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:, :2] = -100
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


def own_batch(mesh: Mesh, step: int, batch: int = BATCH) -> dict[str, torch.Tensor]:
    """This rank's part of `global_batch`."""
    start = mesh.dp_place * batch
    return {k: v[start : start + batch].contiguous() for k, v in global_batch(step, mesh.spec.dp, batch).items()}


def full(model: Llama3, name: str, stored: torch.Tensor) -> torch.Tensor:
    """A parameter, or a tensor laid out like it, whole."""
    return layouts(model)[name].without_padding(stored).full_tensor()
