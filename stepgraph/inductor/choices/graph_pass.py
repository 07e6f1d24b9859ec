"""The custom graph pass that carries rules: part of a compilation's configuration, and so of its cache key."""

from typing import Any

from stepgraph import compat
from stepgraph.inductor.choices.rules import Rules

parts = compat.inductor()


class RulesPass(parts.CustomGraphPass):
    """Carries ``rules``. ``then``: passes set before it, which run first."""

    def __init__(self, rules: Rules, then: tuple[Any, ...] = ()) -> None:
        self.rules, self.then = rules, then

    def uuid(self) -> Any:
        self.rules.seen()
        others = [p.uuid() if isinstance(p, parts.CustomGraphPass) else None for p in self.then]
        return None if None in others else (*self.rules.key(), *others)

    def __reduce__(self) -> tuple:
        """In another process it is created again, with whatever its class does then."""
        return type(self), (self.rules, self.then)

    def __deepcopy__(self, memo: dict) -> "RulesPass":
        """Configurations are copied freely; what the rules report must reach whoever asked for it."""
        return self


def installed(value: Any) -> RulesPass | None:
    """Our pass among the passes of a configuration."""
    return next((p for p in compat.inductor_passes(value) if isinstance(p, RulesPass)), None)


def active() -> Rules | None:
    """The rules of the compilation that runs in this thread."""
    found = installed(parts.config.post_grad_custom_pre_pass)
    return found and found.rules
