"""``stepgraph compile``: makes the step of a run without training, and saves it for ``stepgraph train --saved-steps``.

One process simulates one rank at a time: its process groups exist, and the other ranks do not. The first rank's graph
is rewritten and compiled; ranks that have the same one find it saved.
"""

import dataclasses
import os
import sys
from functools import partial

from stepgraph import compat, parallel
from stepgraph.config import build
from stepgraph.config.device import device_of
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import GPUS_PER_NODE
from stepgraph.passes.waiting import Waiting
from stepgraph.run.saved.store import Outcome
from stepgraph.train.data import open_parts
from stepgraph.train.data.several import STREAMED, WHOLE
from stepgraph.train.start import with_document_mask

_print = partial(print, flush=True)


def main(config: TrainConfig) -> int:
    """Save the step of every rank of ``config`` in ``config.out``; the exit status.

    Raises ``ValueError`` without an ``out``.
    """
    if config.out is None:
        raise ValueError("compile needs a folder to save the step in: add --out FOLDER")
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"out={config.out} is a file: use a folder")
    chat = is_chat(config)
    config = with_document_mask(config, chat)
    config.validate()
    if parallel.launched():
        raise ValueError("compile simulates all ranks in one process: start it without torchrun")
    world = config.mesh_spec.size if config.mesh_spec else 1
    if world == 1:
        return _compile(0, config, chat)
    # DTensor keeps what it knows of a mesh beyond the world's end: a process for each rank, one by one.
    for rank in range(world):
        parallel.in_own_process(_rank, (rank, config, chat), "spawn")
    return 0


def is_chat(config: TrainConfig) -> bool:
    """Whether the data is conversations, whose steps read more of a batch. A data set is not fetched to find out where
    the tokenizer, of bytes, has no template for these."""
    forms = (".jsonl", ".parquet") + (() if config.tokenizer == "bytes" else (WHOLE, STREAMED))
    return any(form in config.data.lower() for form in forms) and open_parts(config.data, config.fields)[0].source.chat


def _rank(rank: int, config: TrainConfig, chat: bool) -> None:
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(min(config.mesh_spec.size, GPUS_PER_NODE)))
    compat.init_fake_world(rank, config.mesh_spec.size)
    if _compile(rank, config, chat):
        sys.exit(1)


def _compile(rank: int, config: TrainConfig, chat: bool) -> int:
    device = device_of(config)
    mesh = None if config.mesh_spec is None else parallel.Mesh(config.mesh_spec, device.type)
    model = build.empty_model(config, device, mesh)
    optimizer = build.build_optimizer(config, model)
    loss_fn = build.build_loss(config, device, mesh)
    spec = build.step_spec(config, model, loss_fn, build.example_batch(config, device, chat), optimizer)
    with Waiting(lambda line: _print(f"rank {rank}: {line}")):
        step = build.build_step(dataclasses.replace(config, saved_steps=str(config.out)), spec)
    outcome: Outcome = step.saved
    _print("\n   ".join([f"rank {rank}: {outcome.line()}", *outcome.notes]))
    if outcome.kept is None:
        print(f"error: the step of rank {rank} was not saved in {config.out}", file=sys.stderr)
        return 1
    _print(f"rank {rank}: saved in {config.out} as {outcome.kept}")
    return 0
