"""Tuned reductions: what they change in the code that Inductor generates, and that it still compiles without spills."""

import math

import pytest
import torch
import torch.nn.functional as F

from stepgraph import compat
from stepgraph.inductor import fusion_guard, tuned_reductions
from stepgraph.inductor.choices.reduction_tuning import IN_FLIGHT, Tuning
from stepgraph.inductor.choices.registers import Loads, estimate

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def codegen():
    pytest.importorskip("triton")
    from tests.inductor.choices import cuda_codegen

    return cuda_codegen


@pytest.fixture(scope="module")
def norm(codegen):
    """Forward and backward graphs of a norm in bfloat16, by kind and shape."""
    graphs = {}

    def graph(kind, rows, columns):
        weights = 1 if kind == "rms" else 2
        if (kind, rows, columns) not in graphs:
            function = {"rms": F.rms_norm, "layer": F.layer_norm}[kind]
            specs = [((rows, columns), BF16), *[((columns,), BF16)] * weights]
            graphs[kind, rows, columns] = codegen.trace(lambda x, *w: function(x, (columns,), *w), *specs)
        return graphs[kind, rows, columns]

    return graph


def launch(kernel, folder):
    """The only configuration of a kernel: tile, split and stages with its warps."""
    (config,) = kernel.load(folder).configs
    return config.kwargs | {"warps": config.num_warps}


def test_backward_gets_the_tile_of_the_rule(codegen, norm, tmp_path):
    graph = norm("rms", 16384, 4096)["backward"]
    with codegen.rules(tuned_reductions()):
        (kernel,) = codegen.generate(graph).mixed
    tile = Tuning().mixed_tile(16384, 4096, Loads((2, 2), (4,), (2,), 1), 132)
    assert launch(kernel, tmp_path) == {
        "XBLOCK": tile.rows, "RSPLIT_SIZE": tile.split, "NUM_STAGES": tile.stages, "warps": tile.warps
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_one_kernel_adds_up_what_programs_summed_and_casts_it(codegen, norm, kind):
    graph = norm(kind, 65536, 256)["backward"]
    before = codegen.generate(graph)
    with codegen.rules(tuned_reductions()):
        generated = codegen.generate(graph)
    sums = 1 if kind == "rms" else 2
    assert before.wrapper.count(".sum(dim=0)") == sums and len(before.kernels) == 2
    assert generated.wrapper.count("torch.ops.stepgraph.column_sum(") == sums and len(generated.kernels) == 1
    assert ".sum(dim=0)" not in generated.wrapper


def scaled(x, scale):
    return (x.float() * scale.float()).sin().to(BF16)


@pytest.mark.parametrize("rows, columns", [(65536, 256), (512, 4096)])
def test_a_sum_that_is_cast_is_added_in_float32(codegen, rows, columns):
    graph = codegen.trace(scaled, ((rows, columns), BF16), ((columns,), BF16))["backward"]
    with codegen.rules(tuned_reductions()):
        generated = codegen.generate(graph)
    first, last, _ = generated.kernels
    assert "tl.bfloat16" not in first.source[first.source.index("@triton.jit") :]
    assert f"buf0 = empty_strided_cuda((1, {columns}," in generated.wrapper
    assert "'in_ptr0': '*fp32', 'out_ptr0': '*bf16'" in last.source


def test_a_sum_keeps_its_dtype_where_casts_are_emulated(codegen, norm):
    """Inductor would round what is added."""
    graph = norm("rms", 65536, 256)["backward"]
    with codegen.rules(tuned_reductions()), codegen.config.patch(emulate_precision_casts=True):
        generated = codegen.generate(graph)
    assert ", torch.float32)" in generated.wrapper and len(generated.kernels) == 2


def test_a_sum_keeps_the_dimensions_it_keeps(codegen):
    def norm(x, w):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.float()).to(BF16)

    graph = codegen.trace(norm, ((65536, 256), BF16), ((1, 256), BF16))["backward"]
    with codegen.rules(tuned_reductions()):
        wrapper = codegen.generate(graph).wrapper
    assert "view(1024, 256), torch.bfloat16).view([1, 256])" in wrapper


