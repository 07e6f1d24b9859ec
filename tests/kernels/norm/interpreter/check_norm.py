"""The norm kernels against float64, with shapes, layouts, dtypes and configurations chosen by hypothesis."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.norm.spec import Norm
from stepgraph.kernels.norm.triton import plans
from stepgraph.kernels.norm.triton.config.limits import Config
from stepgraph.kernels.norm.triton.launch import INTERPRETED
from stepgraph.kernels.norm.triton.rows import rows_of
from tests.kernels.norm import backend as triton_norm
from tests.kernels.norm.interpreter.inputs import DTYPES, EPS, LAYOUTS, close, configs, norm, tensor

assert INTERPRETED

# The interpreter takes milliseconds for every call inside a kernel: few rows, and few of them in a loop.
# From 64 on (32 in fp32), rows that begin anywhere within 16 bytes are read from their beginning.
sizes = st.one_of(st.integers(1, 24), st.sampled_from((32, 40, 48, 33, 38, 65, 66, 68, 77)))
shapes = st.one_of(
    st.tuples(sizes),
    st.tuples(st.integers(1, 12), sizes),
    st.tuples(st.integers(1, 3), st.integers(1, 5), sizes),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), sizes),
)


#: When forward loads the weight.
WEIGHTS = ("before", "with", "after")


def double(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.double().requires_grad_()


@settings(max_examples=16, deadline=None, derandomize=True)
@given(st.data())
def test_forward_and_backward(data):
    draw = data.draw
    shape, kind = draw(shapes), draw(st.sampled_from(("rms", "layer")))
    dtype, weight_dtype, residual_dtype, dy_dtype = (draw(st.sampled_from(DTYPES)) for _ in range(4))
    per_head = len(shape) > 1 and draw(st.booleans())
    offset = draw(st.sampled_from((0.0, 1.0)))
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(4)]
    x = tensor(shape, dtype, layouts[0], 0)
    residual = tensor(shape, residual_dtype, layouts[1], 1) if draw(st.booleans()) else None
    weight_shape = shape[-2:] if per_head else shape[-1:]
    weight = tensor(weight_shape, weight_dtype, "contiguous", 2) if draw(st.booleans()) else None
    bias = tensor(weight.shape, weight_dtype, "contiguous", 3) if weight is not None and draw(st.booleans()) else None
    dy = tensor(shape, dy_dtype, layouts[2], 4)
    dh = tensor(shape, dtype, layouts[3], 5) if residual is not None and draw(st.booleans()) else None
    split = weight is None or not per_head
    forced = draw(st.none() | configs(False, split, WEIGHTS)), draw(st.none() | configs(True, split))
    spec = Norm(kind, EPS, offset, dtype)

    y, h, mean, rstd = triton_norm.forward(spec, x, weight, bias, residual, True, config=forced[0])
    n = shape[-1]
    if residual is not None:
        close("h", h, x.double() + residual.double(), 1)
    seen = x if h is None else h
    h64, w64, b64 = double(seen), double(weight), double(bias)
    y64 = norm(kind, h64, w64, b64, offset)
    # A row of one equal value has no variance but the rounding of its mean: eps is all that keeps it finite.
    close("y", y, y64.detach(), n)
    variance = h64.var(-1, correction=0) if kind == "layer" else h64.square().mean(-1)
    close("rstd", rstd, (variance + EPS).rsqrt().detach(), n)
    if kind == "layer":
        close("mean", mean, h64.mean(-1).detach(), n)

    needs = draw(st.booleans()), weight is not None and draw(st.booleans()), bias is not None and draw(st.booleans())
    arguments = (spec, dy, seen, weight, mean, rstd, dh, dtype, *needs)
    got = triton_norm.backward(*arguments, config=forced[1])
    again = triton_norm.backward(*arguments, config=forced[1])
    total = (y64 * dy.double()).sum() + (0 if dh is None else (h64 * dh.double()).sum())
    total.backward()
    wanted = (h64.grad, None if w64 is None else w64.grad, None if b64 is None else b64.grad)
    count = x.numel() // n
    for name, need, value, repeated, want in zip(("dx", "dw", "db"), needs, got, again, wanted, strict=True):
        assert (value is not None) == need
        if need:
            assert value.is_contiguous() and torch.equal(value, repeated)
            close(name, value, want, (n if name == "dx" else count) * (1 + int(rstd.max())))


@pytest.mark.parametrize(
    ("kind", "dtype", "n", "split"),
    [
        pytest.param("rms", torch.bfloat16, 77, 1, marks=pytest.mark.long),
        pytest.param("layer", torch.bfloat16, 77, 2, marks=pytest.mark.long),
        ("rms", torch.float32, 66, 2),
        ("layer", torch.bfloat16, 92, 1),
    ],
    ids=str,
)
def test_rows_that_begin_anywhere_within_16_bytes(kind, dtype, n, split):
    """What lies before and behind each row, its neighbours and the memory around the tensor, changes nothing: infinite
    there, and as before where it is written. Several steps a program, and a last one that only some have."""
    m = 9

    def amid(seed):
        memory = torch.full((m * n + 64,), torch.inf, dtype=dtype)
        rows = memory[32 : 32 + m * n].view(m, n)
        return rows.copy_(tensor((m, n), dtype, "contiguous", seed))

    x, dy, dh = amid(0), amid(1), amid(2)
    weight, bias = tensor((n,), dtype, "contiguous", 3), tensor((n,), dtype, "contiguous", 4)
    spec = Norm(kind, EPS, 0.0, dtype)
    ahead = Config(1, 32, 1, 1, 4 if split > 1 else 0, split)
    y, _, mean, rstd = triton_norm.forward(spec, x, weight, bias, None, False, config=ahead)
    twice = triton_norm.forward(spec, x, weight, bias, None, False, config=replace(ahead, exchange="launch"))
    assert torch.equal(twice[0], y) and torch.equal(twice[3], rstd)
    plan = triton_norm.forward_plan(spec, x, weight, bias, None, False, replace(ahead, exchange="launch"))
    (shift,) = {launch.constants["SHIFT"] for launch in plan.launches}
    assert shift == 16 // dtype.itemsize
    back = Config(1, 32, 1, 2, 4, split)
    dx, dw, db = triton_norm.backward(spec, dy, x, weight, mean, rstd, dh, dtype, True, True, True, config=back)
    x64, w64, b64 = double(x), double(weight), double(bias)
    y64 = norm(kind, x64, w64, b64, 0.0)
    ((y64 * dy.double()).sum() + (x64 * dh.double()).sum()).backward()
    for name, got, want, terms in (
        ("y", y, y64.detach(), n), ("dx", dx, x64.grad, n), ("dw", dw, w64.grad, m), ("db", db, b64.grad, m)
    ):  # fmt: skip
        close(name, got, want, terms)


@pytest.mark.parametrize("programs", [1, 3, 4, 5, 17])
def test_sums_over_any_number_of_programs(programs, monkeypatch):
    monkeypatch.setattr(plans, "INTERPRETED_HARDWARE", plans.INTERPRETED_HARDWARE._replace(processors=1))
    x, dy = (tensor((programs * 2 - 1, 20), torch.float32, "contiguous", seed) for seed in (0, 1))
    weight = torch.ones(20)
    rstd = torch.ones(len(x))
    config = Config(1, 16, 1, 1, programs)
    got = triton_norm.backward(
        Norm("layer", EPS, 0.0, x.dtype), dy, x, weight, torch.zeros(len(x)), rstd, None, x.dtype, True, True, True,
        config=config,
    )  # fmt: skip
    close("dw", got[1], (dy.double() * x.double()).sum(0), len(x))
    close("db", got[2], dy.double().sum(0), len(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_copied_only_where_two_levels_cannot_say_where_they_are(layout):
    x = tensor((4, 6, 3, 8), torch.float32, layout, 0)
    rows = rows_of(x, heads=3)
    assert (rows.tensor is x) == (layout != "permuted")
    r = torch.arange(72)
    start = ((r // rows.size) * rows.outer + (r % rows.size) * rows.inner) * rows.align
    flat = rows.tensor.as_strided((rows.tensor.untyped_storage().size() // 4 - x.storage_offset(),), (1,))
    assert torch.equal(flat[start[:, None] + torch.arange(8)], x.reshape(72, 8))


@pytest.mark.parametrize("weight", ["with", "after"])
def test_programs_of_many_steps_load_the_weight_before(weight):
    x = torch.ones(4, 16)
    config = Config(1, 16, 1, 1, 2, weight=weight)
    with pytest.raises(ValueError, match=f"weight={weight} is for programs of one step, not programs=2; use 0"):
        triton_norm.forward(Norm("rms", EPS, 0.0, x.dtype), x, torch.ones(16), None, None, False, config=config)
