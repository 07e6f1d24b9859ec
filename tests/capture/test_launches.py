"""Triton kernels that a model launches itself: recorded, never run on fake tensors, and bitwise eager's results.

Triton's interpreter runs the kernels on the CPU, in eager and from the graph.
"""

import copy
import dataclasses
import importlib
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.capture import trace_step
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import is_launch, is_mutating, is_pure

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")
autotuner = pytest.importorskip("triton.runtime.autotuner")

WIDTH = 8


def _forward(x, w, y, rstd, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0)
    total = 0.0
    for i in range(width):  # without tl.sum, which Triton's interpreter runs only if it was on from the start
        value = tl.load(x + row * width + i)
        total += value * value
    r = 1 / tl.sqrt(total / width + eps)
    tl.store(rstd + row, r)
    tl.store(y + row * width + at, values * r * tl.load(w + at, mask=inside, other=0.0), mask=inside)


def _backward(g, x, w, rstd, parts, width, BLOCK: tl.constexpr):
    """Writes the gradient over ``g``, and each row's part of the weight's to ``parts``."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    grad = tl.load(g + row * width + at, mask=inside, other=0.0)
    values = tl.load(x + row * width + at, mask=inside, other=0.0)
    r = tl.load(rstd + row)
    scaled = grad * tl.load(w + at, mask=inside, other=0.0)
    mean = 0.0
    for i in range(width):
        mean += tl.load(g + row * width + i) * tl.load(w + i) * tl.load(x + row * width + i) / width
    tl.store(parts + row * width + at, grad * values * r, mask=inside)
    tl.store(g + row * width + at, r * (scaled - values * r * r * mean), mask=inside)


def _scale(x, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


forward_kernel = interpreter.InterpretedFunction(_forward)
backward_kernel = triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["width"])})(
    interpreter.InterpretedFunction(_backward)
)
scale_kernel = interpreter.InterpretedFunction(_scale)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, rstd = torch.empty_like(rows), rows.new_empty(rows.shape[0])
        forward_kernel[(rows.shape[0],)](rows, w, y, rstd, rows.shape[1], eps, BLOCK=WIDTH, num_warps=1)
        ctx.save_for_backward(rows, w, rstd)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, g):
        rows, w, rstd = ctx.saved_tensors
        grad = g.reshape(rows.shape).clone()
        parts = torch.empty_like(rows)
        backward_kernel[lambda meta: (rows.shape[0],)](grad, rows, w, rstd, parts, rows.shape[1])
        return grad.view_as(g), parts.sum(0), None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.linear(Norm.apply(x, self.weight, 1e-6)), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, wrap=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("seen", torch.ones(WIDTH))
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block, x) if self.wrap else block(x)
        scale_kernel[(1,)](self.seen, WIDTH, 0.5, BLOCK=WIDTH)  # a buffer, in place
        return x * self.seen


def loss_fn(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def batches(n=2):
    return [{key: torch.randn(2, 3, WIDTH) for key in ("x", "y")} for _ in range(n)]


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def launches(step):
    return [node for node in step.nodes() if is_launch(node)]


@pytest.mark.parametrize("memory", ["none", "full"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_bitwise_eager(check_training, memory, checkpointed):
    def wrap(block, x):
        return checkpoint(block, x, use_reentrant=False)

    options = stepgraph.passes.StepOptions(passes="exact", memory=memory)
    model = Model(wrap if checkpointed else None)
    step = check_training(model, loss_fn, batches(), make_optimizer, max_grad_norm=1.0, passes=options, steps=3)
    # Without a GPU every tensor of a launch counts as written, and a checkpointed block that writes runs twice.
    assert len(launches(step.graph)) == (7 if checkpointed else 5)


def test_accumulated(check_training):
    check_training(Model(), loss_fn, [{k: v.repeat(2, 1, 1) for k, v in b.items()} for b in batches()],
                   make_optimizer, accumulate=2, steps=3)  # fmt: skip


@pytest.mark.long
def test_default_passes(monkeypatch):
    """Inductor leaves launches alone, and what they write: it would make one tensor of the two of zeros."""
    monkeypatch.setattr(stepgraph.compat, "triton_writes", lambda kernel, args, kwargs: [args[0]])  # as on a GPU

    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            first, second = torch.ones_like(x), torch.ones_like(x)
            scale_kernel[(1,)](first, x.numel(), 3.0, BLOCK=64)
            scale_kernel[(1,)](second, x.numel(), 5.0, BLOCK=64)
            ctx.save_for_backward(first, second)
            return x * first + second

        @staticmethod
        def backward(ctx, g):
            first, second = ctx.saved_tensors
            return g * first - second

    class Uses(nn.Linear):
        def forward(self, x):
            return Sums.apply(super().forward(x).tanh() * 2) + 1

    model, (batch, *_) = Uses(WIDTH, WIDTH), batches()
    step = stepgraph.capture(model, loss_fn, batch, passes="default")
    assert len(launches(step.graph)) == 2
    twin = copy.deepcopy(model)
    expected = loss_fn(twin, batch)
    expected.backward()
    torch.testing.assert_close(step(batch), expected.detach())
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)


def test_nodes_tell_what_they_are():
    step = trace_step(Model(), loss_fn, batches()[0], None).step
    nodes = launches(step)
    assert [node.target.__name__ for node in nodes] == ["_forward", "_forward", "_scale", "_backward", "_backward"]
    assert all(is_mutating(node) and not is_pure(node) for node in nodes)
    text = step.text()
    assert re.search(r"= triton\._forward\(.*# forward blocks\.0 test_launches\.py:\d+", text)
    assert re.search(r"= triton\._backward\(.*# backward blocks\.1 test_launches\.py:\d+", text)
    aliases = Aliases(step.graph)
    made = {aliases.root(written) for node in nodes for written in node.args}
    assert all(aliases.writes[root] for root in made)


def test_nothing_is_launched_while_tracing(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("launched")

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", refuse)
    trace_step(Model(), loss_fn, batches()[0], None)
    with pytest.raises(AssertionError, match="launched"):
        Model()(batches()[0]["x"])


def test_compiled_kernels_are_recorded():
    """Also without a GPU, on which `triton.jit` alone could launch."""
    kernel = triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])(
        triton.jit(_scale)
    )

    class Scaled(nn.Linear):
        def forward(self, x):
            y = super().forward(x).detach().clone()
            kernel[lambda meta: (triton.cdiv(y.numel(), meta["BLOCK"]),)](y, y.numel(), 2.0)
            return super().forward(x) * y

    step = trace_step(Scaled(WIDTH, WIDTH), loss_fn, batches()[0], None).step
    (node,) = launches(step)
    assert node.target.tunes and node.args[0].target is torch.ops.aten.clone.default


def test_what_a_kernel_writes_is_asked_of_torch(monkeypatch):
    """Torch's analysis gets every parameter of the kernel proper, those of decorators and defaults among them."""
    asked = []

    def analysis(kernel_id, constants_id, arguments, descriptors):
        asked.append((dict(arguments), constants_id, descriptors))
        return ["y"]

    def body(x, y, n, scale=2.0, EVEN: tl.constexpr = False, BLOCK: tl.constexpr = 16):
        pass

    wrap = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")
    monkeypatch.setattr(wrap, "get_mutated_tensors", analysis)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    heuristics = triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})(triton.jit(body))
    kernel = triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])(heuristics)
    x, y = torch.ones(64), torch.ones(64)
    (written,) = stepgraph.compat.triton_writes(kernel, (x, y), {"n": 64, "num_warps": 4})
    assert written is y
    ((arguments, _, descriptors),) = asked
    assert arguments.pop("x") is x and arguments.pop("y") is y and descriptors == {}
    assert arguments == {"n": 64, "scale": 2.0, "EVEN": True, "BLOCK": 32}
    assert stepgraph.compat.triton_writes(kernel, (x,), {"n": 64}) is None  # y is missing: the launch itself will say


