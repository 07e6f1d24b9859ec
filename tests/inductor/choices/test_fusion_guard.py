"""The fusion guard: what it refuses, that refusing ends the spills, and where it holds."""

import copy
import re
import threading
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph import compat
from stepgraph.inductor import fusion_guard
from stepgraph.inductor.choices.fusion_guard import RAGGED, SPILL, VIEW
from stepgraph.inductor.choices.registers import Loads, Tile, estimate

BF16, FP32 = torch.bfloat16, torch.float32


def residual_stream(columns: int, layers: int):
    """Blocks whose residual stream is mixed with the embedding by learned scales: sums over rows, over and over."""

    def forward(x, *parameters):
        x = embedding = F.rms_norm(x, (columns,))
        for keep, mix, weight in zip(*[iter(parameters)] * 3, strict=True):
            x = keep * x + mix * embedding
            x = x + F.rms_norm(x, (columns,)).to(BF16) @ weight
        return F.rms_norm(x, (columns,))

    return forward


def residual_stream_specs(rows: int, columns: int, layers: int, dtype: torch.dtype):
    layer = [((columns,), dtype), ((columns,), dtype), ((columns, columns), BF16)]
    return [((rows, columns), dtype), *layer * layers]


def modulated(columns: int):
    """Two norms whose scales and shifts are slices of one parameter: their gradients are slices of one buffer."""

    def forward(x, table):
        scale1, shift1, scale2, shift2 = table.chunk(4, dim=1)
        x = F.layer_norm(x, (columns,)) * (1 + scale1) + shift1
        return F.layer_norm(x, (columns,)) * (1 + scale2) + shift2

    return forward


@pytest.fixture(scope="module")
def codegen():
    pytest.importorskip("triton")
    from tests.inductor.choices import cuda_codegen

    return cuda_codegen


def spills(generated, folder, capsys):
    return {kernel.name: kernel.spilled_bytes(folder, capsys) for kernel in generated.kernels}


@pytest.mark.slow
def test_refused_fusion_spills_and_its_parts_do_not(codegen, tmp_path, capsys):
    layers = 3 if compat.TORCH <= (2, 13) else 7  # Triton 3.8 keeps in registers what 3.7 spilled
    specs = residual_stream_specs(98304, 512, layers, FP32)
    graph = codegen.trace(residual_stream(512, layers), *specs)["backward"]
    default = codegen.generate(graph)
    guard = fusion_guard()
    with codegen.rules(guard):
        guarded = codegen.generate(graph)
    assert max(spills(default, tmp_path, capsys).values()) > 0
    assert max(spills(guarded, tmp_path, capsys).values()) == 0
    assert guard.report.refused()
    assert "refused (would spill)" in str(guard.report)


def test_plain_norm_backward_stays_one_kernel(codegen):
    graph = codegen.trace(lambda x, w: F.rms_norm(x, (4096,), w), ((16384, 4096), BF16), ((4096,), BF16))["backward"]
    guard = fusion_guard()
    with codegen.rules(guard):
        guarded = codegen.generate(graph)
    assert len(guarded.mixed) == 1
    assert guard.report.refused() == []
    (kernel,) = guard.report.allowed()
    assert (len(kernel.loads.full), len(kernel.loads.row), len(kernel.loads.column)) == (2, 1, 1)
    assert (kernel.rows, kernel.loads.accumulators, kernel.backward) == (16384, 1, True)


def test_a_lower_bound_refuses_more(codegen):
    graph = codegen.trace(lambda x, w: F.rms_norm(x, (4096,), w), ((16384, 4096), BF16), ((4096,), BF16))["backward"]
    guard = fusion_guard(max_registers=64)
    with codegen.rules(guard):
        assert codegen.generate(graph).mixed == []
    assert {decision.reason for decision in guard.report.refused()} == {SPILL}


def test_handler_that_stays_behind_follows_no_rules(codegen):
    graph = codegen.trace(lambda x, w: F.rms_norm(x, (4096,), w), ((16384, 4096), BF16), ((4096,), BF16))["backward"]
    with codegen.rules(fusion_guard(max_registers=64)):
        codegen.generate(graph)
    assert len(codegen.generate(graph).mixed) == 1


def returned_without_being_written(wrapper: str) -> set[str]:
    """Buffers that the wrapper allocates and returns, and neither hands to a kernel nor takes a view of."""
    returned = re.findall(r"buf\d+", re.search(r"return \((.*?)\)", wrapper).group(1))
    used = [line for line in wrapper.splitlines() if ".run(" in line or "reinterpret_tensor(" in line]
    return {name for name in returned if not any(re.search(rf"\b{name}\b", line) for line in used)}


def test_sum_into_a_slice_is_written_only_with_the_guard(codegen):
    """Pytorch issue 193061, in 2.10 to 2.14: the gradient of the table is memory that nothing wrote."""
    specs = ((1, 65536, 1024), BF16), ((1, 4, 1024), BF16)
    graph = codegen.trace(modulated(1024), *specs)["backward"]
    unwritten = returned_without_being_written(codegen.generate(graph).wrapper)
    assert len(unwritten) == (compat.TORCH <= (2, 14))
    guard = fusion_guard()
    with codegen.rules(guard):
        assert returned_without_being_written(codegen.generate(graph).wrapper) == set()
    assert {decision.reason for decision in guard.report.refused()} == {VIEW}


