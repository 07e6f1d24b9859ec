"""``stepgraph bench train``: a training step over a mesh of this machine's devices, ours and torchtitan's in turn."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import tyro

from stepgraph import parallel
from stepgraph.bench.arguments import provider_names
from stepgraph.bench.results import write
from stepgraph.bench.step.command import LEARNING_RATE, describe
from stepgraph.bench.train.providers import BATCH_SEED, PROVIDERS
from stepgraph.bench.train.rank import TRACED_STEPS, WARMUP_STEPS
from stepgraph.bench.train.results import TrainRow, check_losses
from stepgraph.bench.train.table import train_section
from stepgraph.config.command_line import parse, require_folder
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment
from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.errors import unknown_name
from stepgraph.models import GolfConfig, Llama3Config, flops_per_token

#: What torchrun starts as each rank.
RANK = ["-m", "stepgraph.bench.train.rank"]

#: Options that mean what they mean in ``stepgraph train``.
SETTINGS = (
    *("mesh", "seq_len", "batch_size", "precision", "memory", "reshard", "reduce_dtype", "inductor", "norm"),
    *("async_tp", "copy_engines", "cuda_graph", "disable_pass", "model", "steps"),
)


@dataclass(frozen=True)
class TrainOptions:
    """Measure a training step over several devices: same model, mesh, batch and precision, one provider after another.

    --help shows the preset's own sizes as defaults.
    """

    mesh: str = "fsdp=1"
    """Ranks, all on this machine, as in fsdp=2,tp=2: fsdp=N, ddp=N or hsdp=REPLICASxSHARDS, and tp=N."""

    seq_len: int = 256
    """Tokens in a sequence."""

    batch_size: int = 8
    """Sequences in the batch of one data-parallel rank."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: fp32 shards and AdamW state, gathered and computed in bf16."""

    memory: str = "none"
    """Activations to recompute: none, full or selective; ours also budget=40GiB or budget=0.5 (a share of all)."""

    reshard: Literal["auto", "always", "never"] = "auto"
    """Gather parameters again in backward. auto: each provider's own choice (torchtitan's: always, but the last)."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype that gradients are reduced in over the mesh."""

    inductor: Literal["full", "regional", "off"] = "full"
    """Ours: full, regional or off, as in stepgraph train. torchtitan always compiles block by block."""

    norm: Literal["auto", "kernel", "inductor", "eager"] = "auto"
    """Ours: how norms run, as in stepgraph train."""

    async_tp: bool = False
    """Ours: matrix products in a pipeline with collectives of tensor parallelism, as in stepgraph train."""

    copy_engines: bool = False
    """Ours: gather parameters and reduce gradients by copy engines, as in stepgraph train."""

    cuda_graph: bool = True
    """Ours: replay the whole step as one CUDA graph."""

    disable_pass: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Ours: leave a pass out, by name."""

    providers: str = ",".join(PROVIDERS)
    """Names with commas between. One that is not installed, or cannot do this work, is reported as such."""

    steps: int = 20
    """Steps that are timed; the result is their median."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU, otherwise cpu."""

    timeout: float = 600.0
    """Seconds after which a provider is given up."""

    json: Path | None = None
    """Write the record to this file, after each provider; stepgraph bench report reads it."""

    traces: Path | None = None
    """Keep rank 0's profiler trace of each provider in this folder, as PROVIDER.json.gz. GPUs only."""

    model: Annotated[Llama3Config | GolfConfig, tyro.conf.AvoidSubcommands] = dataclasses.field(
        default_factory=lambda: PRESETS["llama3-debug"]().model
    )
    """Shape of the model."""

    preset: Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress] = "llama3-debug"
    """Name of the preset that the options started from."""

    @classmethod
    def of_preset(cls, name: str) -> "TrainOptions":
        """The options whose model, batch and precision are the preset's; no activation is recomputed."""
        preset = PRESETS[name]()
        taken = {field: getattr(preset, field) for field in ("model", "batch_size", "seq_len", "precision", "inductor")}
        return cls(preset=name, **taken)

    def names(self) -> list[str]:
        """The providers, in order. Raises ValueError for an unknown one."""
        return provider_names(self.providers, PROVIDERS)

    def config(self) -> TrainConfig:
        """The run whose step is measured. Raises ValueError, in one line, for an option that cannot be right."""
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout} must be above 0")
        require_folder(self.json)
        if self.traces is not None and not self.traces.is_dir():
            raise ValueError(f"traces={self.traces} is no folder; make it first")
        config = dataclasses.replace(
            PRESETS[self.preset](),
            **{name: getattr(self, name) for name in SETTINGS},
            lr=LEARNING_RATE,
            schedule="constant",
            warmup_steps=0,
            max_grad_norm=1.0,
        )
        config.validate()
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
    chosen = describe(config, env) | {
        name: getattr(config, name) for name in SETTINGS if name not in ("model", "steps")
    }
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
        settings["models"][config.preset]["losses"] = check_losses(rows, config.precision)
        if options.json is not None:  # after every provider, so that an interruption keeps those measured
            write(options.json, env, settings, rows)
    print(train_section(config.preset, env, settings, rows))
    return int(any(row.error or row.disagreement for row in rows))


