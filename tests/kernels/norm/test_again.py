"""Calls made again give what calls made for the first time give. No GPU: the reference stands in for launches."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.kernels import layer_norm, rms_norm
from stepgraph.kernels.norm import again, derivatives, reference
from stepgraph.kernels.norm.spec import check

M, N = 6, 16


@pytest.fixture
def made(monkeypatch):
    """What was learned and what ran, by name."""
    names: list[str] = []

    def forward(norm, x, weight, bias):
        check(norm, x, weight, bias, None)
        names.append("learn")

        def run(x, weight, bias):
            names.append("forward")
            y, _, mean, rstd, _ = reference.forward(norm, x, weight, bias, None, True)
            return y, mean, rstd

        return run

    def backward(norm, dy, x, weight, mean, rstd, needs):
        names.append("learn backward")
        dtype = x.dtype

        def run(dy, x, weight, mean, rstd):
            names.append("backward")
            return reference.backward(norm, dy, x, weight, mean, rstd, None, dtype, *needs)

        return run

    def launched(*tensors):
        return derivatives.is_plain(*tensors) and tensors[0].numel() > 0

    monkeypatch.setattr(again, "_CALLS", {})
    monkeypatch.setattr(again, "_backend", lambda: SimpleNamespace(forward=forward, backward=backward))
    monkeypatch.setattr(again, "_launched", launched)
    return names


def tensors(*, bias=False, m=M, dtype=torch.float32, needs=(True, True, True)):
    torch.manual_seed(0)
    shapes = [(m, N), (N,), (N,)][: 2 + bias]
    return [torch.randn(s, dtype=dtype).requires_grad_(need) for s, need in zip(shapes, needs, strict=False)]


def results(function, given, dy):
    y = function(*given)
    wanted = [t for t in given if t.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, dy)] if wanted and y.requires_grad else [y]


def same(function, given, dy, monkeypatch):
    """``function`` gives the same bits as where no call is made again."""
    got = results(function, given, dy)
    with monkeypatch.context() as patch:
        patch.setattr(again, "norm", lambda *arguments: None)
        want = results(function, given, dy)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "needs", [(True, True, True), (False, True, True), (True, False, False), (False,) * 3], ids=str
)
@pytest.mark.parametrize(("function", "bias"), [(rms_norm, False), (rms_norm, True), (layer_norm, True)])
def test_same_results_and_learned_once(made, monkeypatch, function, bias, needs):
    given, dy = tensors(bias=bias, needs=needs), torch.randn(M, N)
    for _ in range(3):
        same(function, given, dy, monkeypatch)
    backward = any(needs[: 2 + bias])
    assert made.count("learn") == 1 and made.count("forward") == 3
    assert (made.count("learn backward"), made.count("backward")) == ((1, 3) if backward else (0, 0))


def test_every_difference_is_seen(made, monkeypatch):
    x, w = tensors()
    variants = [
        (x, w),
        (x.detach(), w),
        (x, torch.nn.Parameter(w.detach())),
        (x.detach().bfloat16().requires_grad_(), w),
        (x, w.detach().half().requires_grad_()),
        (torch.randn(M, 2 * N)[:, :N].requires_grad_(), w),
        (x.detach().view(2, 3, N).requires_grad_(), w),
        (torch.randn(2 * M, N).requires_grad_(), w),
        (torch.randn(3, 2, N).requires_grad_(), torch.randn(2, N).requires_grad_()),
    ]
    for given in variants * 2:
        same(rms_norm, given, torch.randn(given[0].shape).to(given[0].dtype), monkeypatch)
    assert made.count("forward") == 2 * len(variants)
    for options in ({"eps": 0.5}, {"weight_offset": 1.0}, {"out_dtype": torch.bfloat16}):
        dtype = options.get("out_dtype", torch.float32)
        same(lambda *given, o=options: rms_norm(*given, **o), (x, w), torch.randn(M, N).to(dtype), monkeypatch)
    assert made.count("forward") == 2 * len(variants) + 3


def test_no_gradients(made):
    x, w = tensors()
    y = rms_norm(x, w)
    with torch.no_grad():
        assert not rms_norm(x, w).requires_grad
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, w), y) and rms_norm(x, w).is_inference()
    assert rms_norm(x, w).requires_grad


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen = function
        return function(*args, **(kwargs or {}))


def test_modes_transforms_and_the_compiler_go_the_long_way(made):
    x, w = tensors()
    y = rms_norm(x, w)
    del made[:]
    with Mode() as mode:
        rms_norm(x, w)
    assert mode.seen is torch.ops.stepgraph.norm.default
    torch.func.grad(lambda x: rms_norm(x, w).sum())(x)
    torch.func.vmap(lambda x: rms_norm(x, w))(x)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")(x, w)
    assert torch.equal(compiled, y) and not made
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rms_norm(x, w), y)


def test_what_is_no_such_call_goes_the_long_way(made):
    x, w = tensors()
    rms_norm(x)
    rms_norm(x, w, residual=x, prenorm=True)
    rms_norm(torch.nn.Parameter(x), w)
    assert rms_norm(x[:0], w).shape == (0, N) and not made


@pytest.mark.parametrize("bad", ["shape", "dtype", "stride", "fp8"])
def test_bad_input_after_good(made, bad):
    x, w = tensors()
    rms_norm(x, w)
    given = {"shape": (x[:, 1:], w), "dtype": (x.long(), w), "stride": (x.T.contiguous().T, w), "fp8": (x, w)}[bad]
    with pytest.raises(ValueError, match="allowed") as error:
        rms_norm(*given, out_dtype=torch.float8_e4m3fn if bad == "fp8" else None)
    assert "\n" not in str(error.value)


def test_second_derivative(made):
    x, w = (t.double().detach().requires_grad_() for t in tensors())
    assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, eps=1e-5), (x, w))
    assert torch.autograd.gradgradcheck(lambda *t: rms_norm(*t, eps=1e-5), (x, w))
    assert "backward" in made


def test_gradients_laid_out_otherwise(made, monkeypatch):
    x, w = tensors()
    for dy in (torch.ones(()).expand(M, N), torch.randn(N, M).t(), torch.randn(M, 2 * N)[:, :N], torch.randn(M, N)):
        same(rms_norm, (x, w), dy, monkeypatch)
    assert made.count("learn backward") == made.count("backward") == 1


def test_saved_tensors_are_unpacked_once_and_checked(made, monkeypatch):
    """Hooks may return tensors laid out otherwise, and count how often they are asked."""
    x, w = torch.randn(M, 2 * N)[:, :N].requires_grad_(), tensors()[1]
    dy = torch.randn(M, N)
    same(rms_norm, (x, w), dy, monkeypatch)
    unpacked = []

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor.contiguous()

    want = results(rms_norm, (x, w), dy)
    del made[:]
    with saved_tensors_hooks(lambda t: t.detach(), unpack):
        got = results(rms_norm, (x, w), dy)
    assert len(unpacked) == 3 and "backward" not in made
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_gradient_arrives(made):
    """An undefined gradient is no zeros: those before it get none."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.sum()

        @staticmethod
        def backward(ctx, d):
            return None

    x, w = tensors()
    Stop.apply(rms_norm(x, w)).backward()
    assert x.grad is None and w.grad is None


def test_tensors_are_not_kept(made):
    given = tensors()
    results(rms_norm, given, torch.randn(M, N))
    kept = [weakref.ref(t) for t in given]
    del given
    gc.collect()
    assert again._CALLS and not any(ref() is not None for ref in kept)


def test_calls_are_forgotten_when_there_are_too_many_or_tuning_changes(made, monkeypatch):
    monkeypatch.setattr(again, "_MOST_CALLS", 4)
    for m in range(1, 12):
        rms_norm(*tensors(m=m))
        assert len(again._CALLS) <= 4
    x, w = tensors()
    y = rms_norm(x, w)
    y.sum().backward(retain_graph=True)
    again._forget()
    assert not again._CALLS and not y.grad_fn.call.backwards
    y.backward(torch.ones_like(y))
