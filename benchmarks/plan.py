"""The forecast of ``stepgraph plan`` next to measured steps: the same job, no GPU.

    python benchmarks/plan.py [--json FILE] RECORD ...            # records of stepgraph bench step and bench train
    python benchmarks/plan.py [--json FILE] forecast_NAME.json ...  # forecasts of `benchmarks/records.sh --forecast`

One line for each step of ours in the records. A job of ``bench step`` keeps its parameters and AdamW's moments in the
parameters' dtype and has no mesh: a run of ``stepgraph train`` in bf16 keeps both in fp32, and its forecast is not that
of the measured step. Memory is what is allocated; records of ``bench step`` hold what is reserved.
"""

import argparse
import dataclasses
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from stepgraph.config import build
from stepgraph.config.environment import environment
from stepgraph.config.presets import PRESETS
from stepgraph.costs.hardware import GPUS
from stepgraph.costs.step import graph_cost
from stepgraph.inspect.forecast.forecast import SETTINGS
from stepgraph.inspect.forecast.forecast import forecast as forecast_ranks
from stepgraph.lower import StepSpec, lower
from stepgraph.models import next_token_loss
from stepgraph.passes import Target

GPU = GPUS["h200"]


def of_ranks(name: str, settings: dict) -> tuple[float, float]:
    """(GiB allocated at the peak, milliseconds) of the step of ``name`` over a mesh."""
    config = PRESETS[name]()
    job = {"accumulate": 1} | {key: settings[key] for key in (*SETTINGS, "mesh", "reshard") if key in settings}
    job["model"] = changed(config.model, settings["model"])
    found = forecast_ranks(dataclasses.replace(config, **job), GPU)
    return found.peak.total / 2**30, 1e3 * found.timeline.step_seconds


def changed(sizes: Any, fields: dict[str, Any]) -> Any:
    """The dataclass ``sizes`` with ``fields`` of a record, dataclasses inside it too."""
    inner = {name: getattr(sizes, name) for name in fields if dataclasses.is_dataclass(getattr(sizes, name))}
    return dataclasses.replace(sizes, **fields | {name: changed(one, fields[name]) for name, one in inner.items()})


def of_step(name: str, settings: dict) -> tuple[float, float]:
    """(GiB allocated at the peak, milliseconds) of the step of ``name`` on one GPU."""
    job = {key: settings[key] for key in ("batch_size", "seq_len", "precision")}
    config = dataclasses.replace(PRESETS[name](), memory="none", inductor="full", accumulate=1, **job)
    meta = torch.device("meta")
    model = build.empty_model(config, meta)
    optimizer = torch.optim.AdamW(model.parameters(), settings["lr"], fused=True)

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision != "fp32"):
            return next_token_loss(model, batch)

    batch = build.example_batch(config, meta)
    spec = StepSpec(model, loss_fn, batch, optimizer, max_grad_norm=1.0, passes=config)
    cost = graph_cost(lower(spec, Target.forecast(GPU)).step, GPU, {}, fused=True)
    return max(moment.total for moment in cost.moments) / 2**30, 1e3 * cost.timeline.step_seconds


def compare(file: Path) -> list[dict]:
    """Forecast and measurement of every step of ours in ``file``."""
    record = json.loads(file.read_text(encoding="utf-8"))
    if "ranks" in record:
        return [planned(file.stem.removeprefix("forecast_"), record)]
    rows = []
    for row in record["rows"]:
        if row["provider"] == "stepgraph":
            forecast = of_ranks if record["settings"].get("benchmark") == "train" else of_step
            settings = record["settings"]["models"][row["model"]]
            gib, ms = forecast(row["model"], settings)
            row = {"record": file.name, "model": row["model"], "mesh": settings.get("mesh")} | {
                "forecast_gib": round(gib, 2), "measured_gib": round(row["peak_mem_gib"], 2),
                "forecast_ms": round(ms, 1), "measured_ms": round(row["step_ms"], 1),
            }  # fmt: skip
            rows.append(row)
    return rows


def planned(name: str, plan: dict) -> dict:
    """The figures of the row ``name`` in what ``stepgraph plan --json`` wrote; a pipeline's by the schedule of the
    row."""
    row = {"row": name, "model": plan["preset"], "mesh": plan["mesh"], "gpu": plan["gpu"]}
    row |= {key: plan["settings"][key] for key in ("seq_len", "batch_size", "accumulate", "fp8")}
    peak = plan.get("peak_bytes")
    if "schedules" in plan:
        row["schedule"] = plan["chosen"]
        plan = plan | plan["schedules"][plan["chosen"]]
        peak, row["bubble"] = max(plan["peak_bytes"]), round(plan["bubble"], 4)
    speed = plan["tokens_per_s"] / plan["ranks"]
    return row | {
        "forecast_gib": round(peak / 2**30, 2),
        "forecast_ms": round(1e3 * plan["step_s"], 1),
        "tokens_per_s_per_gpu": round(speed),
        "mfu": round(plan["mfu"], 4),
        "exposed": round(plan["exposed_s"] / plan["step_s"], 4),
    }


def show(row: dict) -> str:
    """A row in one line."""
    if "measured_ms" in row:
        memory = f"forecast {row['forecast_gib']:.1f} GiB, measured {row['measured_gib']:.1f}"
        return f"{memory}; forecast {row['forecast_ms']:.0f} ms, measured {row['measured_ms']:.0f}"
    return (
        f"{row['forecast_gib']:.1f} GiB, {row['forecast_ms']:.0f} ms, {row['tokens_per_s_per_gpu']:,} tokens/s a GPU, "
        f"{row['mfu']:.1%} MFU, {row['exposed']:.1%} exposed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # A process each: DTensor keeps what it knows of a mesh beyond the world's end.
    context = multiprocessing.get_context("spawn")
    rows = []
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for found in pool.map(compare, options.records):
            for row in found:
                print(f"{row['model']} {row['mesh'] or 'one GPU'}: {show(row)}", flush=True)
            rows += found
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
