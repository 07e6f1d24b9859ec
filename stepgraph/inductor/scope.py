"""Rules for Inductor's choices, and where they hold: a ``with`` block, or the options of one ``torch.compile``."""

import contextlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepgraph import compat

if TYPE_CHECKING:
    from stepgraph.inductor.fusion_guard import Guard
    from stepgraph.inductor.reduction_tuning import Tuning


@dataclass
class Rules:
    """What one compilation follows. ``key`` goes into Inductor's cache key: the settings and the sources."""

    guard: "Guard | None" = None
    tuning: "Tuning | None" = None

    def __or__(self, other: "Rules") -> "Rules":
        return Rules(other.guard or self.guard, other.tuning or self.tuning)

    def key(self) -> tuple[Any, ...]:
        return (
            compat.inductor().hash_of_files(_sources()),
            self.guard and self.guard.settings(),
            self.tuning and self.tuning.settings(),
        )

    def parts(self) -> list[Any]:
        return [part for part in (self.guard, self.tuning) if part is not None]

    def graphs(self) -> int:
        """How often a graph came by."""
        return sum(part.graphs_compiled + part.graphs_seen for part in self.parts())

    def begin(self) -> None:
        """A graph is being compiled, in this thread."""
        for part in self.parts():
            part.graphs_compiled += 1

    def seen(self) -> None:
        """A graph's cache key is being made: it will be compiled, or loaded."""
        for part in self.parts():
            part.graphs_seen += 1


def _sources() -> tuple[str, ...]:
    from pathlib import Path

    from stepgraph.kernels.norm import column_sum  # generated code calls it

    return (*(str(path) for path in sorted(Path(__file__).parent.glob("*.py"))), column_sum.__file__)


class Scope:
    """Rules for what Inductor compiles: ``with scope: ...``, or ``torch.compile(model, options=scope.options)``.

    Inside the block whatever is compiled follows the rules, forward and backward: Inductor compiles at the first call,
    so call the model inside; its backward is then compiled with its forward, not when it first runs. A block in which
    nothing was compiled warns. What was compiled before keeps its kernels.

    With ``options`` the rules stay with that model, wherever and whenever, and in whichever thread, it compiles.
    Blocks nest, and ``scope | scope`` combines: both sets of rules hold.
    """

    def __init__(self, rules: Rules, config: dict[str, Any] | None = None) -> None:
        self.rules = rules
        self.config = config or {}
        self._blocks = contextlib.ExitStack()

    def __or__(self, other: "Scope") -> "Scope":
        return Scope(self.rules | other.rules, self.config | other.config)

    @property
    def report(self) -> "Guard | None":
        """The guard's report: ``str`` of it gives readable lines, ``allowed()`` and ``refused()`` its decisions. None
        without a guard."""
        return self.rules.guard

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``torch.compile``; add those of a mode with ``torch._inductor.list_mode_options(mode)``."""
        from stepgraph.inductor.choices import Install, installed

        before = compat.inductor_passes(compat.inductor().config.post_grad_custom_pre_pass)
        outer = installed(before)
        rules = outer.rules | self.rules if outer else self.rules
        then = outer.then if outer else before
        return {"post_grad_custom_pre_pass": Install(rules, then), **self.config}

    def __enter__(self) -> "Scope":
        parts = compat.inductor()
        self._before = self.rules.graphs()
        # Settings do not reach autograd's threads in torch 2.13, and the block may be over when backward first runs.
        self._blocks.enter_context(parts.functorch_config.patch(force_non_lazy_backward_lowering=True))
        self._blocks.enter_context(parts.config.patch(self.options))
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocks.close()
        if error == (None, None, None) and self._before == self.rules.graphs():
            warnings.warn(
                "nothing was compiled inside this block, so its rules did nothing: torch.compile compiles at the first "
                "call; call the model inside the block, or use torch.compile(model, options=scope.options)",
                stacklevel=2,
            )
