"""Steps of Llama 3 under peaks that are asked for, next to full and selective recomputation, on one GPU.

    python benchmarks/peak.py [--preset llama3-8b] [--layers N] [--batch-size B] [--seq-len T] [--json FILE]

Five peaks from the largest that is needed to the least that works, as forecast. For each: what was asked, forecast and
measured (allocated and reserved), tokens/s, and what was chosen. The whole model takes AdamW's state in bf16, as
``bench step`` does.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import stepgraph
from stepgraph.config.environment import environment
from stepgraph.config.presets import PRESETS
from stepgraph.costs.memory import peak_bytes
from stepgraph.lower import StepSpec, programs_by_policy, rewrite, trace
from stepgraph.models import Llama3, next_token_loss
from stepgraph.passes import StepOptions, Target

STEPS = 5


def job(args: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """(model, batch, optimizer) on the GPU, in bf16."""
    config = PRESETS[args.preset]().model
    config = dataclasses.replace(config, n_layers=args.layers or config.n_layers, max_seq_len=args.seq_len)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama3(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    model.init_weights()
    ids = torch.randint(config.vocab_size, (args.batch_size, args.seq_len + 1), device="cuda")
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def measure(args: argparse.Namespace, memory: str) -> dict[str, Any]:
    """A row: ``STEPS`` replayed steps under the policy ``memory``."""
    gc.collect()
    torch.cuda.empty_cache()
    model, batch, optimizer = job(args)
    step = stepgraph.capture(model, next_token_loss, batch, optimizer, passes=StepOptions(memory=memory))
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step(batch)
    step(batch)  # records: memory inside a replay is not counted
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    notes = next((report.notes for report in step.report if report.name == "fit_memory"), [])
    took = statistics.median(seconds)
    forecast = peak_bytes(step._current.traced.program, fused=True) / 2**30
    row = {
        "memory": memory, "forecast_gib": round(forecast, 2), "loss": round(loss.item(), 4),
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "step_ms": round(took * 1e3, 1), "tokens_per_s": round(batch["tokens"].numel() / took),
        "first_two_steps_s": round(first, 1), "chosen": notes,
    }  # fmt: skip
    if memory.startswith("peak="):
        asked = float(memory.removeprefix("peak=").removesuffix("GiB"))
        row |= {"asked_gib": asked, "reserved_over_asked": round(row["reserved_gib"] / asked, 4)}
    step.release()
    return row


def policies(args: argparse.Namespace) -> list[str]:
    """Policies to measure: each one that is forecast to fit, then five peaks from the largest to the least possible."""
    model, batch, optimizer = job(args)
    spec = StepSpec(model, next_token_loss, batch, optimizer, passes=StepOptions())
    target = dataclasses.replace(Target.on(torch.device("cuda", 0)), simulated=True)
    program, least = trace(spec, target).program, 0.0
    peaks = {policy: peak_bytes(made, fused=True) for policy, made in programs_by_policy(program, spec, target)}
    try:
        rewrite(program, dataclasses.replace(spec, passes=StepOptions(memory="peak=0.001GiB")), target)
    except ValueError as error:
        least = float(str(error).partition("at least peak=")[2].partition("GiB")[0])
    most = min(peaks["none"], target.memory) / 2**30
    asked = [f"peak={least + share * (most - least) + 0.005:.2f}GiB" for share in (0.9, 0.65, 0.4, 0.2, 0.0)]
    return [policy for policy, size in peaks.items() if size < 0.97 * target.memory] + asked


def main() -> None:
    """Measure, print a line for each policy, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b", choices=[name for name in PRESETS if "llama3" in name])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--json", type=Path, default=Path("peak.json"))
    args = parser.parse_args()
    rows = []
    for memory in policies(args):
        rows.append(measure(args, memory))
        shown = {name: value for name, value in rows[-1].items() if name != "chosen"}
        print(json.dumps(shown), flush=True)
        settings = {name: str(value) for name, value in vars(args).items()}
        record = {"settings": settings, "environment": environment(), "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