def parse_train(argv: list[str]) -> TrainOptions:
    """The options in ``argv``, after a preset. Raises ValueError, in one line, for an unknown preset, option or
    provider and for a bad value."""
    named = bool(argv) and not argv[0].startswith("-")
    preset, words = (argv[0], argv[1:]) if named else ("llama3-debug", argv)
    if preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)
    text = f"{TrainOptions.__doc__} Presets: {', '.join(PRESETS)}. Providers: {', '.join(PROVIDERS)}."
    options = parse(TrainOptions.of_preset(preset), words, usage="stepgraph bench train [PRESET]", description=text)
    options.names()
    return options


def measure(
    name: str, config: TrainConfig, options: TrainOptions, device: torch.device, peak_flops: float | None
) -> TrainRow:
    """The row of the provider ``name``."""
    row = TrainRow(model=config.preset, provider=name, environment=dict(PROVIDERS[name].environment))
    row.unavailable = PROVIDERS[name].unavailable(config, device)
    if row.unavailable:
        _note(row, row.unavailable)
        return row
    with tempfile.TemporaryDirectory(prefix="stepgraph-bench-", ignore_cleanup_errors=True) as folder:
        answer, row.error = run_ranks(name, config, options, device, Path(folder))
    for field, value in answer.items():
        setattr(row, field, value)
    if row.error:
        _note(row, f"failed: {row.error}")
    if row.step_ms_all:
        ranks = config.mesh_spec.size
        row.step_ms = median(row.step_ms_all)
        row.tokens_per_s_per_gpu = 1e3 * config.tokens_per_step / row.step_ms / ranks
        if peak_flops:
            row.mfu = row.tokens_per_s_per_gpu * flops_per_token(config.model, config.seq_len) / peak_flops
        _note(row, f"first step after {row.first_step_s:.1f} s, then {row.step_ms:.4g} ms a step")
    return row


def run_ranks(
    name: str, config: TrainConfig, options: TrainOptions, device: torch.device, folder: Path
) -> tuple[dict[str, Any], str | None]:
    """Starts the provider's ranks with torchrun and waits for them: figures of a `TrainRow`, and what went wrong."""
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
    with log.open("w") as output:
        job.write_text(json.dumps(values | {"started": time.time()}), encoding="utf-8")
        process = subprocess.Popen([*torchrun, *RANK, str(job)], stdout=output, stderr=output, env=variables)
        status = _wait(process, options.timeout)
    answer = folder / "answer.json"
    figures = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    if status == 0:
        return figures, None
    print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("error-*.json")]
    if errors:  # the others fail because of the first
        return figures, min(errors, key=lambda error: error["time"])["error"]
    return figures, f"not done after {options.timeout:g} s" if status is None else f"its ranks ended with {status}"


def _wait(process: subprocess.Popen, timeout: float) -> int | None:
    """The exit status; None where it takes longer than ``timeout`` seconds: then it is ended, and its ranks with it."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # also when this process is interrupted
            process.terminate()  # torchrun ends its ranks
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _note(row: TrainRow, text: str) -> None:
    """Tells the user how far it is; on stderr, so that stdout holds the result alone."""
    print(f"{row.model} | {row.provider} | {text}", file=sys.stderr, flush=True)
