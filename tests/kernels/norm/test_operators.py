"""The operators under everything that watches operators: opcheck, the compiler, traces, function transforms, modes."""

import functools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stepgraph.kernels import RMSNorm, layer_norm, qk_norm, rms_norm
from tests.kernels.norm.cases import EPS, close, exact, rows

ops = torch.ops.stepgraph
F32, BF16 = torch.float32, torch.bfloat16
RMS, LAYER = (F32, "rms", 1e-5, 0.0), (F32, "layer", 1e-5, 1.0)


def leaf(*shape, seed=0, dtype=F32):
    return rows(*shape, dtype=dtype, seed=seed, grad=True)


def forward_cases():
    x, w, heads, r = leaf(3, 4, 8), leaf(8, seed=1), leaf(4, 8, seed=2), leaf(3, 4, 8, seed=3, dtype=BF16)
    bias = leaf(8, seed=4)
    return {
        "rms": (x, w, None, None, *RMS, False),
        "rms without weight": (x, None, None, None, *RMS, False),
        "rms with residual": (x, w, None, r, *RMS, True),
        "rms per head": (x, heads, None, None, *RMS, False),
        "rms of a slice": (leaf(3, 4, 16)[..., 4:12].detach().requires_grad_(), w, None, None, *RMS, False),
        "layer": (x, w, bias, None, *LAYER, False),
        "layer with residual": (x, w, bias, r, BF16, *LAYER[1:], True),
        "no rows": (leaf(0, 8), w, None, None, *RMS, False),
    }


@pytest.mark.parametrize("case", forward_cases())
def test_opcheck_norm(case):
    opcheck(ops.norm.default, forward_cases()[case])


@pytest.mark.parametrize("dh", [False, True])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_opcheck_norm_backward(kind, needs, dh):
    norm = RMS if kind == "rms" else LAYER
    x, w = leaf(3, 4, 8), leaf(8, seed=1)
    _, _, mean, rstd = ops.norm(x.detach(), w.detach(), None, None, *norm, False)
    dh = leaf(3, 4, 8, seed=3) if dh else None
    opcheck(ops.norm_backward.default, (leaf(3, 4, 8, seed=2), x, w, mean, rstd, dh, *norm, BF16, *needs))


# Every public function, as a function of the same tensors.

X, W, B, R = (3, 4, 16), (16,), (16,), (3, 4, 16)


def fused(x, w, b, r):
    y, h = layer_norm(x, w, b, r, prenorm=True)
    return rms_norm(y, w, weight_offset=1.0) + h


def pair(x, w, b, r):
    q, k = qk_norm(x[..., :2, :], r.to(x.dtype), w, b)
    return torch.cat([q, k], dim=-2)


def plain(x, w, b, r):
    return rms_norm(x, w)


def no_weight(x, w, b, r):
    return layer_norm(x) + rms_norm(r)


FUNCTIONS = {f.__name__: f for f in (fused, pair, plain, no_weight)}


