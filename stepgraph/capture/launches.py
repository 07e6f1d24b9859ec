"""Records launches of Triton kernels by the model itself, which torch's dispatcher does not see, as nodes."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stepgraph import compat
from stepgraph.errors import CaptureError
from stepgraph.graph.launch import traced_launch


def recorded_launches(wrote: Callable[[Sequence[torch.Tensor]], None]) -> contextlib.AbstractContextManager[None]:
    """Inside a trace, a launch on its tensors becomes a node and runs nothing; one on real tensors runs as it is.

    ``wrote`` receives the tensors that a recorded launch may write.
    """

    def record(kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        leaves = compat.pytree.tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            if compat.is_fake(getattr(leaf, "base", None)):
                raise CaptureError(
                    f"the Triton kernel {compat.triton_kernel_name(kernel)} is launched on a {type(leaf).__name__}, "
                    "which a captured step cannot make again; make the launch an operator by torch.library.custom_op"
                )
        for tensor in given:
            if compat.is_traceable_wrapper_subclass(tensor):
                raise CaptureError(
                    f"the Triton kernel {compat.triton_kernel_name(kernel)} is launched on a {type(tensor).__name__}; "
                    "give it plain tensors, such as x.to_local()"
                )
        if not any(map(compat.is_fake, given)):
            return False
        if not compat.is_tracing():  # inside an operator, which is recorded as one
            return True
        launch, tensors = traced_launch(kernel, grid, args, kwargs)
        compat.record_call(launch, tensors)
        wrote([tensors[i] for i in launch.writes])
        return True

    return compat.watch_triton_launches(record)
