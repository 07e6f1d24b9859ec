"""Keeps communication where the passes put it, through Inductor's scheduling.

Inductor keeps collectives in the graph's order relative to each other. But it moves waits, by other rules in each
version, and does not know that operators of ours communicate: it could move them past others, so that ranks meet in
another order, or too late to overlap. Its search for
the order with the lowest peak memory starts gathers just before their wait, and waits early. Nor does it know that an
operator may read its arguments after it has returned.
"""

from collections.abc import Collection
from typing import Any

from stepgraph import compat

parts = compat.inductor()


class KeepOrder(parts.CustomSchedulerPass):
    """Before fusion: every collective, every wait and every operator of ``also`` is scheduled after the one before it.

    ``lasting``: operators that read their arguments after they return. They keep them alive; here Inductor is kept from
    reusing their memory within the same piece.
    """

    def __init__(self, also: Collection[Any], lasting: Collection[Any]):
        self.also, self.lasting = frozenset(also), frozenset(lasting)

    def __call__(self, nodes: list[Any]) -> list[Any]:
        earlier = None
        for node in nodes:
            if not self._communicates(node):
                continue
            if self._is(node, self.lasting):
                parts.V.graph.never_reuse_buffers.update(dep.name for dep in node.read_writes.reads)
            if earlier is not None:
                own = next(iter(node.get_buffer_names()))
                for name in earlier.get_buffer_names():
                    node.add_fake_dep(parts.WeakDep(name, mutating_buf=own, is_fake=True))
            earlier = node
        self._note_ancestors(nodes)
        return nodes

    @staticmethod
    def _note_ancestors(nodes: list[Any]) -> None:
        """What fusion consults for whether two nodes depend on each other. Inductor's own function runs before nodes of
        several operations (foreach) are made, and raises KeyError after it."""
        ancestors: dict[str, Any] = {}
        for node in nodes:
            found = type(node.ancestors)()
            for dep in node.unmet_dependencies:
                name = node.scheduler.name_to_buf[dep.name].defining_op_name()
                found |= {name, *ancestors[name]}
            node.ancestors = found
            ancestors |= dict.fromkeys(node.get_operation_names(), found)

    def _communicates(self, node: Any) -> bool:
        return self._is(node, self.also) or parts.contains_collective(node) or parts.contains_wait(node)

    @staticmethod
    def _is(node: Any, operators: Collection[Any]) -> bool:
        return isinstance(node.node, parts.FallbackKernel) and node.node.op_overload in operators

    def uuid(self) -> Any:
        return (parts.hash_of_files((__file__,)), *sorted(map(str, self.also)), *sorted(map(str, self.lasting)))


def keep_order(also: Collection[Any], lasting: Collection[Any] = ()) -> dict[str, Any]:
    """Options of Inductor that keep collectives, and operators of ``also``, in order and near their place, and do not
    reuse the memory of the arguments of ``lasting``."""
    return {"reorder_for_peak_memory": False, "_pre_fusion_custom_pass": KeepOrder(also, lasting)}
