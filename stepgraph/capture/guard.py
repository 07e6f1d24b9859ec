"""The guard of an update: all conditions of a step in one flag, and restoring state that forward wrote.

The optimizer's writes respect the flag themselves (see `Skip`), so that what they would change keeps every bit. What
forward writes in place, buffers above all, is kept from before the step in inputs of kind ``before``, and written back
at the end of a step that is left out. Nothing of this waits for the host. With no condition the guard adds no node.

Code inside forward states further conditions by `require`. A *ratio* is an fp64 scalar that the graph computes: what
the step needs over what it has. Above 1 the condition is *exceeded* and the step's update is left out. A condition may
be able to *grow*: a function that the host calls with the ratio before it captures and runs the same step again.
Otherwise the step is left out for good.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.capture.inputs import Inputs
from stepgraph.capture.optimizer.rule import Skip
from stepgraph.capture.state import Slot, Wrapping
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import BatchLeaf, ModelTensor

Grow = Callable[[float], None]


class Conditions:
    """What forward stated while a step was traced, by the names of conditions: ratios, and functions that grow."""

    def __init__(self) -> None:
        self.ratios: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.grow: dict[str, Grow] = {}

    def each(self) -> list[tuple[str, torch.Tensor]]:
        """(name, ratio) of everything that was stated."""
        return [(name, ratio) for name, found in self.ratios.items() for ratio in found]

    def combined(self) -> dict[str, torch.Tensor]:
        """One ratio per condition: the highest."""
        return {name: torch.stack(found).amax() for name, found in self.ratios.items()}


_open: list[Conditions] = []


@contextlib.contextmanager
def collected() -> Iterator[Conditions]:
    """The conditions that are stated inside."""
    _open.append(Conditions())
    try:
        yield _open[-1]
    finally:
        _open.pop()


def collecting() -> bool:
    """Whether a trace collects conditions: otherwise code runs eagerly, and nothing would respect them."""
    return bool(_open)


def require(name: str, ratio: torch.Tensor, grow: Grow | None = None) -> None:
    """The update of the step that is being traced is left out where ``ratio``, an fp64 scalar, is above 1.

    ``grow``: called with the highest ratio of all ranks and of all that was stated under ``name``; the step is then
    captured and run again. To be called in forward, while a trace is `collecting`.
    """
    _open[-1].ratios[name].append(ratio.detach())
    if grow is not None:
        _open[-1].grow[name] = grow


Entries = Sequence[tuple[slice, Wrapping | None]]

#: The ratio of a value that is not finite.
_NONFINITE = 2.0


class Guard:
    """The guard of one capture. ``skip_nonfinite``: leave the update out where loss or gradient norm is not finite."""

    def __init__(self, skip_nonfinite: bool):
        self.skip_nonfinite = skip_nonfinite

    def ratios(self, stated: Mapping[str, torch.Tensor], loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Levels after one forward: those ``stated``, and that of its loss."""
        return dict(stated) | ({"nonfinite": _nonfinite(loss)} if self.skip_nonfinite else {})

    def skip(
        self,
        ratios: Mapping[str, torch.Tensor],
        norm: torch.Tensor | None,
        slots: Sequence[Slot],
        stages: dist.ProcessGroup | None = None,
    ) -> tuple[Skip, dict[str, torch.Tensor]]:
        """(whether the update is left out, the ratio of each condition), alike on all ranks of the slots' meshes and
        of a pipeline's ``stages``."""
        ratios = dict(ratios)
        if self.skip_nonfinite:
            ratios["nonfinite"] = torch.maximum(ratios["nonfinite"], _nonfinite(norm))
        if not ratios:
            return Skip(), {}
        values = torch.stack(list(ratios.values()))
        for group in [*_groups(slots), *([stages] if stages is not None else [])]:
            values = compat.all_reduce(values, "max", group)
        return Skip((values > 1).any()), dict(zip(ratios, values.unbind(), strict=True))


def _nonfinite(value: torch.Tensor) -> torch.Tensor:
    return (~torch.isfinite(value)).double() * _NONFINITE


def _groups(slots: Sequence[Slot]) -> list[dist.ProcessGroup]:
    """Process groups to reduce over, one by one, so that all ranks of the meshes of ``slots`` agree."""
    meshes = dict.fromkeys(slot.tensor.device_mesh for slot in slots if hasattr(slot.tensor, "device_mesh"))
    groups = [group for mesh in meshes for group in compat.groups_of(mesh)]
    return [dist.group.WORLD] if dist.group.WORLD in groups else list(dict.fromkeys(groups))


class Kept:
    """The slots of one graph as they were before the step. ``entries``: where each is among the inputs. ``written``:
    the ones that forward writes; None: the ones that the running trace has written by the time of the update."""

    def __init__(self, entries: Entries, inputs: Inputs, written: Sequence[int] | None = None):
        self.entries, self._written = entries, written
        self._places = [inputs.add_before(where) for where, _ in entries]

    def written(self) -> list[int]:
        """The slots that forward wrote."""
        if self._written is not None:
            return list(self._written)
        graph = compat.graph_of_trace()
        writes, nodes = Aliases(graph).writes, graph.find_nodes(op="placeholder")
        return [i for i, (where, _) in enumerate(self.entries) if any(writes.get(node) for node in nodes[where])]

    def restore(self, flat: Sequence[torch.Tensor], written: Iterable[int], skip: Skip) -> None:
        """Write back what the slots ``written`` were before the step, if its update is left out."""
        for i in written:
            where, _ = self.entries[i]
            for now, before in zip(flat[where], flat[self._places[i]], strict=True):
                now.copy_(skip.kept(before, now))


def written_names(step: StepGraph) -> set[str]:
    """The names of the parameters and buffers that the graph of a microbatch writes."""
    writes = Aliases(step.graph).writes
    return {what.path for node, what in step.bound() if isinstance(what, ModelTensor) and writes.get(node)}


def check_repeatable(step: StepGraph) -> None:
    """Raise for a step that may have to be repeated and writes into its own batch."""
    writes = Aliases(step.graph).writes
    if any(writes.get(node) for node in step.placeholders(BatchLeaf)):
        raise CaptureError(
            "the step writes into its batch, and may have to be repeated on it (expert buffers); clone in the model "
            "what it writes"
        )
