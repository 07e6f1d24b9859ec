"""Where rules for Inductor hold: in a ``with`` block, or for one ``torch.compile``."""

import contextlib
import warnings
from typing import Any

from stepgraph import compat
from stepgraph.inductor.choices.fusion_guard import Guard
from stepgraph.inductor.choices.reduction_tuning import Tuning
from stepgraph.inductor.choices.registers import REGISTERS_PER_THREAD
from stepgraph.inductor.choices.rules import Rules


class Scope:
    """Rules for what Inductor compiles: ``with scope: ...``, or ``torch.compile(model, options=scope.options)``.

    Whatever is compiled inside the block follows the rules, forward and backward. Inductor compiles at the first call,
    so call the model inside; its backward is then compiled with its forward, not when it first runs. A block in which
    nothing was compiled warns. What was compiled before keeps its kernels.

    With ``options`` the rules stay with that model, whenever and in whichever thread it is compiled. Blocks nest, and
    ``scope | scope`` combines both sets of rules.
    """

    def __init__(self, rules: Rules, config: dict[str, Any] | None = None) -> None:
        self.rules = rules
        self.config = config or {}
        self._blocks = contextlib.ExitStack()

    def __or__(self, other: "Scope") -> "Scope":
        return Scope(self.rules | other.rules, self.config | other.config)

    @property
    def report(self) -> Guard | None:
        """The guard's report: ``str`` gives readable lines, ``allowed()`` and ``refused()`` its decisions. None without
        a guard."""
        return self.rules.guard

    @property
    def options(self) -> dict[str, Any]:
        """Options for ``torch.compile``; add a mode's with ``torch._inductor.list_mode_options(mode)``."""
        from stepgraph.inductor.choices.graph_pass import installed  # imports Inductor, which takes seconds
        from stepgraph.inductor.choices.handler import Install

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


def fusion_guard(max_registers: int | None = None) -> Scope:
    """Bounds Inductor's fusion of mixed-order reductions by their registers; see `Scope` for where it holds.

    ``with fusion_guard() as guard: ...`` then ``print(guard.report)``.

    ``max_registers``: per thread; None is what the GPU has for a program of the kernel's size, at most 255. Raises
    ``ValueError`` if it is not from 24 to 255.
    """
    if max_registers is not None and not 24 <= max_registers <= REGISTERS_PER_THREAD:
        raise ValueError(
            f"max_registers={max_registers} is not from 24 to {REGISTERS_PER_THREAD}: leave it out for what the GPU has"
        )
    return Scope(Rules(guard=Guard(max_registers)))


def tuned_reductions() -> Scope:
    """Better tiles for norms and their backward under ``torch.compile``; see `Scope` for where it holds."""
    config = {"triton.mix_order_reduction_allow_multi_stages": True, "triton.mix_order_reduction_non_strict_mode": True}
    return Scope(Rules(tuning=Tuning()), config)
