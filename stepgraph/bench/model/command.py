"""``stepgraph bench model``: a training step of unmodified models under each provider, side by side."""

import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from stepgraph.bench.arguments import LEARNING_RATE, MAX_GRAD_NORM, provider_names
from stepgraph.bench.harness import FIRST_STEPS
from stepgraph.bench.lane import Lane, measured
from stepgraph.bench.model.models import BATCH_SEED, MODELS, WEIGHT_SEED, model_names, require_transformers
from stepgraph.bench.model.providers import PROVIDERS
from stepgraph.bench.model.table import model_section, summary
from stepgraph.bench.results import check_losses, write
from stepgraph.bench.rows import Row
from stepgraph.config.command_line import parse, require_folder
from stepgraph.config.commands import ModelBench
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment

#: What runs in a provider's process.
CHILD = [sys.executable, "-m", "stepgraph.bench.model.child"]


def main(argv: list[str]) -> int:
    """Measures and reports; 1 if a provider failed or its losses are not the others'."""
    names, options = parse_model(argv)
    require_transformers()
    device, env = pick_device(options.device), environment()
    settings: dict[str, Any] = {
        "benchmark": "model",
        "device": device.type,
        "transformers": importlib.metadata.version("transformers"),
        "providers": provider_names(options.providers, PROVIDERS),
        "steps": options.steps,
        "rounds": options.rounds,
        "limit_s": options.limit_s,
        "together": options.together,
        "first_steps": FIRST_STEPS,
        "seeds": {"weights": WEIGHT_SEED, "batch": BATCH_SEED},
        "optimizer": "torch.optim.AdamW(fused=True)",
        "lr": LEARNING_RATE,
        "max_grad_norm": MAX_GRAD_NORM,
        "precision": "bf16-parameters",
        "models": {},
    }
    rows: dict[str, list[Row]] = {}
    for name in names:
        found = rows[name] = []
        for some in measure(name, options, settings["providers"], device):
            found += some
            losses = check_losses(found, settings["precision"])
            model = MODELS[name]
            settings["models"][name] = asdict(model) | {"unit": model.unit, "losses": losses}
            if options.json is not None:  # after each, so that an interruption keeps what was measured
                write(options.json, env, settings, [row for those in rows.values() for row in those])
        print(model_section(name, env, settings, found), flush=True)
    print(summary(list(rows.items())))
    return int(any(row.error or row.disagreement for those in rows.values() for row in those))


def parse_model(argv: list[str]) -> tuple[list[str], ModelBench]:
    """(models, options) of ``argv``. Raises ValueError, in one line, for an unknown model, option or provider and for a
    bad value."""
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    text = f"{ModelBench.__doc__} Models: {', '.join(MODELS)}. Providers: {', '.join(PROVIDERS)}."
    (options,) = parse(argv[count:], "stepgraph bench model NAME ...", ModelBench(), description=text)
    _check(options)
    return model_names(argv[:count]), options


def _check(options: ModelBench) -> None:
    """Raises ValueError, in one line, for an option that cannot be right."""
    provider_names(options.providers, PROVIDERS)
    for name in ("steps", "rounds", "limit_s", "together"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{name}={getattr(options, name)} must be above 0")
    if options.profile is not None and not options.profile.is_dir():
        raise ValueError(f"profile={options.profile} is no folder; make it first")
    require_folder(options.json)


def measure(model: str, options: ModelBench, providers: list[str], device: torch.device) -> Iterator[list[Row]]:
    """Rows of the providers, ``together`` of them at a time, as they are done."""

    def conclude(lane: Lane) -> None:
        if lane.row.step_ms:
            lane.row.per_s = 1000 * MODELS[model].units / lane.row.step_ms
        if options.profile is not None and lane.row.provider.startswith("stepgraph"):
            path = options.profile.resolve() / f"{model}.{lane.row.provider}.md"
            lane.ask({"do": "profile", "path": str(path)})

    lanes = [Lane(Row(model=model, provider=name), CHILD, options.limit_s) for name in providers]
    job = {"model": model, "device": str(device)}
    return measured(lanes, job, options.together, options.rounds, options.steps, conclude)