def means(x, v):
    """A sum that forward reads, and saves."""
    mean = (x * 1.0).sum(0).to(BF16)
    return mean * v, mean.exp()


CASTS = {
    "plain": lambda x, v: (x * 1.0001).sum(0).to(BF16),
    "kept": lambda x, v: (x * 1.0001).sum(0, keepdim=True).to(BF16),
    "three": lambda x, v: (x * 1.0001).view(4, -1, 64).sum([-3, 1]).to(torch.float16),
    "all": lambda x, v: (x * 2).sum(dim=None).to(BF16),
    "scalar": lambda x, v: x[0, 0].sum(0).to(BF16),
    "twice": lambda x, v: (lambda total: (total.to(BF16), total.to(torch.float16), total))((x * 2).sum(0)),
    "rows": lambda x, v: (x * 2).sum(1).to(BF16),
    "read": lambda x, v: (x * 2).sum(0).to(BF16).exp(),
    "saved": means,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("grad", [False, True])
def test_sums_that_are_cast_are_as_accurate_as_eagers(name, grad):
    """Rows that nearly cancel: what is rounded before it is added shows."""
    x = torch.full((4096, 64), 1.0038)
    x[::2] = -1.0
    x.requires_grad_(grad)
    v = torch.ones(64, dtype=BF16, requires_grad=grad)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        actual = torch.compile(CASTS[name], dynamic=False, options=tuned_reductions().options)(x, v)
    expected = CASTS[name](x, v)
    for a, e in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, expected)), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        torch.testing.assert_close(a, e, rtol=2**-7, atol=1e-4)


def test_column_sum():
    x = torch.randn(37, 11)
    total = torch.ops.stepgraph.column_sum(x, torch.float32)
    torch.testing.assert_close(total.double(), x.double().sum(0), rtol=0, atol=37 * 2**-22)
    assert torch.equal(torch.ops.stepgraph.column_sum(x, BF16), total.to(BF16))
    torch.library.opcheck(torch.ops.stepgraph.column_sum, (x, BF16))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_forward_reads_its_rows_once(codegen, norm, kind):
    def loads_of_x(generated):
        (kernel,) = generated.kernels
        return kernel.source.count("tl.load(in_ptr0") + kernel.source.count("tl.load(in_out_ptr0")

    graph = norm(kind, 16384, 4096)["forward"]
    assert loads_of_x(codegen.generate(graph, backward=False)) == 2
    with codegen.rules(tuned_reductions()):
        assert loads_of_x(codegen.generate(graph, backward=False)) == 1


def modulated(x, branch, table):
    shift, scale, gate = table.unsqueeze(1).chunk(3, dim=2)
    return F.layer_norm(x + gate * branch, x.shape[-1:]) * (1 + scale) + shift


def padded(x, branch, weight, bias):
    """What a row gives is kept with 1,504 values per sequence."""
    return F.layer_norm(x + branch, x.shape[-1:], weight, bias)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (modulated, [(64, 256, 1024), (64, 256, 1024), (64, 3072)]),
        (padded, [(16, 1500, 768), (16, 1500, 768), (768,), (768,)]),
    ],
)
def test_what_is_read_per_sequence_leaves_rows_whole(codegen, function, shapes, tmp_path, capsys):
    """No kernel reads its rows twice, or stores what it computed of them; sums of sequences stay Inductor's."""
    graphs = codegen.trace(function, *[(shape, BF16) for shape in shapes])
    with codegen.rules(tuned_reductions()):
        generated = [codegen.generate(graphs[way], way == "backward") for way in ("forward", "backward")]
    found = [kernel for each in generated for kernel in each.kernels if "tl.sum(" in kernel.source]
    along = [kernel for kernel in found if f"xnumel = {math.prod(shapes[0][:-1])}\n" in kernel.source]
    assert len(along) == 2 and len(found) <= 3
    for kernel in along:
        assert kernel.mixed or (
            "tl.range(" not in kernel.source and launch(kernel, tmp_path).keys() == {"XBLOCK", "warps"}
        )
        assert kernel.spilled_bytes(tmp_path, capsys) == 0


