"""``stepgraph bench train``: a training step over a mesh of this machine's devices, ours and torchtitan's in turn."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from stepgraph import parallel
from stepgraph.bench.arguments import BATCH_SEED, DEFAULT_PRESET, BenchOptions, of_preset, parse_options, provider_names
from stepgraph.bench.progress import Progress, note
from stepgraph.bench.results import write
from stepgraph.bench.step.command import describe
from stepgraph.bench.train.providers import PROVIDERS
from stepgraph.bench.train.rank import TRACED_STEPS, WARMUP_STEPS
from stepgraph.bench.train.results import TrainRow, check_losses
from stepgraph.bench.train.table import train_section
from stepgraph.config.command_line import refuse_unused
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment
from stepgraph.config.train import TrainConfig
from stepgraph.models import flops_per_token

#: What torchrun starts as each rank.
RANK = ["-m", "stepgraph.bench.train.rank"]

#: Lines of what a failed provider printed that are shown.
LAST_LINES = 20

#: Options of a run, in addition to what all benchmarks share, that define what is measured.
CHOSEN = (
    *("mesh", "reduce_dtype", "accumulate", "pipeline", "split", "stage_sends"),
    *("expert_capacity", "expert_chunks", "expert_exchange"),
)


@dataclass(frozen=True)
class TrainBench(BenchOptions):
    """Measure a training step over several devices: same model, mesh, batch and precision, one provider after another.

    --help shows the preset's own sizes as defaults. --memory and --reshard are for every provider (torchtitan has no
    memory budget); --passes to --cuda-graph besides are for stepgraph's step: torchtitan compiles block by block.
    """

    mesh: str = "fsdp=1"
    """Ranks, all on this machine, as in fsdp=2,tp=2: fsdp=N, ddp=N or hsdp=REPLICASxSHARDS, tp=N, pp=N, ep=N."""

    accumulate: int = 1
    """Microbatches in a step, of --batch-size sequences each."""

    pipeline: Literal["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"] | None = None
    """With pp in the mesh, the order of the --accumulate microbatches. None: 1f1b."""

    split: str | None = None
    """With pp, the first block of each of stepgraph's stages, as in 0,9,17,25. None: by the cost model."""

    stage_sends: Literal["point-to-point", "symmetric"] = "point-to-point"
    """With pp: how stepgraph's stages send, through process groups (NCCL), or into each other's memory."""

    expert_capacity: float = 2.0
    """With ep: room of stepgraph's exchanges, as a multiple of balanced load."""

    expert_chunks: int = 1
    """With ep: split a layer's tokens into N chunks: one travels while experts compute another."""

    expert_exchange: Literal["collectives", "symmetric"] = "collectives"
    """With ep: how stepgraph's tokens travel, by torch's collectives or over symmetric memory, by our kernels."""

    balanced_routing: bool = False
    """Every expert gets as many tokens, whatever the routers say: both providers' speed without imbalance."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: fp32 shards and AdamW state, gathered and computed in bf16."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype that gradients are reduced in over the mesh."""

    providers: str = ",".join(PROVIDERS)
    """Names with commas between. One that is not installed, or cannot do this work, is reported as such."""

    steps: int = 20
    """Steps that are timed; the result is their median."""

    timeout: float = 600.0
    """Seconds after which a provider is given up."""

    first_step_timeout: float = 60.0
    """Seconds without progress of any rank in a step until a provider's ranks end as hung; compiling is progress."""

    traces: Path | None = None
    """Keep rank 0's profiler trace of each provider in this folder, as PROVIDER.json.gz. GPUs only."""

    def names(self) -> list[str]:
        """The providers, in order."""
        return provider_names(self.providers, PROVIDERS)

    def config(self) -> TrainConfig:
        """The run whose step is measured. Raises ValueError, in one line, for an option that cannot be right."""
        for name in ("timeout", "first_step_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.traces is not None and not self.traces.is_dir():
            raise ValueError(f"traces={self.traces} is no folder; make it first")
        config = self.run(*CHOSEN, "steps", schedule="constant", warmup_steps=0, saved_steps="off")
        if self.balanced_routing and not hasattr(config.model, "moe"):
            raise ValueError(f"balanced_routing is about experts and {self.preset} has none: drop --balanced-routing")
        return config


def main(argv: list[str]) -> int:
    """Measures and reports; 1 if a provider failed or its loss is not the others'."""
    options = parse_train(argv)
    config, device = options.config(), pick_device(options.device)
    if parallel.launched():
        raise ValueError("bench train starts its ranks itself: call stepgraph bench train without torchrun")
    ranks, there = config.mesh_spec.size, torch.cuda.device_count()
    if device.type == "cuda" and ranks > there:
        raise ValueError(f"mesh {config.mesh} has {ranks} ranks, this machine {there} GPUs: choose a smaller --mesh")
    env = environment()
    chosen = describe(config, env) | {name: getattr(config, name) for name in CHOSEN}
    chosen["balanced_routing"] = options.balanced_routing
    settings: dict[str, Any] = {
        "benchmark": "train",
        "device": device.type,
        "providers": options.names(),
        "ranks": ranks,
        "warmup_steps": WARMUP_STEPS,
        "steps": options.steps,
        "traced_steps": TRACED_STEPS,
        "batch_seed": BATCH_SEED,
        "models": {config.preset: chosen},
    }
    rows: list[TrainRow] = []
    for name in options.names():
        rows.append(measure(name, config, options, device, chosen["peak_flops"]))
        settings["models"][config.preset]["losses"] = check_losses(
            rows, config.precision if config.fp8 == "off" else "fp8"
        )
        if options.json is not None:  # after every provider, so that an interruption keeps those measured
            write(options.json, env, settings, rows)
    print(train_section(config.preset, env, settings, rows))
    return int(any(row.error or row.disagreement for row in rows))


def parse_train(argv: list[str]) -> TrainBench:
    """The options in ``argv``, after a preset. Raises ValueError, in one line, for an unknown preset, option or
    provider and for a bad value."""
    named = bool(argv) and not argv[0].startswith("-")
    preset, words = (argv[0], argv[1:]) if named else (DEFAULT_PRESET, argv)
    default = of_preset(TrainBench, preset, "inductor")
    options = parse_options(default, words, "stepgraph bench train [PRESET]", PROVIDERS)
    refuse_unused(options.config(), words)
    return options


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
        note(row, f"first step after {row.first_step_s:.1f} s, then {row.step_ms:.4g} ms a step")
    return row


def run_ranks(
    row: TrainRow, config: TrainConfig, options: TrainBench, device: torch.device, folder: Path
) -> tuple[dict[str, Any], str | None]:
    """Starts the ranks of the row's provider with torchrun and waits for them: figures of a `TrainRow`, and what went
    wrong."""
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
    values |= {"balanced": options.balanced_routing, "hang_s": options.first_step_timeout}
    progress = Progress(row, folder / "phases")
    with log.open("w") as output, progress:
        job.write_text(json.dumps(values | {"started": time.time()}), encoding="utf-8")
        command = [*torchrun, *RANK, str(job)]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables | progress.environment)
        found = _wait(process, options.timeout, folder)
        where = str(progress)
    answer = folder / "answer.json"
    figures = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    if found == 0:
        return figures, None
    if isinstance(found, dict):
        error, last = found["error"], found["trace"]
    else:
        error = f"not done after {options.timeout:g} s: {where}" if found is None else f"its ranks ended with {found}"
        last = log.read_text(errors="replace")
    print("".join(f"    {line}\n" for line in last.splitlines()[-LAST_LINES:]), file=sys.stderr)
    return figures, error


def _wait(process: subprocess.Popen, timeout: float, folder: Path) -> int | dict[str, str] | None:
    """What ends the provider: its exit status, what its first rank to fail says, or None after ``timeout`` seconds.
    torchrun is ended, and its ranks with it: they may wait for the one that failed."""
    until = time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            status = _status(process)
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


def _status(process: subprocess.Popen) -> int | None:
    """The exit status within a fifth of a second; None where the process runs on."""
    try:
        return process.wait(0.2)
    except subprocess.TimeoutExpired:
        return None
