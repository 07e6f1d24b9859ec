"""Compiles a kernel once, and launches it without the work that Triton's JIT does at every call.

A kernel is specialized only on what is given here: dtypes of its pointers and whether they are aligned to 16 bytes, its
compile-time constants, and options. Integers are always 64 bits and never specialized on. A launch then takes the
addresses of the tensors and calls the C function that Triton's own runner ends in, see `runner`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel

from stepgraph.compat import TritonSource, cuda_device_and_stream, triton_compiled

#: Triton's interpreter is on: kernels run on CPU tensors, one program after another.
INTERPRETED: bool = triton.knobs.runtime.interpret

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
}


def kinds_of(tensors: Sequence[torch.Tensor | None], numbers: Sequence[int | float]) -> tuple[str, ...]:
    """Triton's names for the types of arguments; absent tensors are constants."""
    pointers = ("constexpr" if t is None else _POINTERS[t.dtype] for t in tensors)
    return (*pointers, *("fp32" if isinstance(n, float) else "i64" for n in numbers))


def constants_of(constants: dict[str, Any], unaligned: Sequence[int]) -> dict[str, Any]:
    """``constants``; where a tensor begins at no multiple of 16 bytes, rows are read element by element: see `rows`."""
    return constants | {"SHIFT": 1} if unaligned and "SHIFT" in constants else constants


def source_of(
    kernel: Any,
    kinds: Sequence[str],
    unaligned: Sequence[int],
    constants: dict[str, Any],
    *,
    warps: int,
    registers: int | None,
    cooperative: bool,
    dependent: bool = False,
) -> TritonSource:
    """What to compile: ``kernel``, whose leading parameters have ``kinds``; pointers at ``unaligned`` are no multiples
    of 16."""
    names, constants = kernel.arg_names, constants_of(constants, unaligned)
    signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    absent = {name: None for name, kind in zip(names, kinds, strict=False) if kind == "constexpr"}
    pointers = [i for i, kind in enumerate(kinds) if kind.startswith("*")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in pointers if i not in unaligned}
    options: dict[str, Any] = {"num_warps": warps, "launch_cooperative_grid": cooperative, "launch_pdl": dependent}
    if registers is not None:
        options["maxnreg"] = registers
    return TritonSource.of(kernel, signature, constants | absent, attrs, options)


@functools.cache
def _compile_cached(kernel: Any, kinds: Any, unaligned: Any, constants: Any, options: Any, device: int) -> Any:
    return triton_compiled(source_of(kernel, kinds, unaligned, dict(constants), **dict(options)))


#: Launches on a raw stream: addresses of tensors (None: no tensor), then what every launch passes.
Runner = Callable[[int, list[int | None]], None]

_KNOBS = triton.knobs.runtime


def _hooked() -> bool:
    """Whether a profiler has set Triton's launch hooks: a chain with hooks in it, or a function."""
    enter, leave = _KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _launcher(kernel: CompiledKernel, grid: int, rest: tuple[Any, ...]) -> Runner | None:
    """Calls the C function that launches ``kernel``, as Triton does without hooks and scratch memory.

    None for versions of Triton other than 3.6 to 3.9. The function takes the grid and the stream, what `CudaLauncher`
    knows of the kernel, and the arguments: one by one (3.6), or in one sequence with their descriptions (3.7 to 3.9).
    """
    launcher, version = kernel.run, triton.__version__.split(".")[:2]
    if type(launcher) is not CudaLauncher or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if getattr(launcher, "gsan_enabled", False):  # Triton 3.9's race detector, which needs arguments of its own
        return None
    launch, metadata, no_hooks, no_scratch = launcher.launch, kernel.packed_metadata, (None, None, None), (None, None)
    options = (kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    if version == ["3", "6"]:
        fixed = (*options, *no_scratch, metadata, *no_hooks)
        return lambda stream, addresses: launch(grid, 1, 1, stream, *fixed, *addresses, *rest)
    if version in (["3", "7"], ["3", "8"], ["3", "9"]):
        fixed = (*options, metadata, *no_hooks, *no_scratch, launcher.arg_annotations, launcher.kernel_signature)
        return lambda stream, addresses: launch(grid, 1, 1, stream, *fixed, (*addresses, *rest))
    return None


def runner(kernel: CompiledKernel, grid: int, rest: tuple[Any, ...]) -> Runner:
    """``kernel[(grid, 1, 1)]`` for addresses and ``rest``, without what Triton's runner repeats at every call.

    That saves several microseconds. Triton's runner still launches if hooks are set, and for unknown versions.
    """
    public, direct = kernel[(grid, 1, 1)], _launcher(kernel, grid, rest)

    def run(stream: int, addresses: list[int | None]) -> None:
        if direct is None or _hooked():
            public(*addresses, *rest, stream=stream)
        else:
            direct(stream, addresses)

    return run


class Launch:
    """A kernel with everything fixed but the stream and its tensors, whose dtypes are those of the first call.
    ``cooperative``: its programs all run at once. ``dependent``: it may begin before the kernel ahead of it ends, and
    waits for it itself.

    Its leading parameters are the tensors of a call (or None), then ``numbers``.
    """

    def __init__(
        self,
        kernel: Any,
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        grid: int,
        *,
        warps: int,
        registers: int | None = None,
        cooperative: bool = False,
        dependent: bool = False,
    ):
        self.kernel = kernel
        self.numbers = numbers
        self.constants = constants
        self.grid = grid
        self.options = {"warps": warps, "registers": registers, "cooperative": cooperative, "dependent": dependent}
        self._rest = (*numbers, *(None for _ in constants))
        self._runners: dict[tuple[int, ...], Runner] = {}

    def __call__(self, stream: int | None, *tensors: torch.Tensor | None) -> None:
        """Launch on ``stream`` (None: the interpreter)."""
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            if address is not None:
                bits |= address
        unaligned = () if bits & 15 == 0 else tuple(i for i, a in enumerate(addresses) if a is not None and a & 15)
        if INTERPRETED:
            constants = constants_of(self.constants, unaligned)
            self.kernel[(self.grid,)](*tensors, *self.numbers, **constants)
            return
        run = self._runners.get(unaligned)
        if run is None:
            run = self._runners[unaligned] = runner(self._compiled(tensors, unaligned), self.grid, self._rest)
        run(stream, addresses)

    def source(self, tensors: Sequence[torch.Tensor | None], unaligned: Sequence[int]) -> TritonSource:
        """What a launch with ``tensors`` is compiled from; those at ``unaligned`` are no multiples of 16."""
        return source_of(self.kernel, kinds_of(tensors, self.numbers), unaligned, self.constants, **self.options)

    def _compiled(self, tensors: Sequence[torch.Tensor | None], unaligned: tuple[int, ...]) -> CompiledKernel:
        kinds = kinds_of(tensors, self.numbers)
        constants, options = tuple(self.constants.items()), tuple(self.options.items())
        return _compile_cached(self.kernel, kinds, unaligned, constants, options, current_device())


_device, _stream = cuda_device_and_stream()


def current_device() -> int:
    """Index of the CUDA device that launches go to."""
    return _device()


def current_stream(device: torch.device) -> int | None:
    """The raw stream that torch launches on; None under the interpreter."""
    return None if INTERPRETED else _stream(device.index)
