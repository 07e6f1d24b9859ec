"""The kernels of experts on a GPU: against their references, without waiting for the GPU, the same every time."""

import pytest
import torch

import stepgraph
from stepgraph.config.build import build_model
from stepgraph.config.presets import PRESETS
from stepgraph.kernels.moe import (
    cast_packed_rows,
    cast_scaled_groups,
    combine_rows,
    gather_rows,
    grouped_mm,
    grouped_mm_weight,
    grouped_scaled_mm,
    grouped_scaled_mm_weight,
    sort_by_expert,
    swiglu_rows,
    swiglu_rows_cast,
    swiglu_rows_cast_backward,
    swiglu_triton,
)
from stepgraph.kernels.moe.swiglu import backward_reference, reference, swiglu_rows_backward
from stepgraph.models import next_token_loss
from stepgraph.passes import StepOptions, chosen
from tests.kernels.moe.launches import FUNCTIONS
from tests.kernels.moe.test_moe_triton import (
    cast_cases,
    defined,
    row_cases,
    sort_cases,
    swiglu_cases,
    swiglu_cast_cases,
    zero_cases,
)
from tests.kernels.moe.test_scaled import COUNTS, E4M3, by_rows
from tests.kernels.moe.test_scaled import arguments as sides

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
hopper = pytest.mark.skipif(CAPABILITY != (9, 0), reason="groups in fp8 need compute capability 9.0")


