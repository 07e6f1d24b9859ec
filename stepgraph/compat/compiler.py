"""Inductor: compiling a flat graph, its options and cache, and the parts of it that `stepgraph.inductor` extends."""

import contextlib
import copy
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stepgraph.compat.cpp_kernels import kernels_together
from stepgraph.compat.replaced import replaced
from stepgraph.compat.versions import TORCH
from stepgraph.compat.writes import writes_in_order
from stepgraph.errors import first_line

#: Views, where Inductor can make one, whose schemas do not say so.
_VIEWS = (torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
#: Whether Inductor draws random numbers in the graph's order; 2.11 and 2.12 call random operators in any order.
INDUCTOR_DRAWS_IN_ORDER = TORCH >= (2, 13)


def inductor_compile(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    options: dict[str, Any],
    mode: FakeTensorMode | None = None,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a flat graph with Inductor, without Dynamo. ``example_inputs`` may be fake; where sizes among them are
    symbolic, ``mode`` is the fake mode that knows their symbols.

    The result takes its arguments in a list and empties it, so that each tensor can be freed after its last use.
    Raises ``ValueError`` if a C++ compiler is needed and there is none.
    """
    from torch._inductor import config, graph, ir, lowering, standalone_compile
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    # From 2.14 on torch takes the graph's own fake mode; capture's has no ShapeEnv, without which Inductor's cache on
    # disk is bypassed. 2.11 to 2.13 take a new mode with one, as here, or that of symbolic sizes.
    mode = mode or FakeTensorMode(shape_env=ShapeEnv())
    own_mode = {"_resolve_fake_mode": lambda *_: mode} if TORCH >= (2, 14) else {}
    # Its cache knows operators by name alone, and would call those of another version with arguments that are gone.
    operators = {n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    schemas = sorted(str(o._schema) for o in operators if o.namespace not in ("aten", "prims"))
    # Nor does it know what is replaced here: code from before `_write_once` would be taken for today's.
    replaced_here = _write_once.__name__, writes_in_order.__name__
    tag = "; ".join([torch.compiler.config.cache_key_tag, *replaced_here, *schemas])
    try:
        # The function hides its module, which has the same name.
        with (
            kernels_together(),
            writes_in_order(),
            torch.compiler.config.patch(cache_key_tag=tag),
            replaced(sys.modules["torch._inductor.standalone_compile"], **own_mode),
            replaced(graph, get_layout_constraint_tag=functools.partial(_layout, graph.get_layout_constraint_tag)),
            replaced(lowering, mutate_to=functools.partial(_mutate, lowering.mutate_to)),
            replaced(
                ir.StorageBox,
                should_realize_on_reuse=functools.partialmethod(_write_once, ir.StorageBox.should_realize_on_reuse),
            ),
            _fewer_instructions_tried(),
        ):
            artifact = standalone_compile(
                module, list(example_inputs), dynamic_shapes="from_graph", options={"config_patches": options}
            )
    except InductorError as failure:
        if not isinstance(failure.inner_exception, InvalidCxxCompiler):
            raise
        tried = " and ".join(name for name in config.cpp.cxx if name)
        raise ValueError(
            f"Inductor finds no C++ compiler (it tried {tried}): install one, g++ for example, or turn Inductor off, "
            "by --inductor off or passes='exact'"
        ) from None
    # The function that takes a list is wrapped twice: to take arguments one by one, and to keep Dynamo out.
    function = artifact._compiled_fn.__wrapped__.__wrapped__
    kept = copy.copy(artifact)
    kept._compiled_fn = None  # else each would keep the other
    setattr(function, _ARTIFACT, kept)
    return function


def _layout(tag_of: Callable[..., Any], operator: torch._ops.OpOverload, *, with_default: bool = True) -> Any:
    """The layout of arguments of an operator that Inductor has no code for, as torch's ``tag_of`` says, but contiguous
    for torch's own that ask for none: kernels of backward may misread another. Inductor knows that (pytorch #140452)
    of graphs that are backward alone, and a captured step is one graph."""
    tag = tag_of(operator, with_default=with_default)
    free = tag == torch.Tag.flexible_layout and tag not in operator.tags and not operator._schema.is_mutable
    return torch.Tag.needs_contiguous_strides if free else tag


def _mutate(mutate_to: Callable[..., Any], changed: Any, value: Any, **kwargs: Any) -> Any:
    """Inductor's lowering of writes in place, where ``value`` may be a view that reads what changes: of
    ``x[1:] = x[:-1].clone()`` torch (2.11 to 2.15) makes one loop that reads elements that it has written."""
    from torch._inductor import ir

    is_view = isinstance(value, ir.TensorBox) and isinstance(value.data, ir.BaseView)
    if is_view:
        changed.realize()
    if is_view and changed.get_name() in value.get_read_names():
        value = ir.ExternKernel.copy_input(value)
    return mutate_to(changed, value, **kwargs)


def _write_once(box: Any, should_write: Callable[..., bool], users: int, **kwargs: Any) -> bool:
    """Whether Inductor writes the result ``box`` of the current node to memory, as its own ``should_write`` says, or
    because several operators that it has no code for read it: for each that reads a view, torch (2.11 to 2.15) would
    compute the result again and write another copy."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    computed = isinstance(box.data, (ir.Pointwise, ir.Reduction))
    node = getattr(V.graph, "current_node", None)
    written = computed and isinstance(node, torch.fx.Node) and sum(map(_is_foreign, _readers(node))) > 1
    return written or should_write(box, users, **kwargs)


def _is_foreign(node: torch.fx.Node) -> bool:
    from torch._inductor.lowering import fallbacks, lowerings

    has_code = node.target in lowerings and node.target not in fallbacks  # as `lower_as_buffer` gives it
    return getattr(node.target, "namespace", "aten") not in ("aten", "prims") and not has_code


def _readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes that read ``node`` or a view of it."""
    for user in node.users:
        if getattr(user.target, "is_view", False) or user.target in _VIEWS:
            yield from _readers(user)
        else:
            yield user


def _fewer_instructions_tried() -> contextlib.AbstractContextManager[None]:
    from torch._inductor import cpu_vec_isa

    all_of = cpu_vec_isa.valid_vec_isa_list
    return replaced(cpu_vec_isa, valid_vec_isa_list=functools.partial(_vector_instructions, all_of))


def _vector_instructions(all_of: Callable[[], list[Any]]) -> list[Any]:
    """The vector instructions to compile for on a CPU, best first; ``all_of``: torch's ``valid_vec_isa_list``. torch
    compiles and loads programs to learn all that the C++ compiler has, 10 on a CPU with AMX (14 processor-seconds; 2.11
    imports torch in each). Unless a setting names one it takes the first, and here the others are not tried."""
    from torch._inductor import config

    named = config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
    return all_of() if named or all_of.cache_info().currsize else _best_vector_instructions(all_of)


@functools.cache
def _best_vector_instructions(all_of: Callable[[], list[Any]]) -> list[Any]:
    from torch._inductor import cpu_vec_isa

    for one in cpu_vec_isa.supported_vec_isa_list:
        with replaced(cpu_vec_isa, supported_vec_isa_list=[one]):
            if found := all_of.__wrapped__():  # without keeping it for torch.compile
                return found
    return []


@functools.cache
def lower_as_buffer(concat: torch._ops.OpOverload) -> None:
    """Let Inductor compile ``concat(parts, dim)`` to a buffer into which the parts are written. For ``torch.cat`` it
    takes one kernel instead that computes all parts for each element."""
    from torch._inductor import ir, lowering

    @lowering.register_lowering(concat, type_promotion_kind=None)
    def lowered(parts: list[Any], dim: int) -> Any:
        return ir.TensorBox(ir.ConcatKernel.create(parts, dim))


def import_inductor() -> None:
    """What `inductor_compile` imports and reads at its first piece, which takes seconds."""
    from torch._inductor import compile_fx, standalone_compile  # noqa: F401
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    inductor()
    torch_key()  # a hash of torch's files, and of Triton's
    if HAS_TRITON:
        triton_key()


def inductor_source(function: Callable[[list[Any]], Sequence[Any]]) -> str:
    """The code that Inductor generated for a function of `inductor_compile` or `inductor_load`; empty for another."""
    return getattr(function, "source_code", None) or ""


#: Where a function that `inductor_compile` made has what torch can save of it. Some of torch's cannot be hashed.
_ARTIFACT = "_stepgraph_artifact"


def inductor_artifact(function: Callable[[list[Any]], Sequence[Any]]) -> bytes:
    """What `inductor_compile` made, in torch's own format (``CompiledArtifact.save``). Raises ``ValueError`` if torch
    cannot save it."""
    if not hasattr(function, _ARTIFACT):
        raise ValueError("a compiled piece came from elsewhere")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "piece")
        try:
            getattr(function, _ARTIFACT).save(path=file, format="binary")
        except (RuntimeError, AssertionError, NotImplementedError) as failure:
            raise ValueError(f"torch cannot save a compiled piece: {first_line(failure)[:160]}") from None
        with open(file, "rb") as stream:
            return stream.read()


def inductor_load(data: bytes) -> Callable[[list[Any]], Sequence[Any]]:
    """The function of an `inductor_artifact`, as `inductor_compile` gave it. It unpickles and runs what ``data`` holds:
    the caller answers for where that comes from."""
    from torch._inductor.standalone_compile import CompiledArtifact

    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "piece")
        with open(file, "wb") as stream:
            stream.write(data)
        with kernels_together(), _fewer_instructions_tried():
            artifact = CompiledArtifact.load(path=file, format="binary")
    (cell,) = artifact._compiled_fn.__closure__  # takes arguments one by one; inside is what takes a list
    return cell.cell_contents


_workers_started = False


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles Triton kernels. They take some seconds to start; until then it
    compiles kernels one after another in this process."""
    global _workers_started
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()
    _workers_started = True


def await_compile_workers(limit_s: int = 30) -> None:
    """Wait for the processes of `start_compile_workers`, if they were started, at most ``limit_s`` seconds. What is
    left of their start is shorter than compiling kernels one after another."""
    if not _workers_started:
        return
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() > 1:
        with contextlib.suppress(TimeoutError):  # then this process compiles them
            AsyncCompile.wait_pool_ready(timeout=limit_s)


def fork_compile_workers(count: int) -> None:
    """Let ``count`` forks of this process compile its Triton kernels, from now on: there at once, unlike the processes
    of `start_compile_workers`, but not for a process that runs threads or has a context of its GPU."""
    from torch._inductor import async_compile, config

    config.compile_threads, config.worker_start_method = count, "fork"
    async_compile.AsyncCompile.wait_pool_ready()


def end_forked_workers() -> None:
    """Kill the processes of `fork_compile_workers`, which would outlive this one by a minute."""
    from torch._inductor import async_compile

    for pool in async_compile._pool_set:
        for process in list(pool._processes.values()):
            process.kill()


def end_compile_workers() -> None:
    """End the processes in which Inductor compiles, whatever they do; torch would wait for them at the end of this
    process. The next compilation starts others."""
    global _workers_started
    from torch._inductor import async_compile

    for pool in async_compile._pool_set:
        if isinstance(pool, async_compile.SubprocPool):
            pool.running = False  # its thread that reads takes their end for what it is
            pool.process.kill()
    async_compile.after_fork()  # forgets them
    _workers_started = False


def compile_threads() -> int:
    """How many processes Inductor may use to compile, as its settings say."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads()


def triton_cache(device: int) -> str:
    """The folder where Triton keeps what it compiled, for the GPU ``device``: as Inductor sets it for this process when
    it makes its first kernel, from now on."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device))


def inductor_options() -> set[str]:
    """Names of the options that `inductor_compile` takes."""
    from torch import _inductor

    return set(_inductor.list_options())


def inductor_settings() -> tuple[Any, ...]:
    """What decides, in addition to a graph and its options, what Inductor makes of it."""
    from torch._inductor import config

    return config.get_hash(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()


def inductor_workers() -> dict[str, Any]:
    """The settings that do not change what Inductor generates: which processes compile its kernels."""
    from torch._inductor import config

    return {name: getattr(config, name) for name in ("compile_threads", "worker_start_method")}


def take_inductor_settings(settings: tuple[Any, ...], workers: dict[str, Any]) -> bool:
    """Apply another process's `inductor_settings` as far as possible, and return whether they are then the same here.
    ``workers``: the `inductor_workers` of that process."""
    from torch._inductor import config

    _, deterministic, precision = settings
    torch.use_deterministic_algorithms(deterministic)
    if torch.get_float32_matmul_precision() != precision:  # to set it again is another key
        torch.set_float32_matmul_precision(precision)
    with config.patch(workers):
        return inductor_settings() == settings


def inductor_has_cached() -> bool:
    """Whether Inductor's cache on disk holds any graph."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return os.path.exists(os.path.join(cache_dir(), "fxgraph"))


def inductor_cache_counts() -> tuple[int, int]:
    """(hits, misses) of Inductor's graph cache on disk in this process so far."""
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
        # torch 2.13 has a separate class for passes over the scheduler's nodes.
        CustomSchedulerPass=vars(custom_graph_pass).get("CustomSchedulerPass", custom_graph_pass.CustomGraphPass),
        hash_of_files=custom_graph_pass.get_hash_for_files,
        MixOrderReduction=scheduler.MixOrderReduction,
        FusedMixOrderReductions=scheduler.FusedMixOrderReductions,
        FallbackKernel=ir.FallbackKernel,
        contains_collective=utils.contains_collective,
        contains_wait=utils.contains_wait,
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
    """The passes that Inductor's option ``post_grad_custom_pre_pass`` holds: in torch 2.13 there may be several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def keep_saved_tensors() -> contextlib.AbstractContextManager:
    """Inside, torch.compile keeps what forward saved, so that backward may run again (``retain_graph``)."""
    from torch._functorch import config

    return config.patch(donated_buffer=False)
