"""Every private torch import and every difference between torch versions, once.

Supported: torch 2.11 to 2.15. Other rooms read these names as ``compat.NAME``, and import nothing from torch itself
that starts with an underscore. A comment next to each version difference names the versions that it concerns.
"""

# isort: off
from stepgraph.compat.versions import TORCH  # first: it says in one line what an older torch would fail on

# isort: on
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from stepgraph.compat.compiler import (
    await_compile_workers,
    compile_threads,
    end_compile_workers,
    end_forked_workers,
    fork_compile_workers,
    import_inductor,
    inductor,
    inductor_artifact,
    inductor_cache_counts,
    inductor_compile,
    inductor_has_cached,
    inductor_load,
    inductor_mixed_config,
    inductor_options,
    inductor_passes,
    inductor_settings,
    inductor_source,
    inductor_workers,
    keep_saved_tensors,
    lower_as_buffer,
    start_compile_workers,
    take_inductor_settings,
    triton_cache,
)
from stepgraph.compat.distributed import (
    all_gather,
    all_reduce,
    all_to_all,
    begin_all_to_all,
    flight_records,
    group_name,
    groups_of,
    init_fake_world,
    name_group,
    process_group,
    record_nccl_unregistered,
    reduce_scatter,
    register_work,
    several_gloo_threads,
    single_gloo_thread,
    symmetric_memory,
    with_local,
)
from stepgraph.compat.eager import (
    assert_all,
    autocast_dtype,
    below_autograd,
    cuda_device_and_stream,
    empty_strided,
    flushes_denormal,
    has_autocast_rule,
    in_function_transform,
    in_plain_eager,
    kept_settings,
    open_around,
    outside_function_modes,
    scaled_grouped_mm,
    scaled_mm,
    settings,
    watch_autocast,
)
from stepgraph.compat.fake import (
    DataDependentOutputException,
    answer,
    attributes_set,
    checks_of_known_values,
    class_in_eager,
    detached,
    empty_fake,
    facts_of_fake_tensors,
    failed_reads,
    fake_of,
    fake_storage,
    fake_tensor,
    gpu_context_once,
    is_answered,
    lists_of_fake_tensors,
    literal_of,
    negative_view,
    operator_needing_values,
    refuse_data_pointers,
    represent,
    storage_key,
    transformers_sees_values,
    truth,
    without_modes,
)
from stepgraph.compat.lengths import SymbolicSizes, at_hint, for_open_sizes, is_open, keep_mode, open_sizes, shape_env
from stepgraph.compat.memory import dump_memory, record_memory
from stepgraph.compat.modules import conversions_of_modules, has_gradient_hooks, hooks_of_every_module, tracks_modules
from stepgraph.compat.optimizer import (
    accelerated_inside,
    has_step_hooks,
    mark_stepped,
    muon_rate,
    muon_replaced,
    orthogonalized,
    step_replaced,
)
from stepgraph.compat.pipelining import pipeline_order
from stepgraph.compat.repeated import DispatchMode, RepeatedCalls, Repeating
from stepgraph.compat.replaced import for_this_thread, one_thread, replaced, replaced_functions
from stepgraph.compat.tracing import (
    Again,
    as_accumulated,
    attention_as_in_eager,
    collector_off,
    constants_of_trace,
    current_sequence_nr,
    dispatch_flex_attention,
    erase_after,
    flex_kernel_options,
    generate_code,
    graph_of_trace,
    inline_compiled,
    input_of_trace,
    intercept_checkpoint,
    is_tracing,
    latest_of_trace,
    lazy_graph_module,
    leaf_of,
    names_of_copies,
    node_of_trace,
    record_call,
    rename_exactly,
    rename_node,
    same_in_trace,
    trace,
    trace_context,
    uncompiled_path,
    watched_backward,
)
from stepgraph.compat.triton import (
    TritonSource,
    build_triton_launcher,
    is_triton_operator,
    misalignment,
    triton_cached,
    triton_compiled,
    triton_environment,
    triton_interprets,
    triton_kernel_name,
    triton_kernel_source,
    triton_kernel_tunes,
    triton_source,
    triton_target,
    triton_writes,
    watch_triton_launches,
)