def test_rows_that_do_not_fill_a_tile_are_not_fused(codegen):
    """Pytorch issue 195845: a column sum takes in the rows that are not there."""

    def forward(x):
        x = 2 * x + 0.25
        return x.float().sum(1), x.float().sum(0)

    ragged = (81922, 128)
    traced = make_fx(forward, decomposition_table=select_decomp_table())(torch.empty(ragged, dtype=BF16))
    graph = traced, [(ragged, BF16)]
    assert len(codegen.generate(graph, backward=False).mixed) == 1
    guard = fusion_guard()
    with codegen.rules(guard):
        assert codegen.generate(graph, backward=False).mixed == []
    assert {decision.reason for decision in guard.report.refused()} == {RAGGED}


@pytest.mark.parametrize("dtype", [2, 4])
def test_estimate_grows_with_each_kind_of_load(dtype):
    tile = Tile(rows=4, columns=512, warps=2, stages=1, split=64)
    base = Loads((dtype,) * 2, (4,), (dtype,), 1)
    larger = [
        Loads((dtype,) * 3, (4,), (dtype,), 1),
        Loads((dtype,) * 2, (4, 4), (dtype,), 1),
        Loads((dtype,) * 2, (4,), (dtype,) * 2, 1),
        Loads((dtype,) * 2, (4,), (dtype,), 2),
    ]
    full, row, column, accumulator = (estimate(loads, tile) - estimate(base, tile) for loads in larger)
    assert full > accumulator > column > 0
    assert full > row > 0
    assert estimate(base, Tile(1, 512, 2, 1, 64)) < estimate(base, tile)


def test_register_limit_follows_the_program_size():
    assert Tile(1, 16384, 16, 1, 32).register_limit == 128
    assert Tile(1, 1024, 4, 1, 32).register_limit == 255


def test_wrong_bound_is_refused():
    with pytest.raises(ValueError, match="max_registers=300 is not from 24 to 255"):
        fusion_guard(max_registers=300)


# Where the rules hold, on real compilations for the CPU.


@pytest.fixture
def compiling():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def function():
    """One that no cache knows."""
    new = time.time_ns() % 1_000_003
    return lambda x: (x * new).sin().sum()


def run(compiled, backward=True):
    out = compiled(torch.ones(8, requires_grad=True))
    if backward:
        out.backward()
    return out


@pytest.mark.slow
def test_settings_are_in_the_cache_key(compiling, function):
    def compile_under(guard):
        torch._dynamo.reset()
        counters.clear()
        if guard is None:
            run(torch.compile(function))
        else:
            with guard:
                run(torch.compile(function))
        cache = counters["aot_autograd"]
        return cache["autograd_cache_hit"], cache["autograd_cache_miss"]

    compile_under(None)
    assert compile_under(None)[1] == 0
    assert compile_under(fusion_guard())[1] > 0
    again = fusion_guard()
    hits, misses = compile_under(again)
    assert (hits > 0, misses) == (True, 0)
    assert "compile cache" in str(again.report)
    assert compile_under(fusion_guard(max_registers=128))[1] > 0
    assert compile_under(None)[1] == 0


def test_block_compiles_the_backward_too(compiling, function):
    guard = fusion_guard()
    with guard:
        out = run(torch.compile(function), backward=False)
    assert guard.report.graphs_compiled == 2
    out.backward()
    assert guard.report.graphs_compiled == 2


def test_options_hold_in_a_thread_that_compiled_before(compiling, function):
    """A backward that is compiled when it first runs, in another thread, whose handler Inductor has cached."""
    guard = fusion_guard()
    compiled = torch.compile(function, options=guard.options)
    out = run(compiled, backward=False)
    assert guard.report.graphs_compiled == 1
    handlers = []

    def backward():
        V = compat.inductor().V
        handlers.append(type(V.choices).__name__)
        out.backward()
        handlers.append(type(V.choices).__name__)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert handlers == ["InductorChoices", "Choices"]
    assert guard.report.graphs_compiled == 2


def test_without_a_cache_the_block_does_not_warn(compiling, function, recwarn):
    with compat.inductor().config.patch(force_disable_caches=True), fusion_guard() as guard:
        run(torch.compile(function))
    assert guard.report.graphs_compiled == 2
    assert not [w for w in recwarn if "inside this block" in str(w.message)]


def test_block_in_which_nothing_compiles_warns(compiling, function):
    with pytest.warns(UserWarning, match="nothing was compiled inside this block"), fusion_guard():
        torch.compile(function)


def test_settings_end_with_the_block(compiling):
    config = compat.inductor().config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fusion_guard():
            assert config.post_grad_custom_pre_pass is not None
            with pytest.raises(KeyError), fusion_guard(max_registers=99):
                raise KeyError
    assert config.post_grad_custom_pre_pass is None


def test_another_pass_still_runs(compiling, function):
    seen = []
    config = compat.inductor().config
    with config.patch(post_grad_custom_pre_pass=lambda graph: seen.append(graph)), fusion_guard() as guard:
        run(torch.compile(function))
    assert len(seen) == guard.report.graphs_compiled == 2


def test_other_choices_are_not_replaced(compiling, function):
    parts = compat.inductor()

    class Mine(parts.InductorChoices):
        pass

    def compile_with_mine():
        parts.V.set_choices_handler(Mine())
        try:
            run(torch.compile(function, options=fusion_guard().options))
        except Exception as error:
            failures.append(str(error))

    failures = []
    thread = threading.Thread(target=compile_with_mine)
    thread.start()
    thread.join()
    assert "choices already belong to Mine" in failures[0]


def test_copies_of_the_settings_report_to_the_same_guard():
    options = fusion_guard().options
    assert copy.deepcopy(options) == options
