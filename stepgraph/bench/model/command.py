"""``stepgraph bench model``: a training step of unmodified models under each provider, side by side."""

import importlib.metadata
import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from stepgraph.bench.harness import FIRST_STEPS, LEARNING_RATE, MAX_GRAD_NORM, provider_names
from stepgraph.bench.lane import Lane, measured
from stepgraph.bench.model.child import PROVIDERS
from stepgraph.bench.model.models import BATCH_SEED, MODELS, TINY, WEIGHT_SEED, WHOLE, model_names, require_packages
from stepgraph.bench.model.table import model_section, summary
from stepgraph.bench.results import check_losses, write
from stepgraph.bench.rows import Row, note
from stepgraph.config.command_line import make_folder, parse, require_folder
from stepgraph.config.commands import ModelBench
from stepgraph.config.device import pick_device
from stepgraph.config.environment import environment

#: What runs in a provider's process.
CHILD = [sys.executable, "-m", "stepgraph.bench.model.child"]

#: Provider, or how its name begins -> its memory over that of torch.compile by default, measured on an H100.
_SHARES = {"eager": 1.6, "stepgraph": 0.75}

_OUT_OF_MEMORY = re.compile("out of memory|OutOfMemory|ALLOC_FAILED", re.IGNORECASE)


def main(argv: list[str]) -> int:
    """Measures and reports; 1 if a provider failed or its losses are not the others'."""
    names, options = parse_model(argv)
    require_packages(names)
    device, env = pick_device(options.device), environment()
    settings: dict[str, Any] = {
        "benchmark": "model",
        "device": device.type,
        "transformers": importlib.metadata.version("transformers"),
        "providers": provider_names(options.providers, PROVIDERS),
        **{name: getattr(options, name) for name in ("steps", "rounds", "limit_s", "together", "models_together")},
        "first_steps": FIRST_STEPS,
        "seeds": {"weights": WEIGHT_SEED, "batch": BATCH_SEED},
        "optimizer": "torch.optim.AdamW(fused=True)",
        "lr": LEARNING_RATE,
        "max_grad_norm": MAX_GRAD_NORM,
        "precision": "bf16-parameters",
        "models": {},
    }
    rows: dict[str, list[Row]] = {name: [] for name in names}
    for some in measure(names, options, settings["providers"], device):
        name = some[0].model
        found = rows[name]
        found += some
        losses = check_losses(found, settings["precision"])
        model = MODELS[name]
        settings["models"][name] = asdict(model) | {"unit": model.unit, "losses": losses}
        if options.json is not None:  # after each, so that an interruption keeps what was measured
            write(options.json, env, settings, [row for those in rows.values() for row in those])
        if len(found) == len(settings["providers"]):
            print(model_section(name, env, settings, found), flush=True)
    print(summary(list(rows.items())))
    wrong = (row.error or row.disagreement or row.profile_error for those in rows.values() for row in those)
    return int(any(wrong))


def parse_model(argv: list[str]) -> tuple[list[str], ModelBench]:
    """(models, options) of ``argv``. Raises ValueError for an unknown name and for a bad value."""
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    models = f"{', '.join(WHOLE)}; with {TINY} after a name: its tiny form"
    text = f"{ModelBench.__doc__} Models: {models}. Providers: {', '.join(PROVIDERS)}."
    (options,) = parse(argv[count:], "stepgraph bench model NAME ...", ModelBench(), description=text)
    _check(options)
    return model_names(argv[:count]), options


def _check(options: ModelBench) -> None:
    """Raises ValueError, in one line, for an option that cannot be right."""
    provider_names(options.providers, PROVIDERS)
    for name in ("steps", "rounds", "limit_s", "total_s", "together", "models_together"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            raise ValueError(f"{name}={getattr(options, name)} must be above 0")
    require_folder(options.json)
    make_folder(options.profile, "profile")


def measure(names: list[str], options: ModelBench, providers: list[str], device: torch.device) -> Iterator[list[Row]]:
    """Rows of the providers of each model, ``together`` of them at a time, as they are done."""
    until = math.inf if options.total_s is None else time.monotonic() + options.total_s

    def lane(model: str, provider: str) -> Lane:
        return Lane(Row(model=model, provider=provider), CHILD, options.limit_s, until)

    def conclude(lane: Lane) -> None:
        row = lane.row
        if not row.step_ms:
            return
        row.per_s = 1000 * MODELS[row.model].units / row.step_ms
        if row.provider.startswith("stepgraph") and (device.type == "cuda" or options.profile is not None):
            path = options.profile and str(options.profile.resolve() / f"{row.model}.{row.provider}.md")
            lane.keep(lane.ask({"do": "profile", "path": path, "step_ms": row.step_ms}))
            row.profile_error, row.error = row.error, None

    gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else math.inf
    waiting = deque(grouped(names, providers, options.together, options.models_together, gib))
    alone = {group[0] for group in waiting if len(group) == 1}

    def groups() -> Iterator[list[Lane]]:
        while waiting:
            yield [lane(*pair) for pair in waiting.popleft()]

    for rows in measured(groups(), {"device": str(device)}, options.rounds, options.steps, conclude):
        crowded = [row for row in rows if _OUT_OF_MEMORY.search(row.error or "") and _pair(row) not in alone]
        for row in crowded:
            note(row, "it is measured again, alone")
        alone.update(map(_pair, crowded))
        waiting.extend([_pair(row)] for row in crowded)
        if done := [row for row in rows if row not in crowded]:
            yield done


def _pair(row: Row) -> tuple[str, str]:
    return row.model, row.provider


def grouped(
    names: Sequence[str], providers: Sequence[str], together: int, models_together: int, gib: float
) -> list[list[tuple[str, str]]]:
    """(model, provider) of the lanes that live at once, group by group: up to ``together`` providers of each of up to
    ``models_together`` models that are next to each other in ``names``, as far as they fit ``gib`` of memory."""
    some: list[list[str]] = []
    for name in names:
        whole = sum(_most_gib(model, providers, together) for model in (*(some[-1] if some else ()), name))
        if not some or len(some[-1]) == models_together or whole > gib:
            some.append([])
        some[-1].append(name)
    return [
        [(name, provider) for name in names for provider in providers[start : start + together]]
        for names in some
        for start in range(0, len(providers), together)
    ]


def _most_gib(model: str, providers: Sequence[str], together: int) -> float:
    """GiB of the ``together`` providers of ``model`` that take most."""
    shares = sorted((next((s for n, s in _SHARES.items() if p.startswith(n)), 1.0) for p in providers), reverse=True)
    return MODELS[model].gib * sum(shares[:together])