def run(function, dtype, shape=X):
    tensors = [
        leaf(*shape, dtype=dtype),
        leaf(16, seed=1),
        leaf(16, seed=2),
        leaf(*shape, seed=3, dtype=dtype),
    ]
    y = function(*tensors)
    (y.float() * rows(*y.shape, seed=4)).sum().backward()
    return [y.detach(), *(t.grad for t in tensors)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_equals_eager(name, dtype):
    """One graph, forward and backward, and the very same bits: the compiler only carries our operators around."""
    torch.compiler.reset()
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    for ours, eager in zip(run(compiled, dtype), run(FUNCTIONS[name], dtype), strict=True):
        assert (ours is None and eager is None) or torch.equal(ours, eager)


def test_inductor_and_dynamic_shapes():
    torch.compiler.reset()
    compiled = torch.compile(fused, fullgraph=True, dynamic=True)
    for leading in (3, 5):
        for ours, eager in zip(run(compiled, F32, (leading, 4, 16)), run(fused, F32, (leading, 4, 16)), strict=True):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_trace_of_a_step_with_fake_tensors(name):
    """Forward and backward in one graph of our operators, none of the reference's own, that computes the same."""

    def step(*tensors):
        y = FUNCTIONS[name](*tensors)
        used = [t for t in tensors]
        return [y, *torch.autograd.grad(y.float().square().sum(), used, allow_unused=True)]

    tensors = leaf(*X), leaf(*W, seed=1), leaf(*B, seed=2), leaf(*R, seed=3)
    graph = make_fx(step, tracing_mode="fake")(*tensors)
    targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert any(t.startswith("stepgraph.norm") and "backward" in t for t in targets), targets
    assert not any("rsqrt" in t for t in targets), targets
    for ours, eager in zip(graph(*tensors), step(*tensors), strict=True):
        assert (ours is None and eager is None) or torch.equal(ours, eager)


def test_dispatch_modes_see_the_operators():
    class Seen(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Seen():
        rms_norm(leaf(4, 8)).sum().backward()
    assert Seen.names.count("stepgraph::norm") == Seen.names.count("stepgraph::norm_backward") == 1


def test_checkpoint_that_saves_our_operators():
    """Selective checkpointing decides by operator, so it must see ours although this is eager."""
    counted: list[str] = []

    def policy(ctx, op, *args, **kwargs):
        counted.append(op.name())
        return CheckpointPolicy.MUST_SAVE if op is ops.norm.default else CheckpointPolicy.PREFER_RECOMPUTE

    x, w = leaf(4, 8), leaf(8, seed=1)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(lambda x, w: rms_norm(x, w).sin(), x, w, use_reentrant=False, context_fn=contexts)
    ours = torch.autograd.grad(y.sum(), (x, w))
    expected = torch.autograd.grad(rms_norm(x, w).sin().sum(), (x, w))
    assert all(map(torch.equal, ours, expected))
    assert "stepgraph::norm" in counted


def test_export():
    program = torch.export.export(RMSNorm(8), (rows(4, 8),))
    assert "stepgraph.norm" in program.graph_module.code
    assert torch.equal(program.module()(rows(4, 8)), RMSNorm(8)(rows(4, 8)))


def test_direct_and_dispatched_calls_agree_bitwise():
    x, w, b, r = leaf(6, 16, dtype=BF16), leaf(16, seed=1), leaf(16, seed=2), leaf(6, 16, seed=3)
    norm = (BF16, "layer", 1e-5, 1.0)
    direct = layer_norm(x, w, b, r, weight_offset=1.0, prenorm=True)
    dispatched = ops.norm(x, w, b, r, *norm, True)[:2]
    cotangents = rows(6, 16, seed=4, dtype=BF16), rows(6, 16, seed=5)
    gradients = [torch.autograd.grad(y, (x, w, b, r), cotangents) for y in (direct, dispatched)]
    for a, b in zip((*direct, *gradients[0]), (*dispatched, *gradients[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (2, None), (0, 0), (None, 1), (1, 1)])
@pytest.mark.parametrize("per_head", [False, True])
def test_vmap(kind, in_dims, per_head):
    """Against torch's own norms under vmap: a batch of inputs, of weights, or of both, wherever the batch is."""
    norm = rms_norm if kind == "rms" else layer_norm
    shape, weight_shape = [4, 3, 16], [3, 16] if per_head else [16]
    for dims, dim in ((shape, in_dims[0]), (weight_shape, in_dims[1])):
        if dim is not None:
            dims.insert(dim, 5)
    x, w = rows(*shape), rows(*weight_shape, seed=1)
    result = vmap(lambda x, w: norm(x, w, eps=EPS), in_dims)(x, w)
    close(result, vmap(lambda x, w: exact(kind, x, w, None, None)[0], in_dims)(x, w), 16)
    for wrt in (0, 1):
        ours = vmap(grad(lambda x, w: norm(x, w, eps=EPS).pow(3).sum(), wrt), in_dims)(x, w)
        theirs = vmap(grad(lambda x, w: exact(kind, x, w, None, None)[0].pow(3).sum(), wrt), in_dims)(x, w)
        # Cubes of values up to 4 * 4 (x times w): gradients of order a hundred.
        close(ours / 256, theirs / 256, 16, 12)


def test_a_residual_under_vmap_with_the_gradient_outside():
    x, r = torch.randn(5, 4, 8), torch.randn(5, 4, 8)

    def loss(norm, x):
        return vmap(norm)(x, r).pow(3).sum()

    ours = grad(lambda x: loss(lambda a, b: rms_norm(a, residual=b, eps=EPS), x))(x)
    theirs = grad(lambda x: loss(lambda a, b: torch.rms_norm(a + b, (8,), eps=EPS), x))(x)
    torch.testing.assert_close(ours, theirs)
    leaf = x.clone().requires_grad_()
    loss(lambda a, b: rms_norm(a, residual=b, eps=EPS), leaf).backward()
    torch.testing.assert_close(leaf.grad, theirs)


def test_gradient_per_sample_of_a_module():
    module, x = RMSNorm(16), rows(5, 4, 16)
    parameters = dict(module.named_parameters())

    def loss(parameters, x):
        return functional_call(module, parameters, (x,)).pow(3).sum()

    batched = vmap(grad(loss), (None, 0))(parameters, x)["weight"]
    for sample, expected in zip(x, batched, strict=True):
        torch.testing.assert_close(grad(loss)(parameters, sample)["weight"], expected)


def test_jacobian_and_hessian():
    x, w = rows(6, dtype=torch.float64), rows(6, seed=1, dtype=torch.float64)
    torch.testing.assert_close(
        jacrev(lambda x: rms_norm(x, w, eps=EPS))(x), jacrev(lambda x: F.rms_norm(x, (6,), w, EPS))(x)
    )
    torch.testing.assert_close(
        jacrev(jacrev(lambda x: rms_norm(x, w, eps=EPS).sum()))(x),
        jacrev(jacrev(lambda x: F.rms_norm(x, (6,), w, EPS).sum()))(x),
    )
    batch = rows(5, 6, dtype=torch.float64)
    torch.testing.assert_close(
        grad(lambda w: vmap(grad(lambda x: rms_norm(x, w, eps=EPS).pow(3).sum()))(batch).square().sum())(w),
        grad(lambda w: vmap(grad(lambda x: F.rms_norm(x, (6,), w, EPS).pow(3).sum()))(batch).square().sum())(w),
    )


def test_gradient_needs_the_sum():
    x, r = leaf(4, 8), leaf(4, 8, seed=1)
    with pytest.raises(ValueError, match="keep_h is False and a gradient is needed; allowed is True"):
        ops.norm(x, None, None, r, *RMS, False)


def test_import_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import torch; from stepgraph.kernels import rms_norm; "
    code += "print(rms_norm(torch.ones(2, 4)).sum().item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(8.0)
