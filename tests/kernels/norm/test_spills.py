"""Every configuration that `select` picks is compiled for sm_90, without a GPU, and must not spill a register.

A call on meta tensors goes through the real backend; what it would launch is compiled instead. A spilled register is
traffic to memory in the inner loop of a kernel whose only virtue is the traffic that it saves.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from stepgraph import compat
from stepgraph.kernels.norm import planned
from stepgraph.kernels.norm.spec import Norm
from stepgraph.kernels.norm.triton import launch, plans
from stepgraph.kernels.norm.triton.config.limits import Hardware
from tests.kernels.norm import backend as triton_norm
from tests.kernels.triton_tools import exchanged_bytes, spills_allowed

H200 = Hardware(132, 228 * 1024 - 4096)
GRID = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 14336, 16384,
        32768, 65536, 131072)  # fmt: skip
ODD = (1, 33, 100, 138, 2880, 50257, 67524, 262144)
#: Rows that CI compiles; `make test-long` compiles all, and more.
NOW = {
    "rms": (1, 138, 2880, 4096, 8192, 16384, 50257, 262144),
    "layer": (33, 16384, 262144),
}
MORE = (1000, 11008, 13824)
ELEMENTS = (1, 1 << 23, 1 << 29)
BF16, FP32 = torch.bfloat16, torch.float32

Compilation = tuple[launch.Launch, tuple[str, ...]]


@contextlib.contextmanager
def recorded_launches() -> Iterator[dict[tuple, Compilation]]:
    """What the backend would launch on an H200, once each, by what it would be compiled from."""
    seen: dict[tuple, Compilation] = {}

    def record(self: launch.Launch, stream: int, *tensors: torch.Tensor | None) -> None:
        kinds = launch.kinds_of(tensors, self.numbers)
        key = (self.kernel.fn.__name__, kinds, *self.constants.items(), *self.options.items())
        seen.setdefault(key, (self, kinds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "first", record)
        patch.setattr(plans, "hardware_of", lambda x: H200)
        patch.setattr(plans, "_empty", lambda *form: torch.empty_strided(*form[:2], dtype=form[2], device="meta"))
        patch.setattr(plans, "current_device", lambda: None)
        patch.setattr(plans, "raw_stream", lambda index: 0)
        patch.setattr(plans, "zeros", lambda device, stream, n: torch.empty(n, dtype=torch.int64, device=device))
        patch.setattr(planned, "PLANS", {})
        yield seen


def both_directions(
    n: int, elements: int, kind: str = "rms", x: torch.dtype = BF16, weight: torch.dtype | None = None,
    residual: bool = False, out: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Forward and backward of a norm of rows of ``n``, on meta tensors."""
    m = max(1, elements // n)
    rows = torch.empty(m, n, dtype=x, device="meta")
    w = torch.empty(n, dtype=weight or x, device="meta")
    bias = w if kind == "layer" else None
    norm = Norm(kind, 1e-6, 0.0, out or x)
    _, h, mean, rstd = triton_norm.forward(norm, rows, w, bias, rows if residual else None, residual)
    h = rows if h is None else h
    triton_norm.backward(norm, rows, h, w, mean, rstd, h if residual else None, x, True, True, bias is not None)


def spilled_bytes(compilation: Compilation, capsys: pytest.CaptureFixture[str]) -> int:
    """What ptxas says of the spills of a kernel."""
    what, kinds = compilation
    capsys.readouterr()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        source = launch.source_of(what.kernel, kinds, (), what.constants, **what.options)
        compiled = compat.triton_compiled(source, GPUTarget("cuda", 90, 32))
    assert not exchanged_bytes(compiled)
    return int(re.search(r"(\d+) bytes spill stores", capsys.readouterr().out).group(1))


def assert_no_spills(seen: dict[tuple, Compilation], capsys: pytest.CaptureFixture[str]) -> None:
    assert seen
    spills = {key: spilled_bytes(compilation, capsys) for key, compilation in seen.items()}
    over = {key: spilled for key, spilled in spills.items() if spilled > spills_allowed()}
    assert not over, "\n".join(f"{spilled} bytes: {key}" for key, spilled in over.items())


def norms():
    for kind, n in itertools.product(("rms", "layer"), (*GRID, *ODD, *MORE)):
        yield pytest.param(kind, n, marks=pytest.mark.slow if n in NOW[kind] else pytest.mark.long)


@pytest.mark.parametrize(("kind", "n"), list(norms()))
def test_grid_does_not_spill(kind, n, capsys):
    with recorded_launches() as seen:
        for elements in ELEMENTS:
            both_directions(n, elements, kind)
    assert_no_spills(seen, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "n", [4096, *(pytest.param(n, marks=pytest.mark.long) for n in (100, 256, 14336, 16384, 65536))]
)
@pytest.mark.parametrize(
    "case",
    [
        {"x": FP32},
        {"weight": FP32},
        {"residual": True},
        {"residual": True, "kind": "layer"},
        {"kind": "layer", "x": FP32},
    ],
    ids=str,
)
def test_other_forms_do_not_spill(case, n, capsys):
    with recorded_launches() as seen:
        both_directions(n, 1 << 28, **case)
    assert_no_spills(seen, capsys)
