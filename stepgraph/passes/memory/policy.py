"""Memory policies: their meaning and syntax."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stepgraph.errors import nearest, unknown_name

POLICIES = ("none", "selective", "full", "budget", "peak")
ACTIONS = ("keep", "recompute", "offload")

_ALLOWED = (
    "allowed: none, full, selective, budget=<GiB, as 8GiB> or budget=<fraction, as 0.5>, peak=<GiB, as 70GiB> or "
    "peak=<share of the GPU, as 90%>, and after a comma or alone <module>=keep, recompute or offload, as "
    "layers.*.mlp=recompute"
)


@dataclass(frozen=True)
class MemoryPolicy:
    """``policy``: ``none``, ``full`` (keep what enters each repeated block), ``selective`` (keep the results of
    expensive operators), ``budget``, which keeps as much as fits, or ``peak``, which lets the whole step take that
    much. ``budget``: GiB kept for backward, or with ``budget_is_fraction`` a share of what ``none`` keeps. ``peak``:
    GiB, or a fraction of the GPU's memory, by ``peak_is_fraction``. ``modules``: (pattern of a module path, action);
    of several that match, the last counts."""

    policy: str = "none"
    budget: float = 0.0
    budget_is_fraction: bool = False
    peak: float = 0.0
    peak_is_fraction: bool = False
    modules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise unknown_name("memory policy", self.policy, POLICIES)
        for name in ("budget", "peak"):
            if self.policy == name and not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"memory {name} {getattr(self, name):g} is not a positive number; use GiB")


def parse_policy(text: str) -> MemoryPolicy:
    """``none | full | selective | budget=8GiB | budget=0.5`` (a fraction below or equal to 1, GiB above) ``| peak=70GiB
    | peak=90%``, then ``MODULE=ACTION`` for each exception; separated by commas."""
    whole, modules = MemoryPolicy(), []
    for i, part in enumerate(str(text).split(",")):
        name, _, value = part.strip().partition("=")
        if name in ("none", "full", "selective") and not value and i == 0:
            whole = MemoryPolicy(name)
        elif name in ("budget", "peak") and value and i == 0:
            whole = _measured(name, value)
        elif value in ACTIONS and re.fullmatch(r"[\w*]+(\.[\w*]+)*", name):
            modules.append((name, value))
        else:
            raise ValueError(f"unknown memory policy {part!r}; {_ALLOWED}")
    return MemoryPolicy(**vars(whole) | {"modules": tuple(modules)})


def _measured(name: str, value: str) -> MemoryPolicy:
    """The policy ``budget`` or ``peak`` with its ``value``."""
    share = name == "peak" and value.endswith("%")
    try:
        number = float(value.removesuffix("%") if share else value.removesuffix("GiB"))
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf") or (share and number > 100):
        raise ValueError(f"memory {name}={value} is neither a size above 0 in GiB nor a share up to 100%; {_ALLOWED}")
    if name == "budget":
        return MemoryPolicy("budget", number, not value.endswith("GiB") and number <= 1)
    return MemoryPolicy("peak", peak=number / 100 if share else number, peak_is_fraction=share)


def check_tiles(tiles: int | str) -> None:
    """Raises ``ValueError`` unless ``tiles`` is a number of tiles."""
    if tiles != "auto" and (type(tiles) is not int or tiles < 1):
        raise ValueError(f"tiles={tiles}; allowed: auto, or a number of tiles from 1 on, as 8")


def module_actions(modules: Sequence[tuple[str, str]]) -> Callable[[str], tuple[str, str] | None]:
    """Called with a module path: (its action by ``modules``, the path of the module that a pattern names), or None."""
    patterns = [(re.compile(pattern_of(text) + r"(?=\.|$)"), action) for text, action in reversed(modules)]

    @functools.cache
    def find(path: str) -> tuple[str, str] | None:
        return next(((action, m.group()) for regex, action in patterns if (m := regex.match(path))), None)

    return find


def pattern_of(text: str) -> str:
    """The regular expression of a pattern, whose ``*`` is any part of a name between two dots."""
    return re.escape(text).replace(r"\*", "[^.]*")


def check_modules(modules: Sequence[tuple[str, str]], paths: Iterable[str]) -> None:
    """Raise ``ValueError`` where a pattern of ``modules`` names none of the model's ``paths``."""
    paths = list(paths)
    for text, action in modules:
        if not any(re.fullmatch(pattern_of(text), path) for path in paths):
            shown = sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in paths if path})
            near = nearest(text, shown)
            fix = (
                f"did you mean {near}?" if near else f"the model has {', '.join(shown[:8])}{', ...' * (len(shown) > 8)}"
            )
            raise ValueError(f"memory {text}={action} names no module of the model: {fix}")