def on_gpu(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


KERNEL_CASES = (sort_cases, zero_cases, cast_cases, swiglu_cases, swiglu_cast_cases, row_cases)


@pytest.mark.parametrize("cases", KERNEL_CASES)
def test_kernels_against_references(cases):
    wrong = []
    for number, (name, arguments, expected) in enumerate(cases()):
        found = FUNCTIONS[name](*map(on_gpu, arguments))
        expected, found = ((t,) if isinstance(t, torch.Tensor) else t for t in (expected, found))
        for mine, theirs in zip(found, expected, strict=True):
            mine, theirs = (defined(arguments, t) for t in (mine, theirs))
            # One rounding to 16 bits may fall the other way, where a product and a sum are one operation.
            tolerance = (
                {1: 0, 2: torch.finfo(theirs.dtype).eps, 4: 1e-5}[mine.itemsize] if mine.is_floating_point() else 0
            )
            try:
                torch.testing.assert_close(mine.cpu(), theirs, rtol=tolerance, atol=tolerance)
            except AssertionError as error:
                wrong.append(f"case {number}, {name}: {error}")
    assert not wrong, "\n".join(wrong)


@hopper
@pytest.mark.parametrize("counts", [*COUNTS, [300, 0, 1, 1000, 47]])
def test_products_in_fp8(counts):
    """Casts have the reference's bits, and torch's products its values; without waiting for the GPU."""
    rows, weight, dy, offsets = sides(counts, D=256, F=384)
    packed, (w, weight_scale) = cast_packed_rows(rows), by_rows(weight)
    expected = grouped_scaled_mm(packed, w, weight_scale, offsets)
    casts = [cast_scaled_groups(x, offsets, E4M3) for x in (dy, packed)]
    (a, scale_a, ends), (b, scale_b, _) = casts
    gradient = grouped_scaled_mm_weight(a, b, scale_a, scale_b, ends)
    torch.cuda.synchronize()
    given = [t.cuda() for t in (rows, weight, dy, offsets)]
    for attempt in range(2):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")  # the first compiles
        try:
            there, (w, weight_scale) = cast_packed_rows(given[0]), by_rows(given[1])
            y = grouped_scaled_mm(there, w, weight_scale, given[3])
            found = [cast_scaled_groups(x, given[3], E4M3) for x in (given[2], there)]
            (a, scale_a, on_ends), (b, scale_b, _) = found
            dw = grouped_scaled_mm_weight(a, b, scale_a, scale_b, on_ends)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    used, width = int(offsets[-1]), rows.shape[1] + 4  # the values and the scale
    assert torch.equal(there[:used, :width].cpu(), packed[:used, :width])
    for (mine, mine_scale, _), (theirs, theirs_scale, _) in zip(found, casts, strict=True):
        assert torch.equal(mine[:, : ends[-1]].cpu().view(torch.uint8), theirs[:, : ends[-1]].view(torch.uint8))
        assert torch.equal(mine_scale.cpu(), theirs_scale)
    for mine, theirs in ((y, expected), (dw, gradient)):
        assert mine.isfinite().all() and (mine.cpu().double() - theirs.double()).norm() <= 5e-3 * theirs.double().norm()


@hopper
@pytest.mark.parametrize("F", [768, 1408, swiglu_triton.LONGEST + 16])
def test_swiglu_with_its_cast(F):
    """The bits of the kernels apart, also where no program holds a row."""
    gate_up = torch.randn(300, 2 * F, device="cuda", dtype=torch.bfloat16)
    dy, offsets = gate_up[:, :F] * 0.1, torch.tensor([7, 280], device="cuda", dtype=torch.int32)
    for keep in (False, True):
        for (y, packed), alone in (
            (swiglu_rows_cast(gate_up, offsets, keep), swiglu_rows(gate_up, offsets)),
            (swiglu_rows_cast_backward(dy, gate_up, offsets, keep), swiglu_rows_backward(dy, gate_up, offsets)),
        ):
            assert torch.equal(y[:280], alone[:280]) if keep else not y.numel()
            width = alone.shape[1] + 4
            assert torch.equal(packed[:280, :width], cast_packed_rows(alone)[:280, :width])


@pytest.mark.parametrize("experts", [1, 8, 64, 256])
def test_sort_of_many_slots(experts):
    chosen = torch.randint(-1, experts + 1, (16384, 8), device="cuda")
    order, places, counts = sort_by_expert(chosen, experts)
    flat = chosen.flatten()
    used = (flat >= 0) & (flat < experts)
    expected = torch.where(used, flat, experts).argsort(stable=True)[: int(used.sum())]
    assert torch.equal(order[: len(expected)].long(), expected) and bool((order[len(expected) :] == -1).all())
    assert torch.equal(places.flatten()[expected], torch.arange(len(expected), device="cuda", dtype=torch.int32))
    assert torch.equal(counts.long(), torch.bincount(flat[used], minlength=experts))


def layer(x, weights, chosen, up, down):
    """Experts of one layer, weighted."""
    order, places, counts = sort_by_expert(chosen, up.shape[0])
    offsets = counts.cumsum(0, dtype=torch.int32)
    hidden = torch.nn.functional.silu(grouped_mm(gather_rows(x, order, places), up.mT, offsets))
    return combine_rows(grouped_mm(hidden, down.mT, offsets), places, weights, order)


def inputs(tokens=512, D=256, width=384, experts=16, slots=4, dtype=torch.bfloat16):
    chosen = torch.randint(experts, (tokens, slots), device="cuda").masked_fill(
        torch.rand(tokens, slots, device="cuda") < 0.1, -1
    )
    shapes = (tokens, D), (tokens, slots), (experts, width, D), (experts, D, width)
    x, weights, up, down = (
        torch.randn(s, device="cuda", dtype=dtype).mul(s[-1] ** -0.5).requires_grad_() for s in shapes
    )
    return x, weights.detach().float().requires_grad_(), chosen, up, down


def test_layer_against_float64():
    x, weights, chosen, up, down = inputs()
    wide = [t.detach().double().requires_grad_() for t in (x, weights, up, down)]
    y, (X, W, U, D) = layer(x, weights, chosen, up, down), wide
    total = 0
    for k in range(chosen.shape[1]):
        e = chosen[:, k].clamp(min=0)
        hidden = torch.nn.functional.silu(torch.einsum("nd,nfd->nf", X, U[e]))
        total = total + torch.einsum("nf,ndf->nd", hidden, D[e]) * (W[:, k] * (chosen[:, k] >= 0)).unsqueeze(1)
    dy = torch.randn_like(y)
    mine = torch.autograd.grad(y, [x, weights, up, down], dy)
    theirs = torch.autograd.grad(total, wide, dy.double())
    for found, right in zip((y, *mine), (total, *theirs), strict=True):
        # bf16 rounds to 2^-9 at each of five steps.
        assert (found.double() - right).norm() <= 2e-2 * right.norm()


def test_no_wait_and_the_same_every_time():
    x, weights, chosen, up, down = inputs()
    torch.cuda.synchronize()
    results = []
    layer(x, weights, chosen, up, down).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            y = layer(x, weights, chosen, up, down)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), [x, weights, up, down])))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_rows_past_the_end_are_zero():
    offsets = torch.tensor([3, 3, 40], dtype=torch.int32, device="cuda")
    rows = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)
    rows[40:] = torch.nan
    weight = torch.randn(3, 64, 72, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):  # memory that was used before
        torch.full((100, 72), torch.nan, device="cuda", dtype=torch.bfloat16)
        out = grouped_mm(rows, weight, offsets)
        assert not out[40:].any() and out[:40].isfinite().all()
        out[40:] = torch.nan
        gradient = grouped_mm_weight(rows, out, offsets)
        assert gradient.isfinite().all() and not gradient[1].any()


