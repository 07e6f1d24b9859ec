"""Every private torch import and every difference between torch versions, once.

Supported: torch 2.11 to 2.13. Other rooms read these names as ``compat.NAME``, and import nothing from torch itself
that starts with an underscore.
"""

from torch.utils import _pytree as pytree

from stepgraph.compat.compiler import (
    inductor,
    inductor_cache_counts,
    inductor_compile,
    inductor_mixed_config,
    inductor_options,
    inductor_passes,
    keep_saved_tensors,
    start_compile_workers,
)
from stepgraph.compat.distributed import (
    all_reduce,
    flight_records,
    group_name,
    groups_of,
    init_fake_world,
    name_group,
    process_group,
    symmetric_memory,
)
from stepgraph.compat.eager import (
    below_autograd,
    cuda_device_and_stream,
    empty_strided,
    in_function_transform,
    in_plain_eager,
)
from stepgraph.compat.fake import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    compute_elementwise_output_strides,
    is_fake,
    is_traceable_wrapper_subclass,
    operator_needing_values,
    storage_key,
    transformers_sees_values,
    without_modes,
)
from stepgraph.compat.optimizer import has_step_hooks, mark_stepped
from stepgraph.compat.tracing import (
    constant_of_trace,
    current_sequence_nr,
    dispatch_flex_attention,
    graph_of_trace,
    intercept_checkpoint,
    node_of_trace,
    rename_node,
    trace,
    trace_context,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "all_reduce",
    "below_autograd",
    "compute_elementwise_output_strides",
    "constant_of_trace",
    "cuda_device_and_stream",
    "current_sequence_nr",
    "dispatch_flex_attention",
    "empty_strided",
    "flight_records",
    "graph_of_trace",
    "group_name",
    "groups_of",
    "has_step_hooks",
    "in_function_transform",
    "in_plain_eager",
    "inductor",
    "inductor_cache_counts",
    "inductor_compile",
    "inductor_mixed_config",
    "inductor_options",
    "inductor_passes",
    "init_fake_world",
    "intercept_checkpoint",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "keep_saved_tensors",
    "mark_stepped",
    "name_group",
    "node_of_trace",
    "operator_needing_values",
    "process_group",
    "pytree",
    "rename_node",
    "start_compile_workers",
    "storage_key",
    "symmetric_memory",
    "trace",
    "trace_context",
    "transformers_sees_values",
    "without_modes",
]
