"""Triton kernels: seeing launches, what a kernel writes, and what it is compiled from."""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._library.triton import get_triton_kernels_for_op, set_wrap_triton_enabled
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from stepgraph.compat.fake import answer, operator_needing_values
from stepgraph.compat.replaced import replaced


@contextlib.contextmanager
def watch_triton_launches(record: Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], bool]) -> Iterator[None]:
    """Inside, ``record(kernel, grid, args, kwargs)`` sees every launch of a Triton kernel, with its decorators; where
    it returns True nothing is launched. ``torch.library.wrap_triton`` wraps nothing, so that its launches are seen too.
    """
    if "triton" not in sys.modules and not (torch.cuda.is_available() and importlib.util.find_spec("triton")):
        yield
        return

    def watched(run: Callable) -> Callable:
        def recorded(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
            if not warmup and record(kernel, grid, args, kwargs):
                return None
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        return recorded

    with contextlib.ExitStack() as inside:
        for cls, run in {cls: cls.run for cls in _launched_classes()}.items():
            inside.enter_context(replaced(cls, run=watched(run)))
        inside.enter_context(set_wrap_triton_enabled(False))
        yield


def _launched_classes() -> list[type]:
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return [JITFunction, Autotuner, Heuristics, InterpretedFunction]


def _chain(kernel: Any) -> list[Any]:
    """``kernel`` and what its decorators wrap, the kernel proper last."""
    chain = [kernel]
    while hasattr(chain[-1], "arg_names") and hasattr(getattr(chain[-1], "fn", None), "arg_names"):
        chain.append(chain[-1].fn)
    return chain


def triton_kernel_name(kernel: Any) -> str:
    """The name of the function that ``kernel`` was made of."""
    return _chain(kernel)[-1].fn.__name__


def triton_kernel_source(kernel: Any) -> tuple[str, ...]:
    """The text of the function that ``kernel`` was made of, and the settings of its decorators."""
    *decorators, proper = _chain(kernel)
    settings = (repr([str(c) for c in getattr(part, "configs", ())]) for part in decorators)
    return (inspect.getsource(proper.fn), *settings)


def is_triton_operator(operator: torch._ops.OpOverload) -> bool:
    """Whether ``torch.library.triton_op`` made ``operator``: Inductor compiles its kernels into what calls it."""
    return bool(get_triton_kernels_for_op(operator.name().removesuffix(".default")))


def triton_kernel_tunes(kernel: Any) -> bool:
    """Whether ``kernel`` measures several configurations at its first launch."""
    return any(len(getattr(part, "configs", ())) > 1 for part in _chain(kernel))


def triton_writes(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Those of a launch's tensors that the kernel writes, by torch's analysis of its code; None where that needs a GPU
    that is not there, or fails: any may be written."""
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table

    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    leaves = pytree.tree_leaves(values)
    nested = len(tensors) != sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if nested or not torch.cuda.is_available():
        return None
    bound = _bound(kernel, args, kwargs)
    proper = _chain(kernel)[-1]
    if bound is None or set(bound) != set(proper.arg_names):
        return None
    kernel_id = kernel_side_table.add_kernel(proper)
    log = logging.getLogger("torch._dynamo")
    level = log.level
    # Where the analysis fails, torch takes all tensors for written, and warns at length.
    log.setLevel(logging.CRITICAL)
    try:
        with _disable_current_modes():
            names = get_mutated_tensors(kernel_id, kernel_side_table.add_constant_args({}), bound, {})
    finally:
        log.setLevel(level)
    return [bound[name] for name in names]


def _bound(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values of the parameters of the kernel proper, with one configuration; None for an interpreted one, and where
    heuristics look at addresses, which fake tensors have not."""
    *decorators, proper = _chain(kernel)
    if not hasattr(proper, "params"):  # Triton's interpreter
        return None
    given = dict(zip(proper.arg_names, args, strict=False)) | dict(kwargs)
    for part in decorators:
        if getattr(part, "configs", None):
            given = part.configs[0].all_kwargs() | given
        for name, value in getattr(part, "values", {}).items():
            try:
                given[name] = value(given)
            except RuntimeError as error:
                if operator_needing_values(error) is None:
                    raise
                answer(error)
                return None
    defaults = {p.name: p.default for p in proper.params if p.has_default}
    return {name: value for name, value in (defaults | given).items() if name in proper.arg_names}


class TritonSource(NamedTuple):
    """What Triton makes a kernel from, in a form that another process can be sent. ``function``: its module and name;
    the rest as ``triton.compiler.ASTSource`` and ``triton.compile`` take it."""

    function: tuple[str, str]
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, kernel: Any, signature: Any, constants: Any, attributes: Any, options: Any) -> "TritonSource":
        """The source of ``kernel``, a ``JITFunction``."""
        return cls((kernel.fn.__module__, kernel.fn.__name__), signature, constants, attributes, options)


def triton_compiled(source: TritonSource, target: Any = None) -> Any:
    """The compiled kernel, from Triton's cache on disk if it is there. ``target``: a ``GPUTarget``; None: that of the
    current GPU."""
    import triton

    return triton.compile(_ast_source(source), target=target or triton_target(), options=source.options)


def build_triton_launcher(compiled: Any) -> None:
    """Build into Triton's cache what calls ``compiled``, a kernel for an NVIDIA GPU. Triton 3.6 has a C compiler make
    a module of a kernel's own signature, 0.3 s each; later versions have one for all kernels."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)


def triton_cached(source: TritonSource) -> bool:
    """Whether Triton's cache on disk has the kernel for the current GPU, under the key that a launch would use."""
    from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, get_cache_manager, make_backend

    made, backend = _ast_source(source), make_backend(triton_target())
    options = backend.parse_options(source.options | made.parse_options())
    text = get_cache_key(made, backend, options, env_vars=get_cache_invalidating_env_vars())
    name = f"{made.name[:150]}.json"
    return name in (get_cache_manager(hashlib.sha256(text.encode()).hexdigest()).get_group(name) or {})


def _ast_source(source: TritonSource) -> Any:
    from triton.compiler import ASTSource

    module, name = source.function
    kernel = getattr(importlib.import_module(module), name)
    return ASTSource(kernel, source.signature, source.constants, source.attributes)


def triton_environment() -> dict[str, str]:
    """The environment of this process with the ptxas that Triton's keys here have, called first before Inductor makes
    a kernel.

    The version of ptxas is part of every key, and read at the first one. Inductor sets ``TRITON_PTXAS_PATH``, to the
    ptxas of torch's wheel, in its worker processes, and in this one where it compiles or loads a kernel here: else what
    one start has compiled would have another key in the next.
    """
    path = _ptxas_path()
    others = {name: value for name, value in os.environ.items() if name != _PTXAS_PATH}
    return others if path is None else others | {_PTXAS_PATH: path}


_PTXAS_PATH = "TRITON_PTXAS_PATH"


@functools.cache
def _ptxas_path() -> str | None:
    from triton.compiler.compiler import make_backend

    make_backend(triton_target()).hash()  # reads the version for good
    return os.environ.get(_PTXAS_PATH)


def triton_interprets() -> bool:
    """Whether kernels run in Triton's interpreter, which compiles nothing."""
    import triton

    return triton.knobs.runtime.interpret


def triton_target() -> Any:
    """What Triton compiles for on the current GPU: a ``GPUTarget``."""
    from triton.runtime import driver

    return driver.active.get_current_target()


def misalignment(tensor: torch.Tensor) -> int:
    """Bytes past a multiple of 16 at which a fake tensor begins, its storage taken for aligned."""
    return tensor.storage_offset() * tensor.element_size() % 16


def triton_source(kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[TritonSource]:
    """What Triton will compile at the launch ``kernel[grid](*args, **kwargs)``, whose tensors may be fake: nothing if
    this process has done it already. ``kernel`` has no decorators but ``triton.jit``."""
    from triton.runtime.jit import JITFunction, MockTensor

    class Tensor(MockTensor):
        """Represents a tensor: what a launch looks at."""

        def __init__(self, like: torch.Tensor):
            super().__init__(like.dtype)
            self.misalignment = misalignment(like)

        def data_ptr(self) -> int:
            return self.misalignment

    found: list[TritonSource] = []

    def take(
        kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attributes: Any, _: bool
    ) -> None:
        found.append(TritonSource.of(kernel, signature, constants, attributes, dict(vars(options))))

    args, kwargs = pytree.tree_map_only(torch.Tensor, Tensor, (list(args), dict(kwargs)))
    with replaced(JITFunction, _do_compile=take):
        kernel.run(*args, grid=grid, warmup=True, **kwargs)
    return found