def test_a_layer_whose_rest_nothing_writes():
    """A layer forward and backward in buffers of twice the rows in use, whose rest is NaN: the same bits as zeros."""
    R, D, width = 600, 64, 72
    offsets = torch.tensor([100, 100, 300], dtype=torch.int32, device="cuda")
    x, dy = (torch.randn(R, D, device="cuda").bfloat16() for _ in range(2))
    gate_up, down = (torch.randn(3, n, m, device="cuda").bfloat16() for n, m in ((2 * width, D), (D, width)))
    results = []
    for zero_rest in (True, False):
        for t in (x, dy):
            t[300:] = 0.0 if zero_rest else torch.nan
        torch.full((R, 2 * width), torch.nan, device="cuda", dtype=torch.bfloat16)  # memory that was used before
        torch.full((R, D), torch.nan, device="cuda", dtype=torch.bfloat16)
        both = grouped_mm(x, gate_up.mT, offsets, zero_rest)
        h = swiglu_rows(both, offsets, zero_rest)
        y = grouped_mm(h, down.mT, offsets, zero_rest)
        dboth = swiglu_rows_backward(grouped_mm(dy, down, offsets, zero_rest), both, offsets, zero_rest)
        dx = grouped_mm(dboth, gate_up, offsets, zero_rest)
        weights = grouped_mm_weight(h, dy, offsets), grouped_mm_weight(x, dboth, offsets)
        assert all(w.isfinite().all() for w in weights)
        results.append((y[:300], dx[:300], *weights))
    assert all(map(torch.equal, *results))


def test_what_cannot_run_is_said():
    offsets = torch.tensor([8], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="multiples of 8"):
        grouped_mm(
            torch.ones(8, 12, device="cuda").bfloat16(), torch.ones(1, 12, 16, device="cuda").bfloat16(), offsets
        )


@pytest.mark.parametrize(("R", "F"), [(4096, 1408), (513, 768), (300, 33), (77, 1001), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_swiglu_of_rows(R, F, dtype, share):
    """Against plain torch in the same dtype on the GPU; rows past the end are not read, nor waited for."""
    end = round(share * R)
    offsets = torch.tensor([end // 3, end // 3, end], dtype=torch.int32, device="cuda")
    gate_up, dy = (torch.randn(R, width, device="cuda").to(dtype) for width in (2 * F, F))
    expected = reference(gate_up, offsets), backward_reference(dy, gate_up, offsets)
    gate_up[end:] = torch.nan
    dy[end:] = torch.nan
    found = [(swiglu_rows(gate_up, offsets), swiglu_rows_backward(dy, gate_up, offsets))]  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):  # memory that was used before
            torch.full((R, 2 * F), torch.nan, device="cuda", dtype=dtype)
            leaf = gate_up.clone().requires_grad_()
            out = swiglu_rows(leaf, offsets)
            found.append((out.detach(), *torch.autograd.grad(out, leaf, dy)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))
    for mine, theirs in zip(found[0], expected, strict=True):
        assert mine.dtype == dtype and mine.is_contiguous() and not mine[end:].any()
        # An exponential of another library may round the other way, and then each of two roundings behind it.
        tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_swiglu_of_more_elements_than_32_bits_count():
    R, F = 2**20 + 3, 1024  # 2**31 elements of gate and up, and more
    offsets = torch.tensor([R - 1], dtype=torch.int32, device="cuda")
    gate_up = torch.zeros(R, 2 * F, device="cuda", dtype=torch.bfloat16)
    gate_up[-3:] = 1.0
    out = swiglu_rows(gate_up, offsets)
    gradient = swiglu_rows_backward(torch.ones_like(out), gate_up, offsets)
    expected = backward_reference(torch.ones_like(out[-3:]), gate_up[-3:], offsets - offsets + 2)
    assert torch.equal(out[-3:], reference(gate_up[-3:], offsets - offsets + 2)) and not out[:-3].any()
    torch.testing.assert_close(gradient[-3:], expected, rtol=2**-7, atol=0)


def loss_fn(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        return next_token_loss(model, batch)


def trained(steps=6, **options):
    """(losses of ``steps``, of which the later ones are replayed; the reports by pass)."""
    model = build_model(PRESETS["deepseek-v3-debug"](), torch.device("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (32, 257), generator=torch.Generator().manual_seed(3)).cuda()
    batches = [{"tokens": t[:, :-1].contiguous(), "targets": t[:, 1:].contiguous()} for t in (tokens, tokens.flip(1))]
    passes = [
        p.with_options(unprofitable=True) if p.name == "fp8_experts" else p for p in chosen(StepOptions(**options))
    ]
    step = stepgraph.capture(model, loss_fn, batches[0], optimizer, max_grad_norm=1.0, passes=passes)
    losses = [step(batches[i % 2]).clone() for i in range(steps)]
    return torch.stack(losses), {report.name: report for report in step.report}


@hopper
def test_a_step_with_experts_in_fp8():
    expected, _ = trained(fp8="rowwise")
    losses, reports = trained(fp8="rowwise", fp8_experts=True)
    report = reports["fp8_experts"]
    assert report.changed == report.matched > 0, report.notes
    assert reports["exchange_fp8"].changed > 0, reports["exchange_fp8"].notes
    assert reports["cuda_graph"].summary == "1 CUDA graph, 0 nodes on the host" and losses[4] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=5e-2, atol=5e-2)
