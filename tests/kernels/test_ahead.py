"""Which kernels an operator will launch is found without a GPU, for an H100, and nothing stays behind."""

import contextlib
import importlib
import pkgutil
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import stepgraph.kernels
from stepgraph import compat
from stepgraph.kernels import ahead, compile_worker
from stepgraph.kernels.fp8 import cast_triton
from stepgraph.kernels.norm import planned
from stepgraph.kernels.norm.triton import plans, workspace
from stepgraph.kernels.norm.triton.config.limits import Hardware
from stepgraph.passes.compile import ahead as compile_ahead

BF16, FP32, I32, I64, FP8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn
H100 = GPUTarget("cuda", 90, 32)
NORM = (BF16, "rms", 1e-6, 0.0)


class Driver:
    """What Triton asks of a GPU before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return H100


@pytest.fixture(autouse=True)
def h100(monkeypatch):
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(plans, "hardware_of", lambda x: Hardware(132, 228 * 1024 - 4096))
    monkeypatch.setattr(cast_triton, "_mixes_up_bytes", lambda: False)  # else, one kernel less is needed
    monkeypatch.setattr(plans, "current_device", lambda: 0)
    monkeypatch.setattr(plans, "raw_stream", lambda index: 0)


@pytest.fixture
def make():
    mode = FakeTensorMode()

    def tensor(*shape, dtype=BF16):
        with mode:
            return torch.empty(shape, dtype=dtype, device="cuda:0")

    return tensor


def examples(t):
    """(operator, arguments), together with every kernel that our operators launch on one GPU."""
    yield "norm", (t(64, 1024), t(1024), None, t(64, 1024), *NORM, True)
    yield "norm", (t(4, 65536), t(65536), None, None, *NORM, True)  # the sums of a few long rows, by a launch ahead
    yield (
        "norm_backward",
        (t(4096, 64), t(4096, 64), t(64), None, t(4096, dtype=FP32), None, *NORM, BF16, True, True, 0),
    )
    yield "column_sum", (t(32, 1155, dtype=FP32), BF16)
    yield "embedding_backward", (t(8, 64, 256), t(8, 64, dtype=I64), 50257, -1)
    yield "cross_entropy_", (t(512, 5000), t(512, dtype=I64), t(dtype=FP32), True, -100)
    yield "cross_entropy_", (t(512, 5000), t(512, dtype=I64), t(dtype=FP32), False, -100, True)
    x, slopes, weight, end = t(512, 256), t(512, 5120), t(5000, 256), t(dtype=I32)
    yield "counted_logits", (x, weight.t(), None, end, 0)
    yield "counted_dx", (slopes, weight, end, 128)
    yield "counted_dw_", (weight, slopes, x, end, 0, True)
    yield "counted_db", (slopes, end, 0)
    yield "cross_entropy_", (t(512, 5000), t(512, dtype=I64), t(dtype=FP32), True, -100, False, 30.0)
    rows, labels = t(512, dtype=FP32), t(512, dtype=I64)
    yield "token_stats", (t(512, 5000), labels, 0.7, -100)
    yield "token_gradient_", (t(512, 5000), labels, *[rows] * 6, 0.7, -100)
    yield "token_kl_stats", (t(512, 5000), t(512, 5000), 0.7)
    yield "token_kl_gradient_", (t(512, 5000), t(512, 5000), rows, rows, rows, rows, 0.7, True)
    yield "cast_scaled", (t(512, 1024), t(dtype=FP32), FP8, True, True)
    yield "cast_scaled_rows", (t(512, 1024), FP8, True, True)
    yield "cast_scaled_rows", (t(512, 1024), FP8, True, False)
    yield "cast_scaled_rows", (t(512, 1025), FP8, True, True)  # no pairs in a row
    yield "cast_scaled_rows", (t(512, 1024), FP8, True, False, t(1024, dtype=FP32))
    wide, narrow = [t(512, 1024) for _ in range(3)], [t(512, 16) for _ in range(3)]
    weights = t(1024, 16), t(1024, 16), t(16, 1024)
    yield "gated_adapters", (*wide[:2], *narrow[:2], *weights, 2.0, 2.0)
    yield "gated_adapters_backward", (*wide, *narrow[:2], *weights[:2], narrow[2], weights[2], 2.0, 2.0)
    yield "transposed_bytes", (t(512, 1024, dtype=torch.uint8),)
    yield "sort_by_expert", (t(512, 4, dtype=I64), 16)
    codes, nested = t(2048, 1, dtype=torch.uint8), [t(1, dtype=FP32), t(256, dtype=FP32), t(dtype=FP32)]
    weight = codes, t(64, dtype=torch.uint8), t(16, dtype=FP32)
    yield "dequantize_4bit", (*weight, nested, 64, (64, 64), BF16)
    places, order = t(512, 4, dtype=I32), t(2048, dtype=I32)
    yield "gather_rows", (t(512, 1024), places, order, 2048)
    yield "combine_rows", (t(2048, 1024), places, t(512, 4), order)
    yield "combine_rows_backward", (t(512, 1024), t(2048, 1024), places, t(512, 4), order)
    yield "grouped_mm", (t(2048, 1024), t(16, 1024, 768), t(16, dtype=I32))
    yield "cast_scaled_groups", (t(2048, 1024), t(16, dtype=I32), FP8)
    packed, experts = t(2048, 1024 + 128, dtype=torch.uint8), t(16, dtype=I32)
    yield "cast_scaled_groups", (packed, experts, FP8)
    yield "cast_packed_rows", (t(2048, 1024),)
    yield "grouped_scaled_mm", (packed, t(16, 768, 1024, dtype=FP8), t(16, 768, dtype=FP32), experts)
    yield "swiglu_rows_cast", (t(2048, 1536), experts, True)
    yield "swiglu_rows_cast_backward", (t(2048, 768), t(2048, 1536), experts, True)
    yield "swiglu_rows", (t(2048, 1536), t(16, dtype=I32))
    yield "swiglu_rows_backward", (t(2048, 768), t(2048, 1536), t(16, dtype=I32))
    there, back = t(2048, dtype=I32), t(4096, dtype=I32)
    yield "counts_begin", (t(16, dtype=I32), 2, "ep")
    yield "counts_end", (t(1, dtype=I32), t(16, dtype=I32), 2, "ep")
    yield "expert_places", (t(2, 16, dtype=I32), t(dtype=I32), 2048, 4096)
    yield "rows_begin", (t(512, 1024), order, 4, there, back, 2, "ep")
    yield "rows_begin", (t(4096, 1024), None, 1, back, there, 2, "ep")
    statistics, of_sequence = [t(4, 64, 1, dtype=FP32)] * 2, t(4, 1, 1024)
    modulated = t(4, 64, 1024), t(4, 64, 1024), *statistics, of_sequence, 1.0
    yield "gram", (t(2, 256, 512), None, 0.0, 1.0)
    yield "gram", (t(300, 70), t(300, 300), -4.775, 2.0315)
    yield "gelu_rows", (t(64, 1024), "none")
    yield "gelu_rows_backward", (t(64, 1024), t(64, 1024), "tanh", True)
    yield "modulated_norm_backward", (*modulated, None)
    yield "gated_norm_backward", (*modulated, t(4, 64, 1024), t(4, 64, 1024), of_sequence)
    yield "rows_end", (t(1), t(512, 1024), back, 2, "ep")


def triton_functions(package):
    """((module, name), function) of every Triton function in ``package``."""
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        # No node's; not ours; of an optional package.
        if any(part in info.name for part in (".copy_collectives", ".clock", ".attention", ".gated_quack")):
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, triton.runtime.JITFunction) and value.fn.__module__ == info.name:
                yield (info.name, name), value


def is_kernel(name):
    """Whether a Triton function is launched: those named so."""
    return name.endswith("_kernel")


def test_every_kernel_is_found(make):
    found = {s.function for operator, args in examples(make) for s in ahead.sources_of(operator, args)}
    assert found == {at for at, _ in triton_functions(stepgraph.kernels) if is_kernel(at[1])}
    assert {operator for operator, _ in examples(make)} == set(ahead.LAUNCHING)


def test_only_kernels_read_constants_of_their_module():
    """Up to Triton 3.7 a constant that a function reads is part of its caller's key only if the function's key was
    asked for before: what one process compiled, another, or the same in another order, does not find. Functions take
    constants as arguments."""
    functions = list(triton_functions(stepgraph.kernels))
    for _, function in functions:
        assert function.cache_key
    read = {at: [name for name, _ in f.used_global_vals] for at, f in functions if not is_kernel(at[1])}
    assert read and not any(read.values()), {at: names for at, names in read.items() if names}


def test_nothing_stays_behind(make, monkeypatch):
    monkeypatch.setattr(planned, "PLANS", {})
    monkeypatch.setattr(workspace, "_streams", {})
    before = plans._empty, plans.zeros
    for operator, args in examples(make):
        ahead.sources_of(operator, args)
    assert not planned.PLANS and not workspace._streams
    assert before == (plans._empty, plans.zeros)


def test_addresses_and_sizes_that_16_divides(make):
    """A kernel is compiled for what is known of them: as at a launch of tensors that lie so."""

    labels = make(64, dtype=I64)

    def attributes(logits):
        (source,) = ahead.sources_of("token_stats", (logits, labels, 0.7, -100))
        return {at for (at,), given in source.attributes.items() if ["tt.divisibility", 16] in given}

    wide = make(64, 5008)
    assert attributes(wide) == {0, 1, 2, 3, 4, 5, 6, 7}
    with wide.fake_mode:
        shifted, narrow = wide.narrow(1, 1, 5007), wide.narrow(1, 8, 4992)
    assert attributes(shifted) == {1, 2, 3, 4, 5, 6}  # begins at 2 bytes, and has 5,007 columns
    assert attributes(narrow) == {0, 1, 2, 3, 4, 5, 6, 7}


def graph_of(make, *calls):
    graph = fx.Graph()
    for operator, args in calls:
        nodes = []
        for value in args:
            if isinstance(value, torch.Tensor):
                nodes.append(graph.placeholder("input"))
                nodes[-1].meta["val"] = value
            else:
                nodes.append(value)
        graph.call_function(getattr(torch.ops.stepgraph, operator).default, tuple(nodes))
    return graph


def column_sum(make):
    return "column_sum", (make(32, 1155, dtype=FP32), BF16)


def test_what_is_compiled_ahead_is_found_on_disk(make, monkeypatch, tmp_path):
    """Alike calls are compiled once; what the other process compiled, a launch finds under the same key, and the next
    start compiles nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    running = compile_ahead.Ahead([graph_of(make, column_sum(make)), graph_of(make, column_sum(make))])
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/another/ptxas")  # as Inductor does where it loads a kernel
    running.start()
    assert running.finish() == ["1 of our own kernels compiled ahead"]
    (source,) = ahead.sources_of(*column_sum(make))
    hits = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
        compat.triton_compiled(source)
    assert hits == [True]
    monkeypatch.setattr(compile_ahead, "start_worker", None)
    assert compile_ahead.Ahead([graph_of(make, column_sum(make))]).finish() == []


