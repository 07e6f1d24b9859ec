"""Causal masks that a model keeps in buffers, such as ``register_buffer("mask", torch.tril(torch.ones(T, T)))``.

Where a buffer holds one value on and below its diagonal and another one above, the graph makes it of these two instead
of reading it: passes then see that attention is causal, and kernels load no mask. `Watch` looks at such a buffer again
once it is written in place, and the step is captured again if it is no longer the same triangle. ``buffer.data`` can be
written without a trace, so the graph also compares the two, and raises where they differ. Not in exact steps.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from stepgraph.capture.batch import has_values
from stepgraph.capture.checks import storages
from stepgraph.capture.guard import written_names
from stepgraph.capture.state import Slot, triangle_of
from stepgraph.graph.edit import Builder
from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import Buffer

aten = torch.ops.aten


def write_out_triangles(program: StepProgram, slots: Sequence[Slot]) -> None:
    """Make the triangles that ``slots`` hold in the graphs of ``program``, but the ones that share memory or that the
    step writes; note in the slots that they are known."""
    written = set().union(*map(written_names, program.graphs.values()))
    shared = Counter(where for slot in slots if has_values(slot.tensor) for where in storages([slot.tensor]))
    held = {slot.name: slot for slot in slots if not slot.is_parameter and slot.name not in written}
    for step in program.graphs.values():
        for node, what in step.bound():
            slot = held.get(what.path) if isinstance(what, Buffer) and node.users else None
            if slot is None or not has_values(slot.tensor) or shared[storages([slot.tensor])[0]] > 1:
                continue
            slot.triangle = triangle_of(slot.tensor)
            if slot.triangle is not None:
                slot.version = slot.tensor._version
                made = _made(node, *slot.triangle)
                node.replace_all_uses_with(made)
                _compare(node, made, slot.name)


def _made(node: fx.Node, low: float, high: float) -> fx.Node:
    """What the placeholder ``node`` holds, made where it is first read."""
    value, readers = node.meta["val"], list(node.users)
    first = next(n for n in node.graph.nodes if n in node.users)
    build, on = Builder(*readers[:1], before=first), {"device": value.device, "pin_memory": False}
    places = build(aten.arange.default, value.shape[-1], **on)
    rows = build(aten.unsqueeze.default, places, 1)
    if not isinstance(low, bool):
        numbers = [build(aten.scalar_tensor.default, number, dtype=value.dtype, **on) for number in (low, high)]
        triangle = build(aten.where.self, build(aten.ge.Tensor, rows, places), *numbers)
    else:
        triangle = build(aten.ge.Tensor if low else aten.lt.Tensor, rows, places)
    return build.view(triangle, value.shape)


def _compare(node: fx.Node, made: fx.Node, name: str) -> None:
    build = Builder(made, after=made)
    same = build(aten.all.default, build(aten.eq.Tensor, node, made))
    message = f"the buffer {name} was changed by .data, which a captured step does not see: change it in place"
    build(aten._assert_async.msg, same, message)
