"""``stepgraph bench train``: our training step over a mesh of this machine's devices, then torchtitan's."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from stepgraph import parallel
from stepgraph.bench.harness import BATCH_SEED, described, preset, provider_names, run_of
from stepgraph.bench.results import write
from stepgraph.bench.rows import SPEAKS_EVERY_S, note
from stepgraph.bench.step.command import describe
from stepgraph.bench.train.providers import PROVIDERS
from stepgraph.bench.train.rank import TRACED_STEPS, WARMUP_STEPS
from stepgraph.bench.train.results import TrainRow, check_losses, train_section
from stepgraph.bench.train.titan import rounded_weights
from stepgraph.config.command_line import make_folder, parse, require_folder
from stepgraph.config.commands import BENCH, TrainBench
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment
from stepgraph.config.idle import refuse_unused
from stepgraph.config.presets import DEFAULT, PRESETS, settings
from stepgraph.config.train import TrainConfig
from stepgraph.models import flops_per_token
from stepgraph.options import MeshOptions, UpdateOptions, values

#: What torchrun starts as each rank.
RANK = ["-m", "stepgraph.bench.train.rank"]

#: How many lines of a failed provider's output are shown.
LAST_LINES = 20


def main(argv: list[str]) -> int:
    """Measures and reports; 1 if a provider failed or its loss is not the others'."""
    config, options = parse_train(argv)
    providers, device = provider_names(options.providers, PROVIDERS), pick_device(config.device)
    if parallel.launched():
        raise ValueError("bench train starts its ranks itself: call stepgraph bench train without torchrun")
    ranks, there = config.mesh_spec.size, torch.cuda.device_count()
    if device.type == "cuda" and ranks > there:
        raise ValueError(
            f"mesh {config.mesh} has {ranks} ranks and this machine has {there} GPUs: choose a smaller --mesh"
        )
    env = environment()
    chosen = describe(config, env) | values(config, UpdateOptions, MeshOptions)
    chosen["balanced_routing"] = options.balanced_routing
    chosen["rounded_weights"] = "torchtitan" in providers and rounded_weights(config)
    settings: dict[str, Any] = {
        "benchmark": "train",
        "device": device.type,
        "providers": providers,
        "ranks": ranks,
        "warmup_steps": WARMUP_STEPS,
        "steps": options.steps,
        "traced_steps": TRACED_STEPS,
        "batch_seed": BATCH_SEED,
        "models": {config.preset: chosen},
    }
    rows: list[TrainRow] = []
    for name in providers:
        rows.append(measure(name, config, options, device, chosen["peak_flops"]))
        settings["models"][config.preset]["losses"] = check_losses(
            rows, config.precision if config.fp8 == "off" else "fp8"
        )
        if options.json is not None:  # after every provider, so that an interruption keeps those measured
            write(options.json, env, settings, rows)
    print(train_section(config.preset, env, settings, rows))
    return int(any(row.error or row.disagreement for row in rows))


def parse_train(argv: list[str]) -> tuple[TrainConfig, TrainBench]:
    """The run and the options in ``argv``, after a preset. Raises ValueError, in one line, for an unknown preset,
    option or provider and for a bad value."""
    named = bool(argv) and not argv[0].startswith("-")
    name, words = (argv[0], argv[1:]) if named else (DEFAULT, argv)
    config, options = parse(
        words,
        "stepgraph bench train [PRESET]",
        preset(name, inductor=settings(name).get("inductor", "full") if name in PRESETS else "full", mesh="fsdp=1"),
        TrainBench(),
        parts=(*BENCH, UpdateOptions, MeshOptions, "first_step_timeout"),
        description=described(TrainBench, PROVIDERS),
    )
    provider_names(options.providers, PROVIDERS)
    if options.timeout <= 0:
        raise ValueError(f"timeout={options.timeout} must be above 0")
    require_folder(options.json)
    if config.precision == "bf16-autocast":
        raise ValueError("precision=bf16-autocast is not supported here: use fp32 or bf16")
    config = run_of(config, words, steps=options.steps, schedule="constant", warmup_steps=0, saved_steps="off")
    refuse_unused(config, words)
    if options.balanced_routing and not hasattr(config.model, "moe"):
        raise ValueError(f"balanced_routing needs experts and {name} has none: drop --balanced-routing")
    make_folder(options.traces, "traces")
    return config, options


