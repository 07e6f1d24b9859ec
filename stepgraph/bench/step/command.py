"""``stepgraph bench step``: one training step of a preset's model under each provider, side by side."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch

from stepgraph.bench.harness import BATCH_SEED, FIRST_STEPS, described, preset, provider_names, run_of
from stepgraph.bench.lane import Lane, measured
from stepgraph.bench.results import check_losses, write
from stepgraph.bench.rows import Row, section
from stepgraph.bench.step.child import PROVIDERS
from stepgraph.config.command_line import parse, require_folder
from stepgraph.config.commands import BENCH, StepBench
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment
from stepgraph.config.presets import DEFAULT
from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import peak_flops
from stepgraph.models import flops_per_token
from stepgraph.options import StepOptions, values

#: What runs in a provider's process.
CHILD = [sys.executable, "-m", "stepgraph.bench.step.child"]


def main(argv: list[str]) -> int:
    """Measures and reports; 1 if a provider failed or its losses are not the others'."""
    configs, options = parse_step(argv)
    providers, device = provider_names(options.providers, PROVIDERS), pick_device(configs[0].device)
    env = environment()
    settings: dict[str, Any] = {
        "device": device.type,
        "providers": providers,
        "steps": options.steps,
        "repeats": options.repeats,
        "together": options.together,
        "first_steps": FIRST_STEPS,
        "batch_seed": BATCH_SEED,
        "models": {},
    }
    rows: list[Row] = []
    for config in configs:
        found: list[Row] = []
        for some in measure(config, options, device):
            found += some
            losses = check_losses(found, config.precision)
            settings["models"][config.preset] = describe(config, env) | {"losses": losses}
            if options.json is not None:  # after each, so that an interruption keeps what was measured
                write(options.json, env, settings, rows + found)
        rows += found
        print(section(config.preset, env, settings, found))
    return int(any(row.error or row.disagreement for row in rows))


def parse_step(argv: list[str]) -> tuple[list[TrainConfig], StepBench]:
    """A run for every preset that ``argv`` starts with, and the benchmark's options: the other words apply to each.

    Raises ValueError, in one line, for an unknown preset, option or provider and for a bad value.
    """
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    configs, words, options = [], argv[count:], StepBench()
    for name in dict.fromkeys(argv[:count] or [DEFAULT]):
        config, options = parse(
            words,
            "stepgraph bench step [PRESET ...]",
            preset(name),
            StepBench(),
            parts=BENCH,
            description=described(StepBench, PROVIDERS),
        )
        provider_names(options.providers, PROVIDERS)
        for name in ("steps", "repeats", "together"):
            if getattr(options, name) < 1:
                raise ValueError(f"{name}={getattr(options, name)} must be above 0")
        require_folder(options.json)
        configs.append(run_of(config, words))
    return configs, options


def describe(config: TrainConfig, env: dict[str, Any]) -> dict[str, Any]:
    """What a model was measured with, for the record."""
    same = ("batch_size", "seq_len", "precision", "lr", "max_grad_norm", "seed")
    return {name: getattr(config, name) for name in same} | {
        "optimizer": "torch.optim.AdamW(fused=True)",
        "params": config.model.num_params(),
        "flops_per_token": flops_per_token(config.model, config.seq_len),
        "peak_flops": peak_flops(env["gpus"][0], config.products_dtype) if env["gpus"] else None,
        "model": dataclasses.asdict(config.model),
        **values(config, StepOptions),
    }


def measure(config: TrainConfig, options: StepBench, device: torch.device) -> Iterator[list[Row]]:
    """Rows of the providers, as they are done: on a CPU all at once; in a GPU's memory, ``together`` of them."""

    def conclude(lane: Lane) -> None:
        if lane.row.step_ms:
            lane.row.tokens_per_s = 1000 * config.batch_size * config.seq_len / lane.row.step_ms

    lanes = [
        Lane(Row(model=config.preset, provider=name), CHILD) for name in provider_names(options.providers, PROVIDERS)
    ]
    job, cpu = {"config": config.to_json(), "device": str(device)}, device.type == "cpu"
    at_once = len(lanes) if cpu else options.together
    groups = [lanes[start : start + at_once] for start in range(0, len(lanes), at_once)]
    return measured(groups, job, options.repeats, options.steps, conclude, build_apart=cpu)
