"""Every private torch import and every difference between torch versions, once.

Supported: torch 2.11 to 2.13. Other rooms import these names from here and nothing that starts with an underscore
from torch itself.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "below_autograd",
    "current_sequence_nr",
    "dispatch_flex_attention",
    "fake_mode",
    "graph_of_trace",
    "inductor_compile",
    "intercept_checkpoint",
    "is_traceable_wrapper_subclass",
    "pytree",
    "rename_node",
    "trace",
    "trace_context",
]

#: What fake tensors raise where a value, not only a shape, would be needed.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def fake_mode() -> FakeTensorMode:
    """A fake mode for capture: static shapes; real tensors met on the way become constants of the graph."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


@contextlib.contextmanager
def trace_context(mode: FakeTensorMode) -> Iterator[None]:
    """What a trace runs under: one tracing context, backward on this thread."""
    with (
        tracing(TracingContext(mode)),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def trace(function: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """``make_fx`` on fake tensors, with the collector of reference cycles off.

    A trace makes objects only to keep them: the collector would walk the growing graph again and again, and cost a
    deep model more per layer than a shallow one.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return make_fx(function, _disable_torch_fn_metadata_mode=True)(*fakes)
    finally:
        if collecting:
            gc.enable()


def graph_of_trace() -> torch.fx.Graph:
    """The graph that the running `trace` writes."""
    return get_proxy_mode().tracer.graph


def current_sequence_nr() -> int:
    """Sequence number of the autograd node created last on this thread."""
    return torch.autograd._get_sequence_nr() - 1


def below_autograd() -> contextlib.AbstractContextManager:
    """Operators called inside skip the autograd dispatch keys: no graph, and about a microsecond less each."""
    return torch._C._AutoDispatchBelowAutograd()


@contextlib.contextmanager
def intercept_checkpoint(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """``torch.utils.checkpoint`` runs its function plainly, between calls of ``enter`` and ``leave``.

    A trace would otherwise record the recomputation itself, and record it wrongly where the function draws random
    numbers: eager restores the generator's state on the host, which no graph node does. Both flavours of checkpoint
    look these two names up in their module when called.
    """

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            leave()

    class Function:
        @staticmethod
        def apply(function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
            enter()
            try:
                return function(*args)
            finally:
                leave()

    names = {"_checkpoint_without_reentrant_generator": generator, "CheckpointFunction": Function}
    saved = {name: getattr(torch_checkpoint, name) for name in names}
    for name, value in names.items():
        setattr(torch_checkpoint, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(torch_checkpoint, name, value)


@contextlib.contextmanager
def dispatch_flex_attention() -> Iterator[None]:
    """``flex_attention`` called in a trace records its higher-order operator.

    Called outside Dynamo it would start Dynamo itself, which refuses to run inside another trace. The module's own
    debug switch calls the operator directly instead.
    """
    import torch.nn.attention.flex_attention as flex

    saved = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = saved


def inductor_compile(
    module: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a flat graph with Inductor, outside Dynamo. ``example_inputs`` may be fake."""
    from torch._inductor import standalone_compile

    return standalone_compile(
        module, list(example_inputs), dynamic_shapes="from_graph", options={"config_patches": options}
    )


def rename_node(node: torch.fx.Node, name: str) -> None:
    """Give ``node`` a name near ``name`` that is free and legal in its graph."""
    node._rename(name)
    node.target = node.name


def _fused_adamw_on_meta(*args: Any, **kwargs: Any) -> None:
    """Shapes of the fused AdamW update: it only writes in place."""


# torch registers shapes for the overload with a number as learning rate only; for the one with a tensor, fake
# tensors would otherwise compute on real zeros of the model's size.
_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_.tensor_lr", "Meta"):
    _LIBRARY.impl("_fused_adamw_.tensor_lr", _fused_adamw_on_meta)
