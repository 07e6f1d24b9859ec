"""When a run saves its state to checkpoints, and which checkpoint it starts from."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph import parallel
from stepgraph.config import build
from stepgraph.config.device import pick_device, require_memory
from stepgraph.config.train import TrainConfig
from stepgraph.parallel.ranks import Ranks
from stepgraph.train.checkpoint.background import BackgroundSaves
from stepgraph.train.checkpoint.checkpointer import Checkpointer, loader_state, resolve


class Saving:
    """The checkpoints of the run in ``path``. ``saved_step``: of the newest that this process wrote or began with."""

    def __init__(self, config: TrainConfig, path: Path, mesh: parallel.Mesh | None, ranks: Ranks, device: torch.device):
        layout = None if mesh is None else str(mesh.spec)
        self.config, self.path, self.ranks = config, path, ranks
        self.checkpointer = Checkpointer(
            path / "checkpoints", keep=config.keep_checkpoints, keep_every=config.keep_every, mesh=layout
        )
        self.saved_step: int | None = None
        self.notes: list[str] = []
        behind = config.save == "behind" or (config.save == "auto" and device.type == "cuda")
        self.background = BackgroundSaves(self.checkpointer, parallel.gloo_group()) if behind else None

    def load(self, path: Path, state: dict[str, Any]) -> None:
        """Continue from the checkpoint ``path``, or that run's newest: on any mesh with the row that comes next."""
        groups = build.param_groups(state["optimizer"])
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        path = self.ranks.first(lambda: resolve(path))
        if self.checkpointer.is_of_this_mesh(path):
            self.checkpointer.load(path, state)
        else:
            self.checkpointer.load(path, {k: v for k, v in state.items() if k != "loader"}, rng=False)
            self.ranks.each(lambda: state["loader"].load_state_dict(loader_state(path)))
        if not {"step", "tokens"} <= state["trainer"].keys():
            raise ValueError(f"checkpoint {path} lacks the steps and tokens of its run; use an earlier one")
        for group, given in zip(build.param_groups(state["optimizer"]), options, strict=True):
            group.update(given)  # --weight-decay and the like may be changed on --resume

    def prepare(self, step: int, state: dict[str, Any]) -> None:
        """Let a thread take the memory of a background save, if one is due after more than ``step`` updates."""
        every = self.config.checkpoint_every
        if self.background and every and (step // every + 1) * every < self.config.steps:
            self.background.prepare(state)

    def save(self, step: int, state: dict[str, Any], *, last: bool, evict: bool = True) -> float:
        """Save the state after ``step`` updates, unless that is done; the ``last`` is waited for, and so is the one
        before. ``evict``: older checkpoints than the ones to keep are deleted. The seconds waited. Raises OSError."""
        began = time.perf_counter()
        if last:
            self.finish()
        if step == self.saved_step:
            return time.perf_counter() - began
        if self.background and not last:
            try:
                self.background.begin(step, state, evict)
            except OSError:  # of the checkpoint before
                self.saved_step = None
                raise
            except MemoryError as failure:  # on all ranks
                self.background = None
                self.notes.append(f"warning: checkpoints are waited for: {failure}")
        if self.background is None or last:
            self.checkpointer.save(step, state, evict)
        self.saved_step = step
        return time.perf_counter() - began

    def written(self) -> list[str]:
        """What to say of checkpoints since. Raises OSError, in one line, where one could not be written."""
        notes, self.notes = self.notes, []
        try:
            return notes + (self.background.check() if self.background else [])
        except OSError:
            self.saved_step = None
            raise

    def finish(self) -> None:
        """Wait for the save in progress. If it fails, earlier checkpoints are unchanged."""
        if self.background:
            try:
                self.background.finish()
            except OSError:
                self.saved_step = None


#: Checkpoints that are tried while a run that saves often deletes them.
_TRIES = 10


def load_trained(folder: Path, config: TrainConfig, device: str = "cpu") -> tuple[nn.Module, int]:
    """The model of the run ``folder``, or of ``RUN/checkpoints/step-N``, with ``config`` as `run_config` gives it, on
    ``device`` (auto, cpu or cuda); and the step it is of.

    In evaluation mode, in the run's dtypes. Raises ``ValueError`` where there is no checkpoint that can be used.
    """
    rounds = config.precision == "bf16" and config.mesh_spec is not None and config.lora is None  # shards are fp32
    alone = dataclasses.replace(config, mesh=None, precision="fp32" if rounds else config.precision)
    require_memory(alone, there := pick_device(device))
    model = build.empty_model(alone, there)
    model.init_weights(parts={})  # only buffers that no checkpoint holds, such as RoPE tables
    done = {"step": 0}
    for left in reversed(range(_TRIES)):
        path = resolve(folder)
        try:
            Checkpointer(path.parent).load(path, {"model": model, "trainer": done}, rng=False)
            break
        except (ValueError, OSError):
            if path.is_dir() or not left:
                raise  # otherwise the run, which still trains, has deleted this checkpoint and has a newer one
    if rounds:  # gathered in bf16
        for param in model.parameters():
            param.data = param.data.to(torch.bfloat16)
    return model.eval(), done["step"]
