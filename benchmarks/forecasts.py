"""The forecast of a model's step next to the step that ``stepgraph bench model`` measured: peak and time.

    python benchmarks/forecasts.py [--json FILE] [--models NAME ...] [--workers 2] RECORD ...

One line for each model of the records that stepgraph ran, with the ratio of forecast to measurement. The peak is of
allocated bytes. Needs no GPU, and what the models come from (``pip install 'stepgraph[hf]'``).
"""

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from stepgraph.bench.model import models
from stepgraph.bench.model.child import fused_adamw, loss_of, trained
from stepgraph.config.environment import environment
from stepgraph.costs.hardware import GPUS, known_gpu
from stepgraph.costs.step import graph_cost
from stepgraph.lower import StepSpec, lower
from stepgraph.passes import StepOptions, Target


def jobs(file: Path, names: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """(model, key of its GPU, the row without a forecast) for each model of ``file`` that is still the same."""
    record = json.loads(file.read_text(encoding="utf-8"))
    settings, found = record["settings"], []
    gpu = known_gpu(record["environment"]["gpus"][0])
    for row in record["rows"]:
        name = row["model"]
        if row["provider"] != "stepgraph" or row["error"] or (names and name not in names):
            continue
        then, now = settings["models"][name], models.MODELS[name]
        if (then["sizes"], then["batch_size"], then["seq_len"]) != (now.sizes, now.batch_size, now.seq_len):
            print(f"{name} is left out: its sizes are not those of {file.name}")
            continue
        run = settings.get("runs", {}).get(name, record["environment"]["git"])
        made = {"record": file.name, "model": name, "gpu": gpu.name, "commit": run["commit"]}
        made |= {"torch": row["versions"]["torch"], "measured_gib": round(row["peak_allocated_gib"], 3)}
        found.append((name, next(key for key in GPUS if GPUS[key] is gpu), made | {"measured_ms": row["step_ms"]}))
    return found


def forecast(name: str, key: str, row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with the forecast of the step that ``bench model`` makes of ``name``."""
    start, meta, gpu = time.perf_counter(), torch.device("meta"), GPUS[key]
    model = models.build(name, meta)
    batch, optimizer = models.batch_of(name, meta), fused_adamw(trained(model))
    spec = StepSpec(model, loss_of, batch, optimizer, max_grad_norm=1.0, passes=StepOptions())
    cost = graph_cost(lower(spec, Target.forecast(gpu)).step, gpu, {}, fused=spec.passes.compiles_all)
    gib, ms = max(m.total for m in cost.moments) / 2**30, 1e3 * cost.timeline.step_seconds
    return row | {
        "forecast_gib": round(gib, 3), "peak_ratio": round(gib / row["measured_gib"], 4),
        "forecast_ms": round(ms, 1), "measured_ms": round(row["measured_ms"], 1),
        "time_ratio": round(ms / row["measured_ms"], 3), "forecast_s": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The median and the largest distance of the ratios from 1."""
    off = {what: [abs(row[f"{what}_ratio"] - 1) for row in rows] for what in ("peak", "time")}
    parts = {"median": statistics.median, "worst": max}
    return {f"{what}_{part}": round(of(off[what]), 4) for what in off for part, of in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked, rows = [job for file in options.records for job in jobs(file, options.models)], []
    pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
    for row in pool.map(forecast, *zip(*asked, strict=True)):
        rows.append(row)
        print(
            f"{row['model']}: peak {row['forecast_gib']} GiB, measured {row['measured_gib']} "
            f"({row['peak_ratio'] - 1:+.1%}); step {row['forecast_ms']} ms, measured {row['measured_ms']} "
            f"({row['time_ratio'] - 1:+.1%})",
            flush=True,
        )
        if options.json:
            record = {"environment": environment(), "summary": summary(rows), "rows": rows}
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(summary(rows))


if __name__ == "__main__":
    main()
