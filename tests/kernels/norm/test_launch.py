"""Launching past Triton's runner does what the runner does. No GPU: the C function that launches is replaced."""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

from stepgraph.compat import empty_strided, triton_compiled
from stepgraph.kernels import layer_norm, rms_norm
from stepgraph.kernels.norm import operators, planned
from stepgraph.kernels.norm.triton import launch, plans, single
from stepgraph.kernels.norm.triton.config.limits import Hardware
from stepgraph.kernels.norm.triton.partials import add_slots_kernel

KINDS = ("*fp32", "*bf16", "constexpr", "i64", "i64", "i64")
CONSTANTS = {"PLANES": 1, "ROWS": 16, "WIDTH": 32, "DEPENDENT": True}
ADDRESSES, REST, STREAM = (4096, 8192, None), (100, 512, 512, None, None, None, None), 7


class Driver:
    """What a compiled kernel asks the driver for before its first launch."""

    utils = SimpleNamespace(
        load_binary=lambda *binary: ("module", 11, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
    )

    @staticmethod
    def allocate_default_profile_scratch(*sizes: int) -> int:  # asked from Triton 3.8 on
        raise RuntimeError("no allocator was set")

    def __init__(self, launcher_cls: Any):
        self.launcher_cls = launcher_cls

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Calls(list):
    """What the C function got at each launch. It calls hooks, which all versions take as four arguments in a row."""

    def __call__(self, *arguments: Any) -> None:
        self.append(arguments)


@contextlib.contextmanager
def kernel_on(calls: Calls, launcher_cls: type = CudaLauncher, **changed: Any) -> Iterator[Any]:
    """A kernel compiled for sm_90, whose launcher calls ``calls``."""

    def make(source: Any, metadata: Any) -> Any:
        made = object.__new__(launcher_cls)
        described = {"arg_annotations": ["annotations"], "kernel_signature": b"signature"}
        sizes = {f"{name}_scratch_{of}": 0 for name in ("global", "profile") for of in ("size", "align")}
        flags = {"num_ctas": 1, "launch_cooperative_grid": True, "launch_pdl": False, "gsan_enabled": False}
        vars(made).update(described | sizes | flags | {"launch": calls} | changed)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", Driver(make))
        options = {"warps": 4, "registers": None, "cooperative": True}
        source = launch.source_of(add_slots_kernel, KINDS, (), CONSTANTS, **options)
        yield triton_compiled(source, GPUTarget("cuda", 90, 32))


def without_hooks(arguments: tuple) -> tuple:
    """Empty chains of hooks do nothing: as if there were none, and no metadata for them."""
    knobs = triton.knobs.runtime
    idle = (knobs.launch_enter_hook, knobs.launch_exit_hook)
    return tuple(None if a in idle or isinstance(a, triton.compiler.LazyDict) else a for a in arguments)


def known() -> bool:
    return triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))


def test_launcher_gets_exactly_what_the_public_runner_passes():
    calls = Calls()
    with kernel_on(calls) as kernel:
        kernel[(5, 1, 1)](*ADDRESSES, *REST, stream=STREAM)
        launch.runner(kernel, 5, REST)(STREAM, ADDRESSES)
    public, ours = calls
    assert ours == without_hooks(public)
    assert (ours != public) == known()


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("replaced", [False, True], ids=["added", "replaced"])
def test_hooks_set_at_any_time_are_called(hook, replaced, monkeypatch):
    calls, runtime = Calls(), triton.knobs.runtime

    def profiler(metadata: Any) -> None:
        raise AssertionError("only the C function calls hooks")

    with kernel_on(calls) as kernel:
        run = launch.runner(kernel, 5, REST)
        run(STREAM, ADDRESSES)
        if replaced:
            monkeypatch.setattr(runtime, hook, profiler)
        else:
            monkeypatch.setattr(getattr(runtime, hook), "calls", [profiler])
        run(STREAM, ADDRESSES)
        metadata = next(a for a in calls[1] if isinstance(a, triton.compiler.LazyDict))
        assert getattr(runtime, hook) in calls[1] and metadata.data["stream"] == STREAM
        monkeypatch.undo()
        run(STREAM, ADDRESSES)
    assert calls[2] == calls[0]


