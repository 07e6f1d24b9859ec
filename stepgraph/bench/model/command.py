"""``stepgraph bench model``: a training step of unmodified models under each provider, side by side."""

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from stepgraph.bench.arguments import LEARNING_RATE, MAX_GRAD_NORM, provider_names
from stepgraph.bench.lane import Lane, rotated
from stepgraph.bench.model.child import FIRST_STEPS
from stepgraph.bench.model.models import BATCH_SEED, MODELS, WEIGHT_SEED, model_names, require_transformers
from stepgraph.bench.model.providers import DEFAULT, PROVIDERS
from stepgraph.bench.model.results import ModelRow
from stepgraph.bench.model.table import model_section, summary
from stepgraph.bench.progress import note
from stepgraph.bench.results import check_losses, write
from stepgraph.config.command_line import parse, require_folder
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment

#: What runs in a provider's process.
CHILD = [sys.executable, "-m", "stepgraph.bench.model.child"]


@dataclass(frozen=True)
class ModelBench:
    """Measure a training step of unmodified transformers models, built from their configurations, a process each."""

    providers: str = ",".join(DEFAULT)
    """Names with commas between."""

    steps: int = 10
    """Steps in a round; its result is their median."""

    rounds: int = 5
    """Rounds; the result is their median."""

    limit_s: float = 600
    """Seconds that a provider may take for its first steps, or for a round; then it is ended."""

    together: int = 1
    """Providers of a model that build and compile at once, all in one GPU's memory; rounds are timed one by one."""

    profile: Path | None = None
    """Write where stepgraph's step spends its time into this folder, as MODEL.PROVIDER.md."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU, otherwise cpu."""

    json: Path | None = None
    """Write the record to this file, after each provider; stepgraph bench report reads it."""

    def check(self) -> None:
        """Raises ValueError, in one line, for an option that cannot be right."""
        provider_names(self.providers, PROVIDERS)
        for name in ("steps", "rounds", "limit_s", "together"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.profile is not None and not self.profile.is_dir():
            raise ValueError(f"profile={self.profile} is no folder; make it first")
        require_folder(self.json)


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
    rows: dict[str, list[ModelRow]] = {}
    for name in names:
        measured = rows[name] = []
        for some in measure(name, options, settings["providers"], device):
            measured += some
            losses = check_losses(measured, settings["precision"])
            model = MODELS[name]
            settings["models"][name] = asdict(model) | {"unit": model.unit, "losses": losses}
            if options.json is not None:  # after each, so that an interruption keeps what was measured
                write(options.json, env, settings, [row for those in rows.values() for row in those])
        print(model_section(name, env, settings, measured), flush=True)
    print(summary(list(rows.items())))
    return int(any(row.error or row.disagreement for those in rows.values() for row in those))


def parse_model(argv: list[str]) -> tuple[list[str], ModelBench]:
    """(models, options) of ``argv``. Raises ValueError, in one line, for an unknown model, option or provider and for a
    bad value."""
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    text = f"{ModelBench.__doc__} Models: {', '.join(MODELS)}. Providers: {', '.join(PROVIDERS)}."
    options = parse(ModelBench(), argv[count:], usage="stepgraph bench model NAME ...", description=text)
    options.check()
    return model_names(argv[:count]), options


def measure(model: str, options: ModelBench, providers: list[str], device: torch.device) -> Iterator[list[ModelRow]]:
    """Rows of the providers, ``together`` of them at a time, as they are done."""
    for start in range(0, len(providers), options.together):
        yield _measure_together(model, options, providers[start : start + options.together], device)


def _measure_together(model: str, options: ModelBench, names: list[str], device: torch.device) -> list[ModelRow]:
    with contextlib.ExitStack() as stack:
        lanes = [
            stack.enter_context(Lane(ModelRow(model=model, provider=name), CHILD, options.limit_s)) for name in names
        ]
        for lane in lanes:
            lane.send({"model": model, "provider": lane.row.provider, "device": str(device)})
        for lane in lanes:
            lane.keep(first := lane.receive())
            if lane.row.unavailable:
                note(lane.row, lane.row.unavailable)
                lane.close()
            elif first:
                note(lane.row, f"first step {lane.row.first_step_s:.1f} s, losses {lane.row.losses}")
        for number in range(options.rounds):
            for lane in rotated(lanes, number):
                if answer := lane.ask({"do": "round", "steps": options.steps}):
                    lane.row.step_ms_all.append(answer["step_ms"])
        for lane in lanes:
            lane.keep(lane.ask({"do": "finish"}))
            _conclude(lane.row)
            if options.profile is not None and lane.row.provider.startswith("stepgraph"):
                path = options.profile.resolve() / f"{model}.{lane.row.provider}.md"
                lane.ask({"do": "profile", "path": str(path)})
            lane.close()
    return [lane.row for lane in lanes]


def _conclude(row: ModelRow) -> None:
    """Fills in what follows from the measurements. A provider that failed has no step time."""
    if row.error or not row.step_ms_all:
        row.step_ms_all = []
        return
    row.step_ms = median(row.step_ms_all)
    row.per_s = 1000 * MODELS[row.model].units / row.step_ms
    if "compile" in row.provider:
        row.compile_s = row.first_step_s - row.step_ms / 1000
    note(row, f"{row.step_ms:.4g} ms a step, {row.per_s:,.0f} {MODELS[row.model].unit}/s")
