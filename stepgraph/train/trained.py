"""The model that a run has trained."""

import dataclasses
from pathlib import Path

import torch
from torch import nn

from stepgraph.config import build
from stepgraph.config.device import pick_device, require_memory
from stepgraph.config.train import TrainConfig
from stepgraph.train.checkpoint.checkpointer import Checkpointer, resolve

#: Checkpoints that are tried while a run that saves often deletes them.
_TRIES = 10


def load_trained(folder: Path, config: TrainConfig, device: str = "cpu") -> tuple[nn.Module, int]:
    """The model of the run ``folder``, or of ``RUN/checkpoints/step-N``, with ``config`` as `run_config` gives it, on
    ``device`` (auto, cpu or cuda); and the step it is of.

    In evaluation mode, in the dtypes that the run computed in. Raises ``ValueError``, in one line, where there is no
    checkpoint that can be used.
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
