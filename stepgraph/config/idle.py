"""Finds options on a command line that would change nothing."""

from collections.abc import Callable
from typing import Any

from stepgraph.config.command_line import given

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
