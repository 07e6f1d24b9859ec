"""The forecast of ``stepgraph plan`` for the steps that ``stepgraph bench step`` measured: the same job, no GPU.

``python benchmarks/plan.py benchmarks/h200_golf.json``: one line a model. The measured job keeps its parameters and
AdamW's moments in the parameters' dtype and has no mesh: a run of ``stepgraph train`` in bf16 keeps both in fp32, and
its forecast is not that of the measured step.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from stepgraph.capture import trace_step
from stepgraph.inspect.fusion import Fusion
from stepgraph.inspect.gpus import GPUS
from stepgraph.inspect.memory import memory_over_step
from stepgraph.inspect.plan import rewrite
from stepgraph.inspect.roofline import Roofline
from stepgraph.models import next_token_loss
from stepgraph.passes.analysis import Aliases
from stepgraph.train import build
from stepgraph.train.presets import PRESETS

GPU = GPUS["h200"]


def forecast(name: str, settings: dict) -> tuple[float, float]:
    """(GiB allocated at the peak, milliseconds) of the step of ``name``."""
    job = {key: settings[key] for key in ("batch_size", "seq_len", "precision")}
    config = dataclasses.replace(PRESETS[name](), memory="none", inductor="full", accumulate=1, **job)
    meta = torch.device("meta")
    model = build.empty_model(config, meta)
    optimizer = torch.optim.AdamW(model.parameters(), settings["lr"], fused=True)

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision != "fp32"):
            return next_token_loss(model, batch)

    step = trace_step(model, loss_fn, build.example_batch(config, meta), optimizer, max_grad_norm=1.0).step
    rewrite(step, config, GPU)
    aliases = Aliases(step.graph)
    fusion = Fusion(step.graph, aliases, fused=True)
    peak = max(moment.total for moment in memory_over_step(step, aliases, fusion))
    return peak / 2**30, 1e3 * sum(Roofline(step.graph, aliases, fusion, GPU).seconds.values())


for file in sys.argv[1:]:
    measured = json.loads(Path(file).read_text(encoding="utf-8"))
    for row in measured["rows"]:
        if row["provider"] == "stepgraph":
            gib, ms = forecast(row["model"], measured["settings"]["models"][row["model"]])
            print(
                f"{row['model']}: forecast {gib:.1f} GiB allocated, measured {row['peak_mem_gib']:.1f} reserved; "
                f"forecast {ms:.0f} ms, measured {row['step_ms']:.0f}"
            )
