"""Public functions against float64 references of torch, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels import layer_norm, qk_norm, rms_norm
from tests.kernels.norm.cases import EPS, close, exact, rows

NORMS = {"rms": rms_norm, "layer": layer_norm}
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["rms", "layer"]),
    leading=st.sampled_from([(), (1,), (7,), (2, 3), (2, 3, 4)]),
    n=st.sampled_from([1, 2, 5, 64, 257]),
    dtypes=st.tuples(DTYPES, DTYPES, DTYPES),
    parts=st.sampled_from(["", "w", "wb", "wr", "wbr", "r"]),
    offset=st.sampled_from([0.0, 1.0]),
    per_head=st.booleans(),
    prenorm=st.booleans(),
)
def test_forward_and_gradients_match_float64(kind, leading, n, dtypes, parts, offset, per_head, prenorm):
    shape = (*leading, n)
    weight_shape = shape[-2:] if per_head and leading else (n,)
    x = rows(*shape, dtype=dtypes[0], seed=1)
    weight = rows(*weight_shape, dtype=dtypes[1], seed=2) if "w" in parts else None
    bias = rows(*weight_shape, dtype=dtypes[1], seed=3) if "b" in parts else None
    residual = rows(*shape, dtype=dtypes[2], seed=4) if "r" in parts else None
    # Rows of one element make layer norm zero over zero, rows of two make it all sign: eps tames the division.
    eps = 0.1
    ours, theirs = leaves(x, weight, bias, residual), leaves(x, weight, bias, residual)

    result = NORMS[kind](*ours, eps, weight_offset=offset, prenorm=prenorm)
    y, h = result if prenorm else (result, None)
    expected, expected_h = exact(kind, *theirs, offset, eps)
    close(y, expected, n)
    assert y.dtype == x.dtype and y.is_contiguous()
    if prenorm:
        close(h, expected_h, n)
        assert h.dtype == (x if residual is None else residual).dtype

    dy = rows(*shape, dtype=y.dtype, seed=5)
    outputs, gradients = [y], [dy]
    loss = (expected * dy.double()).sum()
    if prenorm:
        dh = rows(*shape, dtype=h.dtype, seed=6)
        outputs, gradients = [y, h], [dy, dh]
        loss = loss + (expected_h * dh.double()).sum()
    torch.autograd.backward(outputs, gradients)
    loss.backward()
    m = x.numel() // n
    for name, a, b in zip("xwbr", ours, theirs, strict=True):
        if a is None:
            continue
        assert a.grad.dtype == a.dtype
        # theirs.grad is rounded to the same dtype by autograd: one more rounding, covered by the factor 4. Gradients of
        # x scale with rstd, at most 1 / sqrt(eps) ~ 3.2, and with the weight, of order one with tails near 4.
        close(a.grad / 8, b.grad / 8, n, m if name in "wb" else 1)


def test_layer_norm_survives_a_large_mean():
    """A variance as mean(x^2) - mean(x)^2 would lose all digits here."""
    x = rows(4, 256) + 1000.0
    # The mean, near 1000, is stored in float32: to half an ulp, 1000 * 2^-24 = 6e-5, and its sum errs by as much again.
    torch.testing.assert_close(layer_norm(x).double(), F.layer_norm(x.double(), (256,)), rtol=0, atol=2e-4)


def test_rows_of_any_stride_are_read_as_they_are():
    fused = rows(2, 5, 3, 4, 16, grad=True)
    q = fused[:, :, 1]
    weight = rows(16, seed=1)
    close(rms_norm(q, weight, eps=EPS), exact("rms", q, weight, None, None)[0], 16)
    transposed = q.transpose(1, 2)
    close(layer_norm(transposed, weight), exact("layer", transposed, weight, None, None)[0], 16)
    rms_norm(transposed, weight).sum().backward()
    assert fused.grad[:, :, 0].abs().max() == 0 and fused.grad[:, :, 1].abs().max() > 0


def test_gradient_that_autograd_expands():
    """``sum`` sends a gradient of stride 0; a transposed consumer sends one whose last stride is not 1."""
    x = rows(6, 8, grad=True)
    rms_norm(x).sum().backward()
    (rms_norm(x).t() * rows(8, 6, seed=2)).sum().backward()
    reference = rows(6, 8, grad=True)
    F.rms_norm(reference, (8,)).sum().backward()
    (F.rms_norm(reference, (8,)).t() * rows(8, 6, seed=2)).sum().backward()
    close(x.grad, reference.grad, 8)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "residual"])
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_frozen_inputs_get_no_gradient(norm, frozen):
    tensors = {"x": rows(4, 8), "weight": rows(8, seed=1), "bias": rows(8, seed=2), "residual": rows(4, 8, seed=3)}
    full = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    part = {name: t.clone().requires_grad_(name != frozen) for name, t in tensors.items()}
    norm(**full).pow(3).sum().backward()
    norm(**part).pow(3).sum().backward()
    for name in tensors:
        assert part[name].grad is None if name == frozen else torch.equal(part[name].grad, full[name].grad)


def test_residual_wider_than_x_keeps_its_gradient():
    x = rows(4, 32, dtype=torch.bfloat16, grad=True)
    residual = rows(4, 32, seed=1, grad=True)
    y, h = rms_norm(x, None, None, residual, prenorm=True)
    dh = rows(4, 32, seed=2)
    torch.autograd.backward([h], [dh])
    assert torch.equal(residual.grad, dh) and x.grad.dtype == torch.bfloat16
    residual.grad = None
    y, h = rms_norm(x, None, None, residual, prenorm=True)
    torch.autograd.backward([y.float(), h], [torch.zeros(4, 32), dh])
    assert torch.equal(residual.grad, dh), "rounded to bfloat16 on the way"


def test_out_dtype():
    x = rows(3, 8, dtype=torch.bfloat16)
    y = rms_norm(x, out_dtype=torch.float32)
    close(y, exact("rms", x, None, None, None, eps=torch.finfo(torch.float32).eps)[0], 8)
    assert y.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_eps_none_is_what_torch_takes(dtype):
    x = (rows(4, 16) * 1e-4).to(dtype)
    expected = F.rms_norm(x.double(), (16,), eps=None if dtype == torch.float64 else torch.finfo(torch.float32).eps)
    close(rms_norm(x), expected, 16)
    close(rms_norm(x), F.rms_norm(x, (16,)), 16)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(norm, shape):
    x = torch.empty(shape, requires_grad=True)
    weight = rows(8, grad=True)
    y, h = norm(x, weight, residual=torch.empty(shape), prenorm=True)
    assert y.shape == h.shape == shape
    (y.sum() + h.sum()).backward()
    assert x.grad.shape == shape and torch.equal(weight.grad, torch.zeros(8))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_qk_norm(dtype, per_head):
    qkv = rows(2, 5, 8, 16, dtype=dtype, grad=True)
    q, k, _ = qkv.split([4, 2, 2], dim=2)
    wq, wk = (rows(*((h, 16) if per_head else (16,)), seed=h, grad=True) for h in (4, 2))
    reference = [t.detach().clone().requires_grad_() for t in (qkv, wq, wk)]
    rq, rk, _ = reference[0].split([4, 2, 2], dim=2)
    yq, yk = qk_norm(q, k, wq, wk, EPS, weight_offset=1.0)
    eq, ek = (exact("rms", t, w, None, None, 1.0)[0] for t, w in ((rq, reference[1]), (rk, reference[2])))
    close(yq, eq, 16)
    close(yk, ek, 16)
    dq, dk = rows(*yq.shape, dtype=dtype, seed=5), rows(*yk.shape, dtype=dtype, seed=6)
    torch.autograd.backward([yq, yk], [dq, dk])
    ((eq * dq.double()).sum() + (ek * dk.double()).sum()).backward()
    for ours, theirs in zip((qkv, wq, wk), reference, strict=True):
        close(ours.grad, theirs.grad, 16, 40)


def test_qk_norm_of_which_only_one_is_used():
    q, k = rows(2, 4, 8, grad=True), rows(2, 2, 8, seed=1, grad=True)
    qk_norm(q, k)[0].square().sum().backward()
    assert q.grad.abs().max() < 1e-3 and k.grad is None


X = torch.zeros(4, 6, 8)
META = torch.empty(8, device="meta")
REFUSED = {
    "weight shape": (lambda: rms_norm(X, torch.ones(7)), r"weight has shape \(7,\); allowed .* \(8,\) or \(6, 8\): "),
    "weight of a longer shape": (lambda: rms_norm(X, torch.ones(4, 6, 8)), r"weight has shape \(4, 6, 8\)"),
    "dtype of x": (
        lambda: rms_norm(X.long(), eps=1e-5),
        "x has dtype torch.int64; allowed are float16, bfloat16, float32",
    ),
    "float64 beside float32": (lambda: rms_norm(X, torch.ones(8).double()), "weight has dtype torch.float64"),
    "fp8": (
        lambda: layer_norm(X, out_dtype=torch.float8_e4m3fn),
        "out_dtype is torch.float8_e4m3fn; allowed are float16",
    ),
    "out_dtype": (
        lambda: layer_norm(X, out_dtype=torch.int8),
        "out_dtype is torch.int8; allowed are float16, bfloat16, float32: ",
    ),
    "device": (lambda: rms_norm(X, META), r"weight is on meta, x on cpu; .*weight.to\(x.device\)"),
    "strides": (lambda: rms_norm(X.transpose(1, 2)), r"x has stride 8 in its last dimension; .* x.contiguous\(\)"),
    "residual strides": (
        lambda: rms_norm(torch.zeros(4, 8, 6), None, None, X.transpose(1, 2)),
        r"residual has stride .* residual.contiguous\(\)",
    ),
    "residual shape": (lambda: rms_norm(X, None, None, X[:1]), r"residual has shape \(1, 6, 8\); .* \(4, 6, 8\)"),
    "bias alone": (lambda: layer_norm(X, None, torch.ones(8)), "bias is given without a weight"),
    "bias shape": (lambda: layer_norm(X, torch.ones(8), torch.ones(6, 8)), r"bias is \(6, 8\) .* \(8,\)"),
    "bias dtype": (
        lambda: layer_norm(X, torch.ones(8), torch.ones(8).half()),
        r"bias is \(8,\) torch.float16; .* torch.float32",
    ),
    "no dimension": (lambda: rms_norm(torch.tensor(1.0)), r"x has shape \(\); allowed is \(\.\.\., N\)"),
    "empty rows": (lambda: rms_norm(X[..., :0]), r"x has shape \(4, 6, 0\)"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("grad", [False, True])
def test_refuses_in_one_line(case, grad):
    call, message = REFUSED[case]
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and "; allowed" in text and ": " in text


def test_first_and_second_gradients():
    def leaf(*shape, seed):
        return rows(*shape, dtype=torch.float64, seed=seed, grad=True)

    arguments = leaf(3, 2, 5, seed=0), leaf(5, seed=1), leaf(5, seed=2), leaf(3, 2, 5, seed=3)
    for norm in (rms_norm, layer_norm):

        def call(*tensors, norm=norm):
            return norm(*tensors, 1e-3, weight_offset=1.0, prenorm=True)

        assert torch.autograd.gradcheck(call, arguments)
        assert torch.autograd.gradgradcheck(call, arguments)
    pair = arguments[0], leaf(3, 3, 5, seed=4), arguments[1], arguments[2]
    assert torch.autograd.gradcheck(lambda *t: qk_norm(*t, 1e-3), pair)
    assert torch.autograd.gradgradcheck(lambda *t: qk_norm(*t, 1e-3), pair)
