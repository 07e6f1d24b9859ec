"""Finds options on a command line that would change nothing."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from stepgraph.config.command_line import given
from stepgraph.options import StepOptions, choices
from stepgraph.passes import Pass, Target, resolve

#: A machine on which every pass may run.
ANY = Target("cuda", process_groups=True)


def refuse_idle(options: StepOptions, words: list[str], target: Target = ANY) -> None:
    """Raises ValueError for an option of the step that ``words`` give although no other value of it that goes with the
    other options would change the passes for ``target``. What is off may be said to be off."""
    passes = resolve(options, (), target)
    for name, allowed in choices(StepOptions).items():
        if name not in given(words):
            continue
        value = getattr(options, name)
        others = [dataclasses.replace(options, **{name: other}) for other in allowed if other != value]
        found = [made for other in others if (made := _resolved(other, target)) is not None]
        if value not in ("off", False) and found and all(made == passes for made in found):
            where = "in a forecast: leave it out" if target.simulated else "with passes=exact: drop one of them"
            raise ValueError(f"{name}={value} changes nothing {where}")


#: Options that change nothing without another: what has to hold, and how to have it so.
_NEEDED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_skipped": (lambda config: config.on_nonfinite == "skip", "add --on-nonfinite skip"),
    "decay_fraction": (lambda config: config.schedule == "wsd", "add --schedule wsd"),
    "min_lr_ratio": (lambda config: config.schedule != "constant", "drop --schedule constant"),
    **dict.fromkeys(("beta", "label_smoothing"), (lambda config: config.loss == "dpo", "add --loss dpo")),
    "expert_capacity": (lambda config: config.mesh_spec and config.mesh_spec.ep > 1, "add ep=2 to --mesh"),
}


def refuse_unused(config: object, words: list[str]) -> None:
    """Raises ValueError for an option of a run that ``words`` give and that changes nothing with the others."""
    for name, (holds, fix) in _NEEDED.items():
        if name in given(words) and not holds(config):
            raise ValueError(f"{name}={getattr(config, name)} changes nothing: {fix}, or leave it out")


def _resolved(options: StepOptions, target: Target) -> list[Pass] | None:
    """The passes of ``options``; None where they do not go together."""
    with contextlib.suppress(ValueError):
        return resolve(options, (), target)
    return None
