"""GELU written out as a formula, as in minGPT, BLOOM, and GPT-2 and Phi of transformers, becomes torch's operators.

    0.5 * z * (1 + tanh(0.79788 * (z + 0.044715 * z ** 3)))   ->  gelu(z, approximate="tanh")
    z * 0.5 * (1 + erf(z / sqrt(2)))                          ->  gelu(z)
    and its gradient with ``da``                              ->  gelu_backward(da, z)

People write it in many ways, and autograd derives a different gradient from each. So the pointwise operators around a
``tanh`` or ``erf`` are evaluated in fp64 at many numbers, and match if they equal GELU and its gradient there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import is_cast, is_pointwise, is_pure, packet
from stepgraph.passes.contract import StepGraph

aten = torch.ops.aten

#: GELU and its approximation differ by up to 5e-4; constants of six digits change it by 1e-6.
_TOLERANCE = 5e-5

#: Numbers at which a formula is evaluated: large ones too, where some are clipped (`gelu_10` of transformers).
_LARGE = torch.logspace(1, 4, 32, dtype=torch.float64)
_POINTS = torch.cat([torch.linspace(-8.0, 8.0, 257, dtype=torch.float64), _LARGE, -_LARGE])

_MOST = 64  # operators of a formula or of its gradient


def name_gelus(step: StepGraph, able: Callable[[torch.Tensor], bool]) -> None:
    """Put torch's operators in the place of formulas of GELU, and of their gradients, of tensors that are ``able``."""
    aliases = Aliases(step.graph)
    written = {node for node in step.graph.nodes if aliases.writes.get(aliases.root(node))}
    for node in step.calling(aten.tanh.default, aten.erf.default):
        if node.users:  # those of formulas already named are gone
            _name(node, "none" if node.target is aten.erf.default else "tanh", able, written)


def _name(middle: fx.Node, approximate: str, able: Callable[[torch.Tensor], bool], written: Set[fx.Node]) -> None:
    """Name the GELU around ``middle`` and its gradient, if both are found without nodes whose memory is ``written``,
    which may hold something else where it is read."""
    position = {node: i for i, node in enumerate(middle.graph.nodes) if node not in written}
    z = _POINTS
    da = torch.cos(3.0 * z)
    expected = torch.nn.functional.gelu(z, approximate=approximate)
    gradient = aten.gelu_backward.default(da, z, approximate=approximate)
    for source in (node for node in _narrows(middle, position) if able(node.meta["val"])):
        values = _values([source], position, {source: z})
        outs = [node for node in values if _is(values[node], expected) and _alike(node, source)]
        if middle not in values or not outs:
            continue
        readers = {user for node in values for user in node.users if _of_elements(user, source)} - values.keys()
        others = (
            {n for user in readers for node in user.all_input_nodes for n in _origins(node)} - values.keys() - written
        )
        for grad in sorted((node for node in others if _alike(node, source)), key=position.__getitem__):
            found = _values([*values, grad], position, values | {grad: da})
            ends = [node for node in found if _is(found[node], gradient) and _alike(node, source)]
            if ends:
                for node in outs:
                    _replace(node, aten.gelu.default, source, approximate)
                _replace(max(ends, key=position.__getitem__), aten.gelu_backward.default, grad, source, approximate)
                return


def _narrows(node: fx.Node, position: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """The nodes that all elements of ``node`` come from, each alone, the nearest first."""
    queue, like = {node}, node
    while queue and queue <= position.keys():
        latest = max(queue, key=position.__getitem__)
        queue.remove(latest)
        if not queue and latest is not node:
            yield latest
        if not _of_elements(latest, like):
            return
        queue.update(latest.all_input_nodes)


def _values(
    sources: Sequence[fx.Node], position: Mapping[fx.Node, int], known: dict[fx.Node, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """``known``, the values of ``sources``, with those of pointwise nodes that follow from them alone."""
    values, queue = dict(known), {user for source in sources for user in source.users if user in position}
    while queue and len(values) < len(known) + _MOST:
        node = min(queue, key=position.__getitem__)
        queue.remove(node)
        if node not in values and _of_elements(node, sources[0]) and values.keys() >= set(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = args[0] if is_cast(node) else node.target(*args, **kwargs)
            queue.update(node.users.keys() & position.keys())
    return values


def _of_elements(node: fx.Node, like: fx.Node) -> bool:
    """Whether each element of ``node`` comes from those at its place in tensors of the form of ``like``."""
    if not (is_pointwise(node) and is_pure(node)) or (packet(node) is aten._to_copy and not is_cast(node)):
        return False
    forms = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    return all(
        isinstance(v, torch.Tensor) and v.shape == like.meta["val"].shape and v.is_floating_point() for v in forms
    )


def _alike(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` is a contiguous tensor of the form and dtype of ``source``."""
    value, like = node.meta["val"], source.meta["val"]
    if node is source or not isinstance(value, torch.Tensor) or value.dtype != like.dtype:
        return False
    return value.shape == like.shape and value.is_contiguous() and like.is_contiguous()


def _origins(node: fx.Node) -> Iterator[fx.Node]:
    """``node``, and what it is a cast, a multiple or another function of."""
    yield node
    while _of_elements(node, node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        yield node


def _is(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((value - expected).abs() <= _TOLERANCE * (1 + expected.abs())).all())


def _replace(node: fx.Node, target: Callable, *args: fx.Node | str) -> None:
    *tensors, approximate = args
    node.replace_all_uses_with(Builder(node, before=node)(target, *tensors, approximate=approximate))
    erase_unread(node)
