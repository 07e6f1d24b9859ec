"""Tensors that forward makes in its first call and reads in later ones, such as the tables of a rotary embedding.

A trace sees the first call: it makes the table, and keeps it in an attribute or a new buffer of a module. Where the
table follows from constants and from state that the step does not change, it is computed at the capture and put there,
as after one call of the model, and a second trace sees the later calls. That is the captured step if the first call
differs from it in nothing but that it makes the tables: its graph with the tables as constants is the second one.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from stepgraph import compat
from stepgraph.capture.state import Slot
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.facts import is_mutating, is_random, is_view
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph

_REGISTERED = ("_parameters", "_buffers", "_modules")
_MADE = "stepgraph_made_once"


@dataclass(frozen=True)
class Made:
    """A tensor that ``holder``, attributes or buffers of a module, keeps under ``key``. ``value``: what it holds."""

    holder: dict[str, Any]
    key: str
    value: torch.Tensor


@contextlib.contextmanager
def left_made(made: Sequence[Made]) -> Iterator[None]:
    """Inside, what was ``made`` is where forward has left it."""
    before = [(one, one.holder.get(one.key), one.key in one.holder) for one in made]
    put(made)
    try:
        yield
    finally:
        for one, old, was_there in before:
            if was_there:
                one.holder[one.key] = old
            else:
                del one.holder[one.key]


def put(made: Sequence[Made]) -> None:
    """Leave what was ``made`` where forward does, as one call of the model would."""
    for one in made:
        one.holder[one.key] = one.value


def made_once(modules: Iterator[nn.Module], state: Mapping[fx.Node, torch.Tensor], known: set[int]) -> list[Made]:
    """The tensors of the running trace that ``modules`` keep and that no step changes.

    ``state``: parameters and buffers that nothing trains, by placeholder. ``known``: ids of tensors that count as it.
    """
    graph = compat.graph_of_trace()
    nodes, aliases, found = list(graph.nodes), None, []
    for module in modules:
        own = vars(module)
        for holder in (own, module._buffers, *(v for k, v in own.items() if type(v) is dict and k not in _REGISTERED)):
            for key, kept in holder.items():
                if not isinstance(kept, torch.Tensor) or not compat.is_fake(kept) or id(kept) in known:
                    continue
                node = compat.node_of_trace(kept)
                aliases = aliases or Aliases(graph)
                history = None if node is None else _history(node, aliases, nodes, state)
                if history is not None:
                    value = _computed(node, sorted(history, key=aliases.position.__getitem__), state)
                    node.meta[_MADE] = value
                    found.append(Made(holder, key, value))
    put(found)
    return found


def _history(
    wanted: fx.Node, aliases: Aliases, nodes: Sequence[fx.Node], state: Mapping[fx.Node, torch.Tensor]
) -> set[fx.Node] | None:
    """The nodes that lead to ``wanted``; None if its value may differ in later steps, or is written after it."""
    if any(at > aliases.position[wanted] for at in aliases.writes.get(aliases.root(wanted), ())):
        return None
    found, pending = set(), [wanted]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        of_state = _is_real(state.get(node)) and not aliases.writes.get(aliases.root(node))
        if node.op == "placeholder" and not of_state:
            return None
        if node.op == "get_attr" and not _is_real(getattr(compat.constants_of_trace(), node.target)):
            return None
        if node.op == "call_function" and (not isinstance(node.target, torch._ops.OpOverload) or is_random(node)):
            return None
        found.add(node)
        written = [nodes[at] for at in aliases.writes.get(aliases.root(node), ())]
        pending += [
            *node.all_input_nodes,
            *(one for one in written if aliases.position[one] < aliases.position[wanted]),
        ]
    return found


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not compat.is_fake(value) and not value.is_meta


def _computed(wanted: fx.Node, history: Sequence[fx.Node], state: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
    values, constants = dict[fx.Node, Any](), compat.constants_of_trace()
    with compat.without_modes(), torch.no_grad():
        for node in history:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            else:
                values[node] = state[node] if node in state else getattr(constants, node.target)
        return values[wanted]


def refuse_made(made: Sequence[Made]) -> None:
    """Raise if later calls differ from the first in more than what it ``made``."""
    for one in made:
        raise CaptureError(
            f"forward keeps a tensor in {one.key}, and its next call differs; a captured step would repeat the first; "
            "call the model once before capture, or keep the tensor in a buffer with a first value"
        )


def is_first_call(first: StepProgram, later: StepProgram, made: Sequence[Made], buffers: Sequence[Slot]) -> bool:
    """Whether ``first`` equals ``later`` except that it makes the values ``made``, which ``later`` reads, also from
    ``buffers``."""
    if first.graphs.keys() != later.graphs.keys() or first.schedule != later.schedule:
        return False
    places: dict[Any, int] = {id(one.value): i for i, one in enumerate(made)}
    places |= {slot.what(): places[id(slot.tensor)] for slot in buffers if id(slot.tensor) in places}
    return all(_form(first.graphs[name], places) == _form(later.graphs[name], places) for name in first.graphs)


def _form(step: StepGraph, places: Mapping[Any, int]) -> list:
    """The nodes that the results and writes of ``step`` need, in a comparable form. Values that are made once are named
    by their index."""
    names: dict[fx.Node, Any] = {}
    for node, what in step.bound():
        names[node] = ("made", places[what]) if what in places else ("input", str(what))
    constants: list[_Constant] = []
    for node in step.graph.nodes:
        held = node.meta.get(_MADE, getattr(step.module, node.target) if node.op == "get_attr" else None)
        if id(held) in places:
            names[node] = "made", places[id(held)]
    form: list[Any] = [list(map(str, step.outputs))]
    live = _live(step.graph, names)
    for node in step.graph.nodes:
        if node in names or node not in live:
            continue
        if is_view(node) and _spec(node.meta["val"]) == _spec(node.args[0].meta["val"]):  # a slice of all
            names[node] = names[node.args[0]]
            continue
        if node.op == "get_attr":
            names[node] = "constant", len(constants)
            constants.append(_Constant(getattr(step.module, node.target)))
            continue
        names[node] = "node", len(form)
        arguments = compat.pytree.tree_map_only(fx.Node, names.__getitem__, (node.args, dict(node.kwargs)))
        results = [_spec(value) for value in compat.pytree.tree_leaves(node.meta.get("val"))]
        form.append((node.op, str(node.target), repr(arguments), results))
    return [*form, *constants]


def _live(graph: fx.Graph, known: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """The nodes that the graph's results, its writes into inputs and its random numbers come from; not what leads to
    ``known`` ones."""
    aliases, writers = Aliases(graph), {}
    for node in graph.nodes:
        for written in written_arguments(node) if is_mutating(node) else ():
            writers.setdefault(aliases.root(written), []).append(node)
    live: set[fx.Node] = set()
    acts = [node for node in graph.nodes if is_random(node) or (node.is_impure() and not is_mutating(node))]
    pending = [graph.output_node(), *acts]
    pending += [node for root, nodes in writers.items() if root.op != "call_function" for node in nodes]
    while pending:
        if (node := pending.pop()) not in live:
            live.add(node)
            if node not in known:
                pending += [*node.all_input_nodes, *writers.get(aliases.root(node), ())]
    return live


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.device
    return repr(value)


@dataclass(eq=False)
class _Constant:
    """What a ``get_attr`` node reads: equal to one of the same content."""

    value: Any

    def __eq__(self, other: object) -> bool:
        mine, theirs = self.value, getattr(other, "value", None)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine is not theirs:
            return _spec(mine) == _spec(theirs) and _is_real(mine) and torch.equal(mine, theirs)
        return mine is theirs or (isinstance(mine, fx.GraphModule) and str(mine.graph) == str(theirs.graph))