@pytest.mark.parametrize("launchers", [True, False])
def test_what_calls_a_kernel_is_built_too(monkeypatch, launchers):
    """Triton 3.6 compiles C for each kernel. Without a GPU's driver there is nothing to link that with."""
    compiled, built = SimpleNamespace(src="source", metadata="metadata"), []
    nvidia = SimpleNamespace(make_launcher=None, CudaLauncher=lambda *given: built.append(given))
    monkeypatch.setattr(compat, "triton_compiled", lambda source, target: compiled)
    monkeypatch.setattr(importlib.import_module("triton.backends.nvidia"), "driver", nvidia)
    source = compat.TritonSource(("module", "kernel"), {}, {}, {}, {})
    assert compile_worker._compiled((source, H100, launchers)) == ("kernel", None)
    assert built == [("source", "metadata")] * launchers


def test_what_fails_is_a_line_of_the_report(make, monkeypatch, tmp_path):
    """An operator whose launches are not found, and a kernel that does not compile."""

    def refuse(*args):
        raise ValueError("first\nno such thing")

    def wrong(operator, *more):
        (source,) = sources_of(operator, *more)
        width = max(source.constants)
        return [source._replace(constants=source.constants | {width: 3})]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(ahead.LAUNCHING, "cast_packed_rows", refuse)
    running = compile_ahead.Ahead([graph_of(make, ("cast_packed_rows", (make(512, 4096),)), column_sum(make))])
    sources_of = compile_ahead.sources_of
    with monkeypatch.context() as patch:
        patch.setattr(compile_ahead, "sources_of", lambda *call: (wrong if "column_sum" in call else sources_of)(*call))
        running.start()
    first, second = running.finish()
    assert first == "not compiled ahead: cast_packed_rows: ValueError: no such thing"
    assert second.startswith("not compiled ahead: add_slots_kernel: CompilationError: "), second


