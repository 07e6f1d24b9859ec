"""Copies of results to host memory and back (see `stepgraph.kernels.offload`), as nodes of a graph."""

import torch
from torch import fx

from stepgraph.graph.facts import ours, tensor_bytes
from stepgraph.kernels import offload  # noqa: F401  (registers the operators)

OFFLOAD_BEGIN = ours.offload_begin.default
OFFLOAD_END = ours.offload_end.default
RELOAD_BEGIN = ours.reload_begin.default
RELOAD_END = ours.reload_end.default
STORE_BEGIN = ours.store_begin.default
STORE_END = ours.store_end.default

#: Every operator that copies to the host or back, or waits for it.
COPIES = (OFFLOAD_BEGIN, OFFLOAD_END, RELOAD_BEGIN, RELOAD_END, STORE_BEGIN, STORE_END)


def is_host_copy(node: fx.Node) -> bool:
    """Whether ``node`` copies a result to the host or back, or waits for that."""
    return node.op == "call_function" and node.target in COPIES


def on_host(node: fx.Node) -> bool:
    """Whether the result of ``node`` is in host memory, although the step's device may be simulated."""
    known = (RELOAD_BEGIN, STORE_BEGIN)
    waiting = node.op == "placeholder" and node.users and all(user.target in known for user in node.users)
    return bool(waiting) or node.target is OFFLOAD_END


def device_bytes(node: fx.Node) -> int:
    """Bytes that the result of ``node`` takes on the device."""
    return 0 if on_host(node) else tensor_bytes(node)


def may_stay_on_host(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether ``state`` of an optimizer is worth keeping on the host: dense, and of the shape of its ``parameter``."""
    if not state.ndim or not state.numel() or state.shape != parameter.shape:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(state.shape, state.stride(), strict=True))
    return span == state.numel()
