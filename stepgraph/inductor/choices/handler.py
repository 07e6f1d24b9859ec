"""How rules reach Inductor: a subclass of its choices, installed by each compilation in the thread that compiles.

Inductor caches its choices handler per thread and leaves it out of its cache key, and backward is often compiled in one
of autograd's threads. Neither ``V.set_choices_handler`` nor ``config.inductor_choices_class`` reaches such a thread
once it has compiled anything. A custom graph pass does: it runs in every compilation, before lowering, in the
compiling thread, and Inductor makes it part of the cache key. So the pass `Install` carries the rules. The handler
that it installs stays in its thread, and follows the rules of the compilation that runs, if that has any.
"""

from typing import Any

from torch import fx

from stepgraph import compat
from stepgraph.inductor.choices.column_sums import narrow
from stepgraph.inductor.choices.graph_pass import RulesPass, active
from stepgraph.inductor.choices.nodes import loads_of
from stepgraph.inductor.choices.reduction_tuning import Tuning
from stepgraph.inductor.choices.registers import Tile
from stepgraph.inductor.choices.rules import Rules
from stepgraph.inductor.choices.scheduling import launch_of, register

parts = compat.inductor()


class Install(RulesPass):
    """Makes the running compilation follow its rules, and finish column sums as `column_sums` does."""

    def __init__(self, rules: Rules, then: tuple[Any, ...] = ()) -> None:
        super().__init__(rules, then)
        if rules.tuning:
            register()

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.then:
            other(graph)
        handler = type(parts.V.choices)
        if handler is parts.InductorChoices:
            parts.V.set_choices_handler(Choices())
        elif handler is not Choices:
            raise ValueError(
                f"Inductor's choices already belong to {handler.__name__}: stepgraph.inductor can only extend "
                "InductorChoices itself; unset V.set_choices_handler and config.inductor_choices_class"
            )
        if self.rules.tuning and not self.rules.tuning.tuned:
            narrow(graph)
        self.rules.begin()


class Choices(parts.InductorChoices):
    """Inductor's choices, except where the rules decide."""

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        rules = active()
        return super().can_fuse(scheduler, node1, node2, shared_data_score) and (
            rules is None or rules.can_fuse(scheduler, node1, node2)
        )

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict) -> dict:
        kernel_kwargs = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        rules = active()
        if rules is None:
            return kernel_kwargs
        if kernel_kwargs.get("mix_order_reduction"):
            if rules.guard:
                rules.guard.made.append(frozenset(node.get_name() for node in features.scheduler_nodes()))
        elif rules.tuning and (tile := inner_tile(rules.tuning, features, groups)):
            kernel_kwargs |= {"override_persistent_reduction": True, "fixed_config": launch_of(tile)}
        return kernel_kwargs


def inner_tile(tuning: Tuning, features: Any, groups: list[Any]) -> Tile | None:
    """Tile of whole rows for a kernel that reduces along contiguous rows alone; None leaves it to Inductor."""
    if not features.is_reduction() or not _along_rows(features):
        return None
    if [set(group) for group in groups] != [{"x", "r0_"}] or any(map(features.contains_op, ("scan", "sort"))):
        return None
    if not (features.numel.is_number and features.reduction_numel.is_number):
        return None
    rows, columns = int(features.numel), int(features.reduction_numel)
    return tuning.inner_tile(rows, columns, loads_of(list(features.scheduler_nodes()), rows, columns, 0))


def _along_rows(features: Any) -> bool:
    """Whether a kernel reduces along contiguous rows. Inductor's own hint says so only where all reads and writes of
    its reductions are contiguous: not for a modulated norm, which reads a value per sequence, nor where row statistics
    are padded, as for 1,500 tokens."""
    hint = features.get_reduction_hint()
    if hint != parts.ReductionHint.DEFAULT or features.has_non_contiguous_pw_in_reduction_kernel():
        return hint == parts.ReductionHint.INNER
    reads = [dep for node in features.reduction_nodes() for dep in node.read_writes.reads]
    memory = all(isinstance(dep, parts.MemoryDep) for dep in reads)
    return memory and all(dep.is_contiguous() or dep.stride1_for_last_dim(False) for dep in reads)
