"""cuDNN's plans for attention, built while helpers compile.

cuDNN builds a plan at the first call of each form in a thread: 1.3 of the 2.6 seconds of a Qwen3-0.6B's first call on
an H200. Here each form is called once, on uninitialized memory. It does not change the step: the state of generators of
random numbers is restored, and no result is kept. Where memory does not suffice, the step's first call builds the plan.
"""

import contextlib

import torch
from torch import fx

from stepgraph import compat

aten, Tensor = torch.ops.aten, torch.Tensor
_PLANNED = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)


def build_plans(graph: fx.Graph) -> None:
    """Build the plans of all attentions in ``graph``."""
    forms = {}
    for node in graph.nodes:
        if node.target in _PLANNED:
            given = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            forms.setdefault(repr(compat.pytree.tree_map_only(Tensor, _form, given)), (node.target, given))
    for target, given in forms.values():
        device = given[0][0].device
        with torch.random.fork_rng([device]), contextlib.suppress(torch.OutOfMemoryError):
            args, kwargs = compat.pytree.tree_map_only(Tensor, _empty, given)
            target(*args, **kwargs)


def _form(value: Tensor) -> tuple:
    return value.dtype, value.device, tuple(value.shape), value.stride()


def _empty(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