def test_operators_around_kernels():
    """``wrap_triton`` in a model is a launch; in an operator of the model it is a part of that."""
    kernel = torch.library.wrap_triton(triton.jit(_scale))

    @torch.library.triton_op("stepgraph_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        kernel[(1,)](y, y.numel(), 2.0, BLOCK=64)
        return y

    class Scaled(nn.Linear):
        def forward(self, x):
            y = x.clone()
            kernel[(1,)](y, y.numel(), 2.0, BLOCK=64)
            return super().forward(x) * y * scaled(x)

    step = trace_step(Scaled(WIDTH, WIDTH), loss_fn, batches()[0], None).step
    (node,) = launches(step)
    assert node.args[0].target is torch.ops.aten.clone.default
    assert [n for n in step.nodes() if n.target is torch.ops.stepgraph_tests.scaled.default]
    assert not [n for n in step.nodes() if isinstance(n.target, torch._ops.HigherOrderOperator)]


def test_values_after_a_launch_are_not_known():
    class Reads(nn.Linear):
        def forward(self, x):
            positions = torch.arange(WIDTH, dtype=torch.float32)
            assert (positions >= 0).all()
            scale_kernel[(1,)](positions, WIDTH, -1.0, BLOCK=WIDTH)
            return super().forward(x) * positions if (positions >= 0).all() else x

    with pytest.raises(CaptureError, match="needs a tensor's value"):
        trace_step(Reads(WIDTH, WIDTH), loss_fn, batches()[0], None)


def test_other_kernels_are_refused_before_they_are_launched():
    class Raw(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.data_ptr()  # as cupy and the CuTe DSL take it
            return y

    with pytest.raises(CaptureError, match=r"test_launches.py:\d+: \.data_ptr\(\) .* torch.library.custom_op"):
        trace_step(Raw(WIDTH, WIDTH), loss_fn, batches()[0], None)


def test_tensor_descriptors_are_refused():
    @dataclasses.dataclass
    class Descriptor:  # as Triton's, which needs a GPU to be made
        base: torch.Tensor

    class Uses(nn.Linear):
        def forward(self, x):
            scale_kernel[(1,)](Descriptor(super().forward(x)), WIDTH, 1.0, BLOCK=WIDTH)
            return x

    with pytest.raises(CaptureError, match=r"_scale is launched on a Descriptor, .*custom_op"):
        trace_step(Uses(WIDTH, WIDTH), loss_fn, batches()[0], None)


def test_a_constant_that_a_kernel_writes_is_refused():
    workspace = torch.ones(WIDTH)

    class Writes(nn.Linear):
        def forward(self, x):
            y, rstd = torch.empty_like(x[0]), x.new_empty(3)
            forward_kernel[(3,)](x[0], self.weight, y, workspace, WIDTH, 1e-6, BLOCK=WIDTH)
            return super().forward(x) + rstd.sum()

    with pytest.raises(CaptureError, match="neither its parameter nor its buffer"):
        trace_step(Writes(WIDTH, WIDTH), loss_fn, batches()[0], None)
    assert workspace.eq(1).all()


def test_other_strides_than_traced_are_refused():
    step = trace_step(Model(), loss_fn, batches()[0], None).step
    launch = launches(step)[0].target
    tensors = [torch.empty(6, 32)[:, :8], torch.empty(8), torch.empty(6, 8), torch.empty(6)]
    with pytest.raises(RuntimeError, match=r"tensor 0 of the launch of _forward .*\(32, 1\).*\(8, 1\)"):
        launch(*tensors)
