"""Finds which of our Triton kernels the operators of a graph will launch, to compile them ahead.

Triton compiles a kernel at its first launch, one after another, half a second to three seconds each. So while Inductor
compiles, another process compiles ours (`stepgraph.passes.compile.ahead`). What to compile is not described a second
time: an operator's own code is called on fake tensors, and its launches are recorded instead of made.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from stepgraph import compat

Function = TypeVar("Function", bound=Callable)

#: By the name of an operator of ``torch.ops.stepgraph``: the code that launches its kernels on CUDA tensors.
LAUNCHING: dict[str, Callable] = {}


def launching(operator: str) -> Callable[[Function], Function]:
    """Marks the code that launches the kernels of ``operator``, which takes the operator's arguments. It must run on
    fake tensors too: addresses, values and the stream are not there to be read."""

    def mark(function: Function) -> Function:
        LAUNCHING[operator] = function
        return function

    return mark


def sources_of(
    operator: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> list[compat.TritonSource]:
    """What Triton will compile when ``operator`` is called with such arguments (fake CUDA tensors, of one fake mode).

    Addresses are taken for multiples of 16 bytes except for a tensor's storage offset.
    """
    from stepgraph.kernels.norm.ahead import recorded_norms

    found: list[compat.TritonSource] = []

    def record(kernel: Any, grid: Any, given: Sequence[Any], named: Mapping[str, Any]) -> bool:
        found.extend(compat.triton_source(kernel, grid, given, named))
        return True

    tensors = [leaf for leaf in compat.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with tensors[0].fake_mode, compat.watch_triton_launches(record), recorded_norms(found.append):
        LAUNCHING[operator](*args, **(kwargs or {}))
    return list({repr(source): source for source in found}.values())