def program_that(tmp_path, monkeypatch, *lines):
    """In Python's place, a program of the shell."""
    monkeypatch.setattr(compile_ahead, "_running", [])
    program = tmp_path / "python"
    program.write_text("\n".join(["#!/bin/sh", *lines]))
    program.chmod(0o755)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(program))


def test_a_process_that_dies_is_a_line_of_the_report(make, monkeypatch, tmp_path):
    program_that(tmp_path, monkeypatch, 'echo "no such module" >&2', "exit 1")
    running = compile_ahead.Ahead([graph_of(make, column_sum(make))])
    assert running.finish() == ["not compiled ahead: 1 of our own kernels: no such module"]


def test_what_is_compiled_under_another_key_is_a_line_of_the_report(make, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compat, "triton_cached", lambda source: False)
    running = compile_ahead.Ahead([graph_of(make, column_sum(make))])
    assert running.finish() == ["not compiled ahead: add_slots_kernel: this process has another key for it"]


def test_one_process_compiles_for_all_steps(make, monkeypatch, tmp_path):
    """What it says of a step that was given up is not taken for the next one's; one that has died is replaced."""
    monkeypatch.setattr(compile_ahead, "_running", [])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    given_up = compile_ahead.Ahead([graph_of(make, column_sum(make))])
    given_up.start()
    (worker,) = compile_ahead._running
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    assert compile_ahead.Ahead([graph_of(make, column_sum(make))]).finish() == ["1 of our own kernels compiled ahead"]
    assert compile_ahead._running == [worker] and worker.process.poll() is None
    assert list((tmp_path / "first").iterdir()) and list((tmp_path / "second").iterdir())
    given_up.end()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "third"))
    assert compile_ahead.Ahead([graph_of(make, column_sum(make))]).finish() == ["1 of our own kernels compiled ahead"]
    assert compile_ahead._running != [worker]


def test_a_graph_without_our_kernels_starts_nothing(make, monkeypatch):
    monkeypatch.setattr(driver, "_active", None)  # nor is a GPU asked for
    assert compile_ahead.Ahead([fx.Graph()]).finish() == []


def test_the_interpreter_compiles_nothing(make, monkeypatch):
    monkeypatch.setattr(compat, "triton_interprets", lambda: True)
    monkeypatch.setattr(driver, "_active", None)
    assert compile_ahead.Ahead([graph_of(make, column_sum(make))]).finish() == []
