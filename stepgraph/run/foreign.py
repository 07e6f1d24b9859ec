"""Operators that are neither torch's nor ours: whether they give what their fake implementations, with which a step was
traced, say. Graphs hold the shapes, dtypes and strides that these said, and compiled kernels read memory by them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.errors import CaptureError
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import provenance

_TORCH = ("aten", "prims", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
_KNOWN = (*_TORCH, "mkldnn", "stepgraph", "stepgraph_autocast")


def foreign_operators(program: StepProgram) -> dict[torch._ops.OpOverload, fx.Node]:
    """The operators of others that ``program`` calls, each with its first node."""
    found: dict[torch._ops.OpOverload, fx.Node] = {}
    for node in (node for step in program.graphs.values() for node in step.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _KNOWN:
            found.setdefault(node.target, node)
    return found


class Checked(compat.TorchDispatchMode):
    """Inside, what ``operators`` give is compared with what their fake implementations say of the same arguments."""

    def __init__(self, operators: Mapping[torch._ops.OpOverload, fx.Node]):
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = args, dict(kwargs or {})
        if func not in self.operators:
            return func(*args, **given[1])
        with compat.FakeTensorMode() as mode:
            fakes, keywords = compat.pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
            said = compat.pytree.tree_leaves(func(*fakes, **keywords))
        made = func(*args, **given[1])
        for real, fake in zip(compat.pytree.tree_leaves(made), said, strict=False):
            if isinstance(real, torch.Tensor) and isinstance(fake, torch.Tensor) and _form(real) != _form(fake):
                where = provenance(self.operators[func])
                raise CaptureError(
                    f"{where.path or 'the model'} ({where.source}) calls {func}, which gives {_form(real)}, and its "
                    f"fake implementation says {_form(fake)}, which the step was captured with: correct its "
                    "register_fake, and try it by torch.library.opcheck"
                )
        return made


def _form(tensor: torch.Tensor) -> str:
    """Dtype, shape, strides of the dimensions above 1, and device, as text."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    strided = f" with strides {strides}" if tensor.numel() else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{strided} on {tensor.device.type}"