def test_few_rows_are_fused_too_and_small_ones_are_not(codegen, norm):
    wide, small = norm("rms", 4096, 8192)["backward"], norm("rms", 4096, 512)["backward"]
    # Inductor asks for twice as many rows as columns up to torch 2.14.
    assert len(codegen.generate(wide).mixed) == (compat.TORCH >= (2, 15))
    with codegen.rules(tuned_reductions()):
        assert codegen.generate(small).mixed == []
        assert len(codegen.generate(wide).mixed) == 1


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_squares_are_fused_too(codegen, norm, kind, tmp_path):
    """Of as many rows as columns the sums have equal numbers; what they read tells them apart."""
    square, wide = (norm(kind, rows, 4096)["backward"] for rows in (4096, 8192))
    assert len(codegen.generate(square).mixed) == (compat.TORCH >= (2, 15))  # which joins them by itself
    with codegen.rules(tuned_reductions()):
        (kernel,), (like,) = codegen.generate(square).mixed, codegen.generate(wide).mixed
    for piece in ("tl.sum", "tl.store", "for _ in"):
        assert kernel.source.count(piece) == like.source.count(piece)
    assert launch(kernel, tmp_path)["XBLOCK"] == launch(like, tmp_path)["XBLOCK"]
    with codegen.rules(tuned_reductions()), codegen.rules(fusion_guard(max_registers=40)):
        assert codegen.generate(square).mixed == []
    assert len(codegen.generate(square).mixed) == (compat.TORCH >= (2, 15))


def test_guard_and_tuning_hold_together(codegen, norm, tmp_path):
    """The guard judges the tile that the tuning chooses, from one scope or from two."""
    graph = norm("layer", 65536, 1024)["backward"]
    guard = fusion_guard()
    with codegen.rules(guard), codegen.rules(tuned_reductions()):
        (nested,) = codegen.generate(graph).mixed
    (decision,) = guard.report.allowed()
    assert launch(nested, tmp_path)["RSPLIT_SIZE"] == decision.tile.split
    assert launch(nested, tmp_path)["XBLOCK"] == decision.tile.rows
    both = fusion_guard() | tuned_reductions()
    with codegen.rules(both):
        (combined,) = codegen.generate(graph).mixed
    assert launch(combined, tmp_path) == launch(nested, tmp_path)
    with codegen.rules(tuned_reductions()), codegen.rules(fusion_guard(max_registers=40)):
        assert codegen.generate(graph).mixed == []


def test_nothing_changes_outside(codegen, norm):
    graph = norm("rms", 16384, 4096)["backward"]
    before = codegen.generate(graph).wrapper
    with codegen.rules(tuned_reductions()):
        codegen.generate(graph)
    assert codegen.generate(graph).wrapper == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("columns", [256, 1024, 4096, 8192])
def test_tuned_kernels_do_not_spill(codegen, norm, kind, columns, tmp_path, capsys):
    with codegen.rules(tuned_reductions()):
        for direction, graph in norm(kind, 65536, columns).items():
            for kernel in codegen.generate(graph, direction == "backward").kernels:
                assert kernel.spilled_bytes(tmp_path, capsys) == 0


@pytest.mark.parametrize("columns", [100, 256, 512, 768, 1024, 2048, 4096, 5120, 8192])
@pytest.mark.parametrize("rows", [4096, 65536, 65537, 524288])
@pytest.mark.parametrize("loads", [Loads((2, 2), (4,), (2,), 1), Loads((2, 2, 4), (4, 4), (2,), 2)])
def test_rule_fits_the_hardware(rows, columns, loads):
    tile = Tuning().mixed_tile(rows, columns, loads, 132)
    assert rows % tile.rows == 0 and tile.split % tile.rows == 0
    assert estimate(loads, tile) <= tile.register_limit
    programs = -(-rows // tile.split)
    per_sm = max(1, round(programs / 132))
    staged = tile.stages * tile.rows * tile.columns * sum(loads.full)
    assert staged * min(per_sm, 2) <= 227 * 1024
    if rows >= 65536 and loads.accumulators == 1:
        assert per_sm * staged * (tile.stages - 1) / tile.stages >= IN_FLIGHT / 2
