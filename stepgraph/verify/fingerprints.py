"""Fingerprints of the tensors that operators give, in eager and in a graph run node by node."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.facts import leaves_rest
from stepgraph.run.interpreter import Interpreter

#: Shape, dtype, and a sum over the content's bytes.
Fingerprint = tuple[tuple[int, ...], torch.dtype, int]

#: Elements that are read at once: they are widened to 8 bytes each.
_CHUNK = 1 << 22

#: Memory without values.
_UNSET = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """A number that differs, but for one chance in 2^64 or so, where one bit of ``tensor`` does."""
    total = 0
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel():
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        flat = flat.view(_INTEGERS[flat.element_size()])
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].long()
            places = torch.arange(start, start + part.numel(), device=part.device)
            mixed = (part + 0x632BE59BD9B4E019) * (2 * places + 1)
            total = (total * 31 + int((mixed ^ (mixed >> 29)).sum())) % (1 << 64)
    return tuple(tensor.shape), tensor.dtype, total


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_values(target: Any) -> bool:
    """Whether what an operator gives is set when it returns: not by ``empty``, nor by a collective before its wait."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    namespace, name = target._schema.name.split("::")
    return name not in _UNSET and (not namespace.startswith("_c10d_functional") or name == "wait_tensor")


class EagerResults(compat.TorchDispatchMode):
    """While active, ``seen`` collects the fingerprints of what every operator gives, and of what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Fingerprint] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, torch.Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor: its local operators come next
        result = func(*args, **dict(kwargs or {}))
        if has_values(func):
            self.seen.update(fingerprint(t) for t in _tensors(result) if not compat.is_fake(t))
        return result


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in compat.pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class NodeResults(Interpreter):
    """Runs a graph node by node; ``found``: each node with the fingerprints of its results, in order."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.found: list[tuple[fx.Node, list[Fingerprint]]] = []

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        result = super()._run(node, env)
        if has_values(node.target) and not leaves_rest(node):
            self.found.append((node, [fingerprint(t) for t in _tensors(result)]))
        return result
