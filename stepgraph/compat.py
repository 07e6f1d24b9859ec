"""Every private torch import and every difference between torch versions, once.

Supported: torch 2.11 to 2.13. Other rooms import these names from here and nothing that starts with an underscore
from torch itself.
"""

import contextlib
import functools
import gc
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._guards import TracingContext, tracing
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_fake,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "all_reduce",
    "below_autograd",
    "compute_elementwise_output_strides",
    "constant_of_trace",
    "current_sequence_nr",
    "dispatch_flex_attention",
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

#: What fake tensors raise where a value, not only a shape, would be needed.
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def operator_needing_values(error: Exception) -> str | None:
    """Name of the operator that failed because fake tensors have no values; None if ``error`` is something else."""
    if isinstance(error, _DATA_DEPENDENT):
        return str(getattr(error, "func", "a data-dependent operator"))
    for name, message in ((".numpy()", ".numpy() is not supported"), (".data_ptr()", "Cannot access data pointer")):
        if isinstance(error, RuntimeError) and message in str(error):
            return name
    return None


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


def node_of_trace(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node of the running `trace` that gave ``tensor``; None for a tensor that it did not see."""
    slot = get_proxy_slot(tensor, get_proxy_mode().tracer, None)
    return None if slot is None else slot.proxy.node


def constant_of_trace(name: str) -> Any:
    """What a ``get_attr`` node of the running `trace` reads."""
    return getattr(get_proxy_mode().tracer.root, name)


def without_modes() -> contextlib.AbstractContextManager:
    """Operators called inside are neither traced nor faked."""
    return _disable_current_modes()


@contextlib.contextmanager
def transformers_sees_values(known: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Hugging Face transformers, where it is loaded, asks values of a fake tensor whose values are ``known``.

    It asks none of a fake tensor otherwise: attention is then given a mask that says no more than "causal", and keys
    repeated for every query head.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(module, "is_fake_tensor", None)
    if is_fake_tensor is None:
        yield
        return
    module.is_fake_tensor = lambda x: is_fake_tensor(x) and not known(x)
    try:
        yield
    finally:
        module.is_fake_tensor = is_fake_tensor


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two living tensors exactly if they share storage, also for fake tensors."""
    return tensor.untyped_storage()._cdata


def current_sequence_nr() -> int:
    """Sequence number of the autograd node created last on this thread."""
    return torch.autograd._get_sequence_nr() - 1


def below_autograd() -> contextlib.AbstractContextManager:
    """Operators called inside skip the autograd dispatch keys: no graph, and about a microsecond less each."""
    return torch._C._AutoDispatchBelowAutograd()


def empty_strided(device_type: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """What Inductor's generated code allocates with: (size, stride, dtype) on the current device of ``device_type``.

    A quarter of the time of `torch.empty`, and no dispatcher: plain eager only.
    """
    return {"cpu": torch._C._dynamo.guards._empty_strided_cpu, "cuda": torch._C._dynamo.guards._empty_strided_cuda}[
        device_type
    ]


def cuda_device_and_stream() -> tuple[Callable[[], int], Callable[[int], int]]:
    """Index of the current CUDA device, and the raw current stream of a device: of a process that has a CUDA tensor.

    `torch.cuda` asks at every call whether CUDA has been initialized. Torch without CUDA does not have the two.
    """
    if not torch.backends.cuda.is_built():
        return torch.cuda.current_device, lambda index: torch.cuda.current_stream(index).cuda_stream
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream


def in_function_transform() -> bool:
    """A transform of ``torch.func`` (vmap, grad) is active in eager. Under the compiler it is the compiler's affair."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transforms = torch._C._are_functorch_transforms_active


def in_plain_eager() -> bool:
    """Nothing watches operators: no compiler, dispatch mode or function transform (vmap, grad) is active."""
    return not (_is_compiling() or _dispatch_modes() or _function_transforms())


@contextlib.contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Names of a module of torch have other values while inside."""
    saved = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(saved)


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
            # The re-entrant flavour has no backward unless one of its own arguments needs one.
            needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
            enter()
            try:
                with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
                    return function(*args)
            finally:
                leave()

    with _replaced(torch_checkpoint, _checkpoint_without_reentrant_generator=generator, CheckpointFunction=Function):
        yield


@contextlib.contextmanager
def dispatch_flex_attention() -> Iterator[None]:
    """``flex_attention`` called in a trace records its higher-order operator.

    Called outside Dynamo it would start Dynamo itself, which refuses to run inside another trace. The module's own
    debug switch calls the operator directly instead. Its front end refuses a backward on the CPU, which the operator
    itself can do: with dense attention, so that a model for GPUs can be captured, and tried, on a CPU.
    """
    import torch.nn.attention.flex_attention as flex

    with _replaced(flex, _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True, _validate_device=lambda *_: None):
        yield


def inductor_compile(
    module: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor], options: dict[str, Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a flat graph with Inductor, outside Dynamo. ``example_inputs`` may be fake.

    The result takes its arguments in a list and empties it, so that each tensor can be freed after its last use.
    Raises ``ValueError`` where a C++ compiler is needed and there is none.
    """
    from torch._inductor import config, standalone_compile
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    try:
        artifact = standalone_compile(
            module, list(example_inputs), dynamic_shapes="from_graph", options={"config_patches": options}
        )
    except InductorError as failure:
        if not isinstance(failure.inner_exception, InvalidCxxCompiler):
            raise
        tried = " and ".join(name for name in config.cpp.cxx if name)
        raise ValueError(
            f"Inductor finds no C++ compiler (it tried {tried}): install one, g++ for example, or do without Inductor, "
            "by --inductor off or passes='exact'"
        ) from None
    # Around the function that takes a list lie one that takes arguments one by one and one that keeps Dynamo out.
    return artifact._compiled_fn.__wrapped__.__wrapped__


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles Triton kernels. Until they are ready, after some seconds, it
    compiles kernels one after another itself."""
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def inductor_options() -> set[str]:
    """Names of the options that `inductor_compile` takes."""
    from torch import _inductor

    return set(_inductor.list_options())


def inductor_cache_counts() -> tuple[int, int]:
    """(graphs that Inductor's cache on disk served in this process so far, those it had to compile)."""
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    return counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]


@functools.cache
def inductor() -> SimpleNamespace:
    """The parts of Inductor that `stepgraph.inductor` extends. Imported on demand: they take seconds."""
    from torch._functorch import config as functorch_config
    from torch._inductor import choices, config, custom_graph_pass, ir, scheduler, utils
    from torch._inductor.codegen import common, cuda_combined_scheduling, triton
    from torch._inductor.dependencies import MemoryDep, WeakDep
    from torch._inductor.runtime import hints, runtime_utils
    from torch._inductor.virtualized import V

    return SimpleNamespace(
        config=config,
        functorch_config=functorch_config,
        InductorChoices=choices.InductorChoices,
        CustomGraphPass=custom_graph_pass.CustomGraphPass,
        # torch 2.13 has a class of its own for passes over the scheduler's nodes.
        CustomSchedulerPass=vars(custom_graph_pass).get("CustomSchedulerPass", custom_graph_pass.CustomGraphPass),
        hash_of_files=custom_graph_pass.get_hash_for_files,
        MixOrderReduction=scheduler.MixOrderReduction,
        FusedMixOrderReductions=scheduler.FusedMixOrderReductions,
        FallbackKernel=ir.FallbackKernel,
        contains_collective=utils.contains_collective,
        MemoryDep=MemoryDep,
        WeakDep=WeakDep,
        ReductionHint=hints.ReductionHint,
        DeviceProperties=hints.DeviceProperties,
        last_power_of_2=runtime_utils.last_power_of_2,
        next_power_of_2=runtime_utils.next_power_of_2,
        common=common,
        CUDACombinedScheduling=cuda_combined_scheduling.CUDACombinedScheduling,
        TritonKernel=triton.TritonKernel,
        TritonScheduling=triton.TritonScheduling,
        FixedTritonConfig=triton.FixedTritonConfig,
        V=V,
    )


def inductor_mixed_config(rows: int, columns: int, split: int, device: torch.device) -> Any:
    """Inductor's own ``triton.Config`` (XBLOCK, num_warps, NUM_STAGES) of a mixed-order reduction over (rows, columns)
    of which each program takes ``split`` rows."""
    from torch._inductor.runtime import triton_heuristics

    parts = inductor()
    return triton_heuristics.persistent_reduction(
        {"x": parts.next_power_of_2(rows), "r0_": parts.next_power_of_2(columns)},
        reduction_hint=parts.ReductionHint.INNER,
        triton_meta={"device": parts.DeviceProperties.create(device)},
        inductor_meta={
            "RSPLIT_SIZE": split,
            "mix_order_reduction_allow_multi_stages": parts.config.triton.mix_order_reduction_allow_multi_stages,
        },
        return_configs=True,
    )[0]


def inductor_passes(value: Any) -> tuple[Callable[[torch.fx.Graph], None], ...]:
    """The passes in a value of Inductor's ``post_grad_custom_pre_pass``: torch 2.13 also takes several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def keep_saved_tensors() -> contextlib.AbstractContextManager:
    """What torch.compile compiles inside may run backward again (``retain_graph``): it keeps what forward saved."""
    from torch._functorch import config

    return config.patch(donated_buffer=False)


def all_reduce(tensor: torch.Tensor, op: str, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """``tensor`` reduced by ``op`` (``sum``, ``max``) over ``group``, as a new tensor; in a trace, as two nodes."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, op, group.group_name))


def groups_of(mesh: torch.distributed.DeviceMesh) -> list[torch.distributed.ProcessGroup]:
    """Process groups to reduce over, one after the other, for a sum over all ranks of ``mesh``."""
    if mesh.size() == torch.distributed.get_world_size():
        return [torch.distributed.group.WORLD]
    return mesh.get_all_groups()


def flight_records(device_type: str) -> list[dict[str, Any]]:
    """The collectives that this process issued lately, oldest first: NCCL's for ``cuda``, else gloo's.

    Of each: ``process_group`` (name, description), ``profiling_name``, ``input_sizes``, ``time_created_ns`` (since the
    epoch), ``retired`` (it is over) and ``state``, which NCCL keeps up to date (``completed``) and gloo does not. Those
    that a CUDA graph replays are not among them.
    """
    recorder = torch._C._distributed_c10d
    dump = recorder._dump_nccl_trace if device_type == "cuda" else recorder._dump_fr_trace
    return pickle.loads(dump(True, False, False)).get("entries", [])  # bytes that torch has just written


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group that a graph's nodes call ``name``."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


#: The names that `name_group` gave, and the groups' own.
_OWN_NAMES: dict[str, str] = {}


def name_group(group: torch.distributed.ProcessGroup, name: str) -> str:
    """Call ``group`` ``name`` too, and return it: torch's own names differ from rank to rank. Where another group that
    is still open has the name, it is ``name.1``, and so on: the same on all ranks if they name groups in one order."""
    registry = torch._C._distributed_c10d
    for alias in itertools.chain([name], (f"{name}.{i}" for i in itertools.count(1))):
        try:
            held = registry._resolve_process_group(alias)
        except RuntimeError:  # never given, or to a group that is gone
            held = None
        if held not in torch.distributed.distributed_c10d._world.pg_names:  # destroyed, if it still is
            registry._unregister_process_group(alias)
            registry._register_process_group(alias, group)
            held = group
        if held == group:
            _OWN_NAMES[alias] = group.group_name
            return alias


def group_name(name: str) -> str:
    """What torch calls the process group that a graph's nodes call ``name``."""
    return _OWN_NAMES.get(name, name)


def symmetric_memory(nbytes: int, group_name: str, device: torch.device) -> tuple[torch.Tensor, Any]:
    """``nbytes`` on every rank of the group that all its ranks can write, and who knows where they are and has flags,
    all zero. NVLink multicast is off.

    All ranks call it together, and not while a CUDA graph is recorded. Raises ``RuntimeError`` where a rank cannot
    reach another's memory.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when memory is allocated
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("symmetric memory cannot be made while a CUDA graph is recorded: run the step once before")
    memory = torch._C._distributed_c10d._SymmetricMemory
    tensor = memory.empty_strided_p2p((nbytes,), [1], torch.uint8, device, group_name)
    return tensor, memory.rendezvous(tensor)


def init_fake_world(rank: int, world: int) -> None:
    """A default process group of ``world`` ranks of which only ``rank`` is there: collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user hooked code to ``optimizer.step``."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's learning rate schedulers that the optimizer has stepped; they warn otherwise."""
    optimizer._opt_called = True


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
