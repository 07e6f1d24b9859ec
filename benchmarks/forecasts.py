"""The forecast of a model's step next to a measured one: peak and time.

    python benchmarks/forecasts.py --measure --models NAME ... [--scales 0.5 1 2] --json RECORD
    python benchmarks/forecasts.py [--json FILE] [--models NAME ...] [--workers 2] RECORD ...

With ``--measure`` it writes a record of captured steps on a GPU: each model of ``stepgraph bench model`` in a process
of its own, its batch size times each of the scales. Without, it forecasts the steps of such a record, or of one of
``bench model``, and needs no GPU: one line for each step that stepgraph ran, with the ratio of forecast to
measurement. The peak is of allocated bytes. Both need what the models come from (``pip install 'stepgraph[hf]'``).
"""

import argparse
import dataclasses
import gc
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from stepgraph.bench.harness import times
from stepgraph.bench.model import models
from stepgraph.bench.model.child import ModelRun, fused_adamw, loss_of, trained
from stepgraph.config.environment import environment
from stepgraph.costs.hardware import GPUS, known_gpu
from stepgraph.costs.step import graph_cost
from stepgraph.lower import StepSpec, lower
from stepgraph.passes import StepOptions, Target

STEPS = 10


def measure(name: str, scales: list[float], profile: Path | None) -> list[dict[str, Any]]:
    """A row for each batch size of ``name``: peak of its first steps, median of ``STEPS``, ms by kind of kernel.
    ``profile``: a folder for tables of its kernels, MODEL.BATCH.md."""
    rows, cuda, usual = [], torch.device("cuda"), models.MODELS[name].batch_size
    for size in (max(1, int(usual * scale)) for scale in scales):
        models.MODELS[name] = dataclasses.replace(models.MODELS[name], batch_size=size)
        run = ModelRun(name, "stepgraph", cuda)
        found = run.first_steps() | run.finish({})
        took = statistics.median(times(cuda, run.step, STEPS))
        path = profile and str(profile / f"{name}.{size}.md")
        row = {"model": name, "provider": "stepgraph", "batch_size": size, "error": None, "step_ms": took}
        rows.append(row | found | run.profile({"path": path, "step_ms": took}))
        run.step.step.release()
        del run
        gc.collect()
        torch.cuda.empty_cache()
    return rows


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
        size = row.get("batch_size", now.batch_size)
        if (then["sizes"], then["batch_size"], then["seq_len"]) != (now.sizes, now.batch_size, now.seq_len):
            print(f"{name} is left out: its sizes are not those of {file.name}")
            continue
        run = settings.get("runs", {}).get(name, record["environment"]["git"])
        made = {"record": file.name, "model": name, "gpu": gpu.name, "commit": run["commit"]}
        made |= {"torch": row["versions"]["torch"], "batch_size": size}
        made |= {"measured_gib": round(row["peak_allocated_gib"], 3)}
        found.append((name, next(key for key in GPUS if GPUS[key] is gpu), made | {"measured_ms": row["step_ms"]}))
    return found


def forecast(name: str, key: str, row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with the forecast of the step that ``bench model`` makes of ``name``."""
    start, meta, gpu = time.perf_counter(), torch.device("meta"), GPUS[key]
    models.MODELS[name] = dataclasses.replace(models.MODELS[name], batch_size=row["batch_size"])
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


def record(options: argparse.Namespace) -> None:
    """Measures ``options.models`` and writes their rows to ``options.json`` as they come."""
    named = {name: dataclasses.asdict(models.MODELS[name]) for name in options.models}
    made, rows = {"environment": environment(), "settings": {"scales": options.scales, "models": named}}, []
    for name in options.models:
        # A process each: what one model leaves on the GPU is not in the next one's peak.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows += pool.submit(measure, name, options.scales, options.profile).result()
        for row in rows[-len(options.scales) :]:
            print(
                f"{name} {row['batch_size']}: {row['peak_allocated_gib']:.3f} GiB, {row['step_ms']:.2f} ms", flush=True
            )
        options.json.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--scales", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.measure:
        return record(options)
    asked, rows = [job for file in options.records for job in jobs(file, options.models)], []
    pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
    for row in pool.map(forecast, *zip(*asked, strict=True)):
        rows.append(row)
        print(
            f"{row['model']} {row['batch_size']}: peak {row['forecast_gib']} GiB, measured {row['measured_gib']} "
            f"({row['peak_ratio'] - 1:+.1%}); step {row['forecast_ms']} ms, measured {row['measured_ms']} "
            f"({row['time_ratio'] - 1:+.1%})",
            flush=True,
        )
        if options.json:
            found = {"environment": environment(), "summary": summary(rows), "rows": rows}
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(summary(rows))
    return None


if __name__ == "__main__":
    main()
