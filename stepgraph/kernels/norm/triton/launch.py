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
    """What to compile: ``kernel``, whose leading parameters have ``kinds``; pointers at ``unaligned`` are not multiples
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


#: Addresses of a launch's tensors; None: no tensor.
Addresses = tuple[int | None, ...]

#: Launches on a raw stream: addresses of tensors, then what every launch passes.
Runner = Callable[[int, Addresses], None]

_KNOBS = triton.knobs.runtime


def _direct(kernel: CompiledKernel) -> tuple[Callable[..., None], tuple[Any, ...], bool] | None:
    """The C function that launches ``kernel``, as Triton does without hooks and scratch memory.

    It takes the grid and the stream, what `CudaLauncher` knows of the kernel (returned next), and the arguments: one by
    one (Triton 3.6), or in one tuple (3.7 to 3.9; returned last). None for other versions.
    """
    launcher, version = kernel.run, triton.__version__.split(".")[:2]
    if type(launcher) is not CudaLauncher or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if getattr(launcher, "gsan_enabled", False):  # Triton 3.9's race detector, which needs arguments of its own
        return None
    metadata, no_hooks, no_scratch = kernel.packed_metadata, (None, None, None), (None, None)
    options = (kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    if version == ["3", "6"]:
        return launcher.launch, (*options, *no_scratch, metadata, *no_hooks), False
    if version in (["3", "7"], ["3", "8"], ["3", "9"]):
        described = (launcher.arg_annotations, launcher.kernel_signature)
        return launcher.launch, (*options, metadata, *no_hooks, *no_scratch, *described), True
    return None


def runner(kernel: CompiledKernel, grid: int, rest: tuple[Any, ...]) -> Runner:
    """``kernel[(grid, 1, 1)]`` for addresses and ``rest``, without what Triton's runner repeats at every call.

    That saves several microseconds. Triton's runner still launches for unknown versions, and if a profiler has set
    hooks: chains with hooks in them, or functions.
    """
    public, direct = kernel[(grid, 1, 1)], _direct(kernel)
    if direct is None:
        return lambda stream, addresses: public(*addresses, *rest, stream=stream)
    launch, known, in_one = direct

    def run(stream: int, addresses: Addresses) -> None:
        enter, leave = _KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            public(*addresses, *rest, stream=stream)
        elif in_one:
            launch(grid, 1, 1, stream, *known, addresses + rest)
        else:  # tuples are added: some forty arguments one by one take half as long again
            launch(*((grid, 1, 1, stream) + known + addresses + rest))

    return run


@functools.cache
def _reader(given: tuple[bool, ...]) -> Callable[[dict[int, Runner], Runner], Callable[..., None]]:
    """Makes a function of a stream and tensors, of which the ``given`` are not None, out of runners by the low four
    bits of all addresses, and a runner for other bits.

    Its code names each tensor, because a loop over them takes twice as long.
    """
    names = ", ".join(f"t{i}" for i in range(len(given)))
    bits = " | ".join(f"(a{i} := t{i}.data_ptr())" for i, here in enumerate(given) if here)
    addresses = "".join(f"a{i}, " if here else "None, " for i, here in enumerate(given))
    return eval(f"lambda run, other: lambda stream, {names}: run.get(({bits}) & 15, other)(stream, ({addresses}))")


class Launch:
    """A kernel with everything fixed but the stream and its tensors: which are None, and the dtypes of the others, are
    as in the first call. ``cooperative``: its programs all run at once. ``dependent``: it may begin before the kernel
    ahead of it ends, and waits for it itself.

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
        #: Launches on a stream (None: the interpreter) with tensors.
        self.start: Callable[..., None] = self._interpret if INTERPRETED else self.first

    def _interpret(self, stream: None, *tensors: torch.Tensor | None) -> None:
        unaligned = tuple(i for i, t in enumerate(tensors) if t is not None and t.data_ptr() & 15)
        self.kernel[(self.grid,)](*tensors, *self.numbers, **constants_of(self.constants, unaligned))

    def first(self, stream: int, *tensors: torch.Tensor | None) -> None:
        """Launch for the first time; compiles."""
        kinds = kinds_of(tensors, self.numbers)
        rest = (*self.numbers, *(None for _ in self.constants))
        runners: dict[tuple[int, ...], Runner] = {}
        aligned: dict[int, Runner] = {}

        def other(stream: int, addresses: Addresses) -> None:
            unaligned = tuple(i for i, address in enumerate(addresses) if address is not None and address & 15)
            run = runners.get(unaligned)
            if run is None:
                run = runners[unaligned] = runner(self._compiled(kinds, unaligned), self.grid, rest)
                if not unaligned:
                    aligned[0] = run
            run(stream, addresses)

        self.start = _reader(tuple(tensor is not None for tensor in tensors))(aligned, other)
        self.start(stream, *tensors)

    def source(self, tensors: Sequence[torch.Tensor | None], unaligned: Sequence[int]) -> TritonSource:
        """What a launch with ``tensors`` is compiled from; those at ``unaligned`` are not multiples of 16."""
        return source_of(self.kernel, kinds_of(tensors, self.numbers), unaligned, self.constants, **self.options)

    def _compiled(self, kinds: tuple[str, ...], unaligned: tuple[int, ...]) -> CompiledKernel:
        constants, options = tuple(self.constants.items()), tuple(self.options.items())
        return _compile_cached(self.kernel, kinds, unaligned, constants, options, current_device())


#: The index of the CUDA device that launches go to, and the raw stream of a device's index that torch launches on.
current_device, raw_stream = cuda_device_and_stream()