def measure(
    name: str, config: TrainConfig, options: TrainBench, device: torch.device, peak_flops: float | None
) -> TrainRow:
    """The row of the provider ``name``."""
    row = TrainRow(model=config.preset, provider=name, environment=dict(PROVIDERS[name].environment))
    row.unavailable = PROVIDERS[name].unavailable(config, device)
    if row.unavailable:
        note(row, row.unavailable)
        return row
    with tempfile.TemporaryDirectory(prefix="stepgraph-bench-", ignore_cleanup_errors=True) as folder:
        answer, row.error = run_ranks(row, config, options, device, Path(folder))
    for field, value in answer.items():
        setattr(row, field, value)
    if row.error:
        note(row, f"failed: {row.error}")
    if row.step_ms_all:
        ranks = config.mesh_spec.size
        row.step_ms = median(row.step_ms_all)
        row.tokens_per_s_per_gpu = 1e3 * config.tokens_per_step / row.step_ms / ranks
        if peak_flops:
            row.mfu = row.tokens_per_s_per_gpu * flops_per_token(config.model, config.seq_len) / peak_flops
        note(row, f"first step after {row.first_step_s:.1f} s, then {row.step_ms:.4g} ms per step")
    return row


def run_ranks(
    row: TrainRow, config: TrainConfig, options: TrainBench, device: torch.device, folder: Path
) -> tuple[dict[str, Any], str | None]:
    """Starts the ranks of the row's provider with torchrun and waits for them: a `TrainRow`'s figures, and failures."""
    name = row.provider
    job, log = folder / "job.json", folder / "log"
    trace = str(options.traces.resolve() / f"{name}.json.gz") if options.traces is not None else None
    # Compile caches of its own: every provider compiles from nothing. Ranks end without cleaning up.
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    caches["TMPDIR"] = str(folder)
    ranks = config.mesh_spec.size
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    variables = threads | os.environ | caches | PROVIDERS[name].environment
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    values = {"provider": name, "config": config.to_json(), "device": str(device), "trace": trace}
    values |= {"balanced": options.balanced_routing, "hang_s": config.first_step_timeout}
    note(row, "start")
    with log.open("w") as output:
        job.write_text(json.dumps(values | {"started": time.time()}), encoding="utf-8")
        command = [*torchrun, *RANK, str(job)]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
        found = _wait(row, process, options.timeout, folder)
    answer = folder / "answer.json"
    figures = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    if found == 0:
        return figures, None
    if isinstance(found, dict):
        error, last = found["error"], found["trace"]
    else:
        error = f"not finished after {options.timeout:g} s" if found is None else f"its ranks ended with {found}"
        last = log.read_text(errors="replace")
    print("".join(f"    {line}\n" for line in last.splitlines()[-LAST_LINES:]), file=sys.stderr)
    return figures, error


def _wait(row: TrainRow, process: subprocess.Popen, timeout: float, folder: Path) -> int | dict[str, str] | None:
    """What ends the provider: its exit status, what its first rank to fail says, or None after ``timeout`` seconds.
    torchrun is ended, and its ranks with it: they may wait for the one that failed."""
    began = said = time.monotonic()
    try:
        while (now := time.monotonic()) < began + timeout:
            if now > said + SPEAKS_EVERY_S:
                note(row, f"waiting, {now - began:.0f} s")
                said = now
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            status = process.returncode
            if errors := sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns):
                return json.loads(errors[0].read_text(encoding="utf-8"))
            if status is not None:
                return status
        return None
    finally:
        if process.poll() is None:  # also when this process is interrupted
            process.terminate()  # torchrun ends its ranks
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
