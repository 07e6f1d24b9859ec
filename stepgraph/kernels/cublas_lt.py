"""Times cuBLASLt's algorithms for matrix products and calls them, through the library that torch has loaded.

Source: the reference of cuBLAS 13, section cuBLASLt; the numbers are those of its enumerations.
"""

import contextlib
import ctypes
import functools
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
_P, _SIZE = ctypes.c_void_p, ctypes.c_size_t

_COMPUTE_32F, _CUDA_R_32F = 68, 0
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8  # attributes of a product
_ADD_BIAS = 4  # the epilogue
_MOST_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # attributes of a search
_REFUSALS = (7, 8, 15)  # statuses: a value that is not valid, another architecture, not supported
_SPLITS = 2  # attribute of an algorithm: the number of parts of a sum

_ALGORITHMS = 16  # asked for; cuBLASLt 13 offers 8
_WORKSPACE = 32 << 20  # bytes, as torch has on this generation of GPUs
_ALIGNMENT = 16  # bytes
#: An algorithm must be faster than torch's by this factor, because timings vary by a percent.
_GAIN = 1.02
#: How many of the algorithms are timed more than once.
_LIKELY = 3


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", _SIZE),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class Problem:
    """A product (m, k) @ (k, n) on the GPU ``device``. ``turned``: whether each operand is stored column by column.
    ``strides``: for each operand, elements from one row (or column) to the next. ``biased``: whether a bias (n,) is
    added."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    turned: tuple[bool, bool]
    strides: tuple[int, int]
    biased: bool
    device: int

    @classmethod
    def of(cls, a: Tensor, b: Tensor, bias: Tensor | None) -> "Problem | None":
        """The product of ``a`` and ``b``. None where cuBLASLt's algorithms are not tried: they take 16-bit matrices
        that are not empty and whose rows or columns start at multiples of 16 bytes."""
        if a.dtype not in _TYPES or b.dtype is not a.dtype or not (a.ndim == b.ndim == 2):
            return None
        if bias is not None and (bias.dtype is not a.dtype or bias.shape != b.shape[1:] or bias.stride(0) != 1):
            return None
        turned, strides = [], []
        for x in (a, b):
            (rows, columns), (down, across) = x.shape, x.stride()
            plain = across == 1 and down >= columns
            if not plain and not (down == 1 and across >= rows):
                return None
            turned.append(not plain)
            strides.append(down if plain else across)
        (m, k), n, device = a.shape, b.shape[1], a.device.index or 0
        if not m * k * n or n % 8 or any(stride % 8 for stride in strides):
            return None
        return cls(m, n, k, a.dtype, (turned[0], turned[1]), (strides[0], strides[1]), bias is not None, device)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}{' with bias' * self.biased}"


def by_torch(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product as torch computes it."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


@dataclass(frozen=True)
class Choice:
    """What `choose` found: microseconds by torch and by the fastest algorithm, which ``run(out, a, b, bias)`` calls;
    None if torch's is kept. ``timed``: whether there was memory to time them."""

    torch_us: float
    best_us: float
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None], None] | None
    timed: bool = True


_KEPT = Choice(0.0, 0.0, None, timed=False)
#: By the problem and the settings of torch that decide about its bits.
_CHOICES: dict[tuple[Problem, tuple], Choice] = {}
#: A product's description holds the address of the bias while it is called.
_BIASED = threading.Lock()


def _settings() -> tuple:
    own = torch.backends.cuda.matmul
    reduced = own.allow_bf16_reduced_precision_reduction, own.allow_fp16_reduced_precision_reduction
    return *reduced, own.allow_fp16_accumulation, torch.backends.cuda.preferred_blas_library()


def multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`stepgraph.kernels.products.product` on a GPU."""
    problem = Problem.of(a, b, bias)
    choice = _KEPT if problem is None else _CHOICES.get((problem, _settings()))
    if choice is None:
        assert problem is not None
        choice = _KEPT if torch.cuda.is_current_stream_capturing() else choose(problem)
    tensors = (a, b) if bias is None else (a, b, bias)
    if choice.run is None or any(t.data_ptr() % _ALIGNMENT for t in tensors):
        return by_torch(a, b, bias)
    out = a.new_empty(a.shape[0], b.shape[1])
    choice.run(out, a, b, bias)
    return out


def choose(problem: Problem) -> Choice:
    """The fastest algorithm for ``problem`` that gives torch's bits, found by timing on random operands, once per
    process. Keeps torch's if there is too little memory to time them."""
    if unavailable():
        return _KEPT
    key = problem, _settings()
    if key not in _CHOICES:
        try:
            with torch.cuda.device(problem.device), torch.random.fork_rng(devices=[problem.device]), _unwatched():
                _CHOICES[key] = _timed(problem)
        except torch.OutOfMemoryError:
            _CHOICES[key] = _KEPT
    return _CHOICES[key]


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Inside, torch does not warn that the host waits: it does so to time a product, not at later calls of it."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _timed(problem: Problem) -> Choice:
    a, b, bias = _operands(problem)
    expected = by_torch(a, b, bias)
    out = torch.empty_like(expected)
    runs = []
    for run in _algorithms(problem):
        out.zero_()
        try:
            run(out, a, b, bias)
        except _RefusalError:  # not every algorithm that is offered takes every product
            continue
        if torch.equal(out, expected):
            runs.append(run)
    calls = [lambda: by_torch(a, b, bias), *(functools.partial(run, out, a, b, bias) for run in runs)]
    first = _microseconds(calls, rounds=1, repeats=1)
    likely = [0, *sorted(range(1, len(calls)), key=first.__getitem__)[:_LIKELY]]
    torch_us, *others = _microseconds([calls[i] for i in likely])
    best = min(others, default=torch_us)
    if torch_us < _GAIN * best:
        return Choice(torch_us, torch_us, None)
    return Choice(torch_us, best, runs[likely[1 + others.index(best)] - 1])