def test_addresses_are_read_at_every_launch_and_each_alignment_has_a_kernel(monkeypatch):
    started, compiled = [], []
    monkeypatch.setattr(launch, "_compile_cached", lambda kernel, kinds, unaligned, *rest: compiled.append(unaligned))
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "runner", lambda kernel, grid, rest: lambda *call: started.append(call))
    made = launch.Launch(add_slots_kernel, (100, 512, 512), CONSTANTS, 5, warps=4)
    memory = torch.zeros(64)
    for i, j in ((0, 8), (4, 8), (1, 8), (2, 8), (0, 9), (1, 9), (1, 9), (0, 0)):
        a, b = memory[i:], memory[j:]
        made.start(STREAM, a, None, b)
        assert started[-1] == (STREAM, (a.data_ptr(), None, b.data_ptr()))
    assert compiled == [(), (0,), (2,), (0, 2)]


def test_hooks_that_were_removed_are_not_looked_for(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)
    with kernel_on(calls) as kernel:
        launch.runner(kernel, 5, REST)(STREAM, ADDRESSES)
    assert len(calls) == 1 and not any(isinstance(a, triton.compiler.LazyDict) for a in calls[0])


class OtherLauncher(CudaLauncher):
    pass


@pytest.mark.parametrize("case", ["another version", "another launcher", "scratch memory"])
def test_public_runner_launches_what_is_not_known(case, monkeypatch):
    calls = Calls()
    if case == "another version":
        monkeypatch.setattr(triton, "__version__", "3.99.0")
    launcher_cls = OtherLauncher if case == "another launcher" else CudaLauncher
    changed = {"profile_scratch_size": 64} if case == "scratch memory" else {}
    with kernel_on(calls, launcher_cls, **changed) as kernel:
        if changed:
            with pytest.raises(RuntimeError, match="no allocator was set"):
                launch.runner(kernel, 5, REST)(STREAM, ADDRESSES)
            return
        kernel[(5, 1, 1)](*ADDRESSES, *REST, stream=STREAM)
        launch.runner(kernel, 5, REST)(STREAM, ADDRESSES)
    assert len(calls) == 2 and len(calls[0]) == len(calls[1])
    assert without_hooks(calls[0]) == without_hooks(calls[1]) != calls[1]


@pytest.fixture
def no_gpu(monkeypatch):
    """Norms of CPU tensors go through the CUDA backend, up to the C function that launches."""
    started: list[tuple] = []
    monkeypatch.setattr(planned, "PLANS", {})
    monkeypatch.setattr(plans, "hardware_of", lambda x: Hardware(132, 227 * 1024))
    monkeypatch.setattr(plans, "current_device", lambda: None)
    monkeypatch.setattr(plans, "raw_stream", lambda index: STREAM)
    monkeypatch.setattr(plans, "zeros", lambda device, stream, words: torch.zeros(words, dtype=torch.int64))
    monkeypatch.setattr(plans, "_empty", empty_strided("cpu"))
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_compile_cached", lambda *what: {(n, 1, 1): None for n in range(1, 10000)})
    monkeypatch.setattr(launch, "_direct", lambda kernel: (lambda *call: started.append(call), (), False))
    for name, of in (("forward", single.forward_plan), ("backward", single.backward_plan)):
        monkeypatch.setattr(operators, f"_{name}", on_cpu(of, name == "forward"))
    return started


def on_cpu(plan, forward):
    def build(options, rest, *tensors):
        how = (rest, None) if forward else (*rest, None)
        return plan(operators.from_options(*options), *how, *tensors).run

    return build


def python_calls(call: Any) -> list[str]:
    """Names of the Python functions, not of this file, that ``call`` runs."""
    seen: list[str] = []

    def record(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_the_host_does_little_in_a_call(norm, no_gpu):
    """Python takes most of a call's time: one that was planned makes few calls."""
    x, w = torch.randn(64, 256).requires_grad_(), torch.ones(256).requires_grad_()
    bias = None if norm is rms_norm else w
    y = norm(x, w, bias, eps=1e-6)
    dy = torch.randn_like(y)
    torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    no_gpu.clear()
    forward = python_calls(lambda: norm(x, w, bias, eps=1e-6))
    assert len(no_gpu) == 1 and len(forward) <= 15, "\n".join(forward)
    grad = torch.autograd.grad
    backward = python_calls(lambda: grad(y, (x, w), dy, retain_graph=True))
    assert len(backward[backward.index("_Direct.backward") :]) <= 14, "\n".join(backward)
