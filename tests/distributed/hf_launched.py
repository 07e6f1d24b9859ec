"""A user's script, which launchers start on each rank: ``hf_launched.py FOLDER [NAME=VALUE ...]``, with the values in
JSON for ``TrainingArguments``, or ``mesh=`` for `GraphTrainer`. Rank 0 leaves ``losses.json``."""

import json
import sys
from pathlib import Path

import torch

from stepgraph.integrations import GraphTrainer
from stepgraph.parallel import layouts
from tests.distributed.hf_ranks import build, train


def main(folder: str, *given: str) -> None:
    options = {name: json.loads(value) for name, _, value in (text.partition("=") for text in given)}
    own = {name: options.pop(name) for name in ("mesh",) if name in options}
    trainer = train(GraphTrainer, folder, build("qwen3"), own={"passes": "exact", **own}, **options)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        sharded = any(layout.sharded for layout in layouts(trainer.model).values())
        found = {"losses": losses, "sharded": sharded, "ranks": trainer.args.world_size}
        (Path(folder) / "losses.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