def _operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random operands with the shapes and strides of ``problem``."""
    device = torch.device("cuda", problem.device)

    def matrix(rows: int, columns: int, turned: bool, stride: int) -> Tensor:
        lines, length = (columns, rows) if turned else (rows, columns)
        made = torch.randn(lines, stride, dtype=problem.dtype, device=device)[:, :length]
        return made.t() if turned else made

    a = matrix(problem.m, problem.k, problem.turned[0], problem.strides[0])
    b = matrix(problem.k, problem.n, problem.turned[1], problem.strides[1])
    return a, b, torch.randn(problem.n, dtype=problem.dtype, device=device) if problem.biased else None


def _microseconds(calls: list[Callable[[], object]], rounds: int = 5, repeats: int = 2) -> list[float]:
    """The median time of each call. They take turns, so that a change of the GPU's clock affects all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()  # so that the tail of another call is not timed
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            own.append(1e3 * start.elapsed_time(end) / repeats)
    return [statistics.median(own) for own in times]


# cuBLASLt's matrices are column-major: it computes out^T (n, m) = b^T a^T.


@functools.cache
def unavailable() -> str | None:
    """Why cuBLASLt cannot be called in this process, in one line; None where it can."""
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    try:
        _library()
    except OSError as error:
        return f"cuBLASLt cannot be loaded: {error}"
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")


class _RefusalError(RuntimeError):
    """cuBLASLt does not compute this product so."""


def _call(name: str, *args: object) -> None:
    status = getattr(_library(), name)(*args)
    if status:
        raise (_RefusalError if status in _REFUSALS else RuntimeError)(f"{name} of cuBLASLt returned status {status}")


def _made(name: str, *args: object) -> _P:
    made = _P()
    _call(name, ctypes.byref(made), *args)
    return made


def _set(name: str, what: _P, attribute: int, value: ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_uint64 | _P) -> None:
    _call(name, what, ctypes.c_int(attribute), ctypes.byref(value), _SIZE(ctypes.sizeof(value)))


@functools.cache
def _handle(device: int) -> _P:
    with torch.cuda.device(device):
        return _made("cublasLtCreate")


def _algorithms(problem: Problem) -> list[Callable[[Tensor, Tensor, Tensor, Tensor | None], None]]:
    """A function for each algorithm that does not split its sums (split-K)."""
    handle, kind = _handle(problem.device), ctypes.c_int(_TYPES[problem.dtype])
    describe = functools.partial(_set, "cublasLtMatmulDescSetAttribute")
    product = _made("cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_CUDA_R_32F))
    describe(product, _TRANSPOSE_A, ctypes.c_int32(problem.turned[1]))
    describe(product, _TRANSPOSE_B, ctypes.c_int32(problem.turned[0]))
    if problem.biased:
        describe(product, _EPILOGUE, ctypes.c_uint32(_ADD_BIAS))

    def layout(rows: int, columns: int, turned: bool, stride: int) -> _P:
        rows, columns = (rows, columns) if turned else (columns, rows)
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        return _made("cublasLtMatrixLayoutCreate", kind, *sizes)

    left = layout(problem.k, problem.n, problem.turned[1], problem.strides[1])
    right = layout(problem.m, problem.k, problem.turned[0], problem.strides[0])
    result = layout(problem.m, problem.n, False, problem.n)
    search = _made("cublasLtMatmulPreferenceCreate")
    for attribute in _ALIGNMENTS:
        _set("cublasLtMatmulPreferenceSetAttribute", search, attribute, ctypes.c_uint32(_ALIGNMENT))
    _set("cublasLtMatmulPreferenceSetAttribute", search, _MOST_WORKSPACE, ctypes.c_uint64(_WORKSPACE))
    found, count = (_Found * _ALGORITHMS)(), ctypes.c_int()
    layouts = (left, right, result, result)
    asked = (handle, product, *layouts, search, _ALGORITHMS, found, ctypes.byref(count))
    with contextlib.suppress(_RefusalError):  # then none is found
        _call("cublasLtMatmulAlgoGetHeuristic", *asked)
    _call("cublasLtMatmulPreferenceDestroy", search)
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def runner(each: _Found) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], None]:
        def run(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
            space = out.new_empty(each.workspace, dtype=torch.uint8) if each.workspace else None
            with contextlib.nullcontext() if bias is None else _BIASED:
                if bias is not None:
                    describe(product, _BIAS_POINTER, _P(bias.data_ptr()))
                _call(
                    "cublasLtMatmul", handle, product, ctypes.byref(one), _P(b.data_ptr()), left, _P(a.data_ptr()),
                    right, ctypes.byref(zero), _P(out.data_ptr()), result, _P(out.data_ptr()), result,
                    ctypes.byref(each.algorithm), _P(space.data_ptr() if space is not None else 0),
                    _SIZE(each.workspace), _P(torch.cuda.current_stream(problem.device).cuda_stream),
                )  # fmt: skip

        return run

    return [runner(each) for each in found[: count.value] if not each.state and _parts(each) <= 1]


def _parts(each: _Found) -> int:
    """Into how many parts the algorithm splits a sum."""
    value, written = ctypes.c_int32(), _SIZE()
    given = ctypes.byref(each.algorithm), ctypes.c_int(_SPLITS), ctypes.byref(value), _SIZE(4), ctypes.byref(written)
    _call("cublasLtMatmulAlgoConfigGetAttribute", *given)
    return value.value
