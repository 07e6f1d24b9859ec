"""Fake tensors have the memory layout that the real ones will have: optimizers and views go by it."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture.fake import fake_mode

aten = torch.ops.aten
SHAPE = (6, 4)


def laid_out(how, dtype=torch.float32):
    t = (torch.rand(SHAPE) * 0.8 + 0.1).to(dtype)
    return {"rows": t, "columns": t.t().contiguous().t(), "one column": t[:, :1].expand(SHAPE)}[how]


OPERATORS = {
    "elu": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "softplus": lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0),
    "hardswish": aten.hardswish_backward,
    "hardsigmoid": aten.hardsigmoid_backward,
    "logit": lambda g, x: aten.logit_backward(g, x, None),
    "leaky relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "threshold": lambda g, x: aten.threshold_backward(g, x, 0.0),
    "xlogy": aten.xlogy,
    "xlogy, of a row": lambda g, x: aten.xlogy(g, x[0]),
    "xlogy, of a number": lambda g, x: aten.xlogy(x[0, 0], g),
    "huber": lambda g, x: aten.huber_loss(g, x, 0, 1.0),
    "cross entropy": lambda g, x: aten.binary_cross_entropy(g, x, None, 0),
    "cross entropy, backward": lambda g, x: aten.binary_cross_entropy_backward(g, g * 0.5, x, None, 0),
    "log sigmoid": lambda g, x: aten.log_sigmoid_forward(x)[0],
    "squares, backward": lambda g, x: aten.mse_loss_backward(g, g * 2, x, 0),
    "huber, backward": lambda g, x: aten.huber_loss_backward(g, g * 2, x, 0, 1.0),
    "smooth l1, backward": lambda g, x: aten.smooth_l1_loss_backward(g, g * 2, x, 0, 1.0),
    "log softmax, backward": lambda g, x: aten._log_softmax_backward_data(g, x, -1, torch.float32),
    "layer norm, backward": lambda g, x: aten.native_layer_norm_backward(
        g, x, [4], g.new_zeros(6, 1), g.new_ones(6, 1), None, None, [True, False, False]
    )[0],
    # What torch's own fake kernels get right.
    "silu": aten.silu_backward,
    "gelu": aten.gelu_backward,
    "softmax, backward": lambda g, x: aten._softmax_backward_data(g, x, -1, torch.float32),
    "where": lambda g, x: aten.where(g > 0.5, x, g),
}


IN_HALF = {
    "add": torch.add,
    "subtract": torch.sub,
    "subtract in turn": torch.rsub,
    "divide and round": lambda g, x: torch.div(g, x, rounding_mode="floor"),
    "divide by a number and round": lambda g, x: g // 2,
    "copy": lambda g, x: g.clone(memory_format=torch.contiguous_format),
    "compare": torch.gt,
    "maximum": torch.maximum,
    "clamp": lambda g, x: torch.clamp(g, x - 1, x),
    "addcmul": lambda g, x: torch.addcmul(g, x, x),
    "copysign": torch.copysign,
    "tanh": aten.tanh_backward,
    "sigmoid": aten.sigmoid_backward,
    "mish": aten.mish_backward,
    "squares": lambda g, x: aten.mse_loss(g, x, 0),
    "fill": lambda g, x: torch.masked_fill(g, x > 0.5, 0.0),
    "dropout": lambda g, x: aten.native_dropout_backward(g, x > 0.5, 2.0),
    "repeat heads": lambda g, x: x.t()[:, None].expand(4, 3, 6).reshape(12, 6),  # a copy in rows, and a view of it
    **{name: OPERATORS[name] for name in ("silu", "gelu", "where", "elu", "threshold", "xlogy, of a number")},
}


@pytest.mark.parametrize("name", IN_HALF)
def test_in_half_precision_expanded_arguments_decide_as_in_eager(name):
    """Torch's fake kernels compute in fp32, and went by the copy of an expanded argument."""
    check_layouts(IN_HALF[name], "cpu", torch.bfloat16)


def test_writing_an_expanded_tensor_in_half_precision_returns_the_tensor_written():
    mode = fake_mode()
    with mode:
        part, rows = torch.empty(6, 8, dtype=torch.bfloat16)[:, :4], torch.empty(6, 1, dtype=torch.bfloat16)
        assert mode.dispatch(aten.mul_.Tensor, (), (part, rows.expand(6, 4))) is part


def test_a_sum_and_a_convolution_read_the_same_rows_in_bf16():
    """The sum of an expanded gradient and a transposed one is transposed, and is no view of rows."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.conv = nn.Linear(4, 6), nn.Conv1d(6, 6, 1)

        def forward(self, x):
            rows = self.up(x) * 2
            return self.conv(rows.transpose(1, 2)).square().mean() + rows.sum(1).square().mean()

    model = Model().bfloat16()
    x, twin = torch.randn(3, 5, 4).bfloat16(), copy.deepcopy(model)
    loss = model(x)
    loss.backward()
    step = stepgraph.capture(twin, lambda model, x: model(x), x, passes="exact")
    assert torch.equal(step(x), loss)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_results_lie_in_memory_as_real_ones(name):
    check_layouts(OPERATORS[name], "cpu")


def check_layouts(operator, device, dtype=torch.float32):
    for layouts in itertools.product(("rows", "columns", "one column"), repeat=2):
        inputs = [laid_out(how, dtype).to(device) for how in layouts]
        mode = fake_mode()
        with mode:
            fake = operator(*map(mode.from_tensor, inputs))
        real = operator(*inputs)
        assert (fake.stride(), fake.shape, fake.dtype) == (real.stride(), real.shape, real.dtype), layouts


SIZES = [(4, 6, 5), (4, 6, 5, 7), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_batch_norm_in_every_order_of_memory(sizes):
    """Channels last or contiguous on a CPU, whatever order comes in."""
    ones, zeros = torch.ones(sizes[1]), torch.zeros(sizes[1])
    for order in list(itertools.permutations(range(len(sizes))))[:: 5 if len(sizes) > 4 else 1]:
        x = torch.randn([sizes[i] for i in order]).permute([order.index(i) for i in range(len(sizes))])
        grads = torch.randn(sizes), torch.randn_like(x)

        def results(*tensors):
            x, *grads = tensors
            out, mean, rstd = aten.native_batch_norm(x, ones, zeros, None, None, True, 0.1, 1e-5)
            options = (ones, None, None, mean, rstd, True, 1e-5, [True] * 3)
            return [out, *(aten.native_batch_norm_backward(grad, x, *options)[0] for grad in grads)]

        mode = fake_mode()
        with mode:
            fakes = results(*map(mode.from_tensor, (x, *grads)))
        assert [t.stride() for t in fakes] == [t.stride() for t in results(x, *grads)], order


class Einsum(nn.Module):
    """The gradient of its weight comes transposed."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(SHAPE)), function

    def forward(self, x):
        return torch.einsum("bi,oi->bo", x, self.function(self.weight))


@pytest.mark.parametrize("passes", [[], "exact"])
@pytest.mark.parametrize("function", [F.elu, F.softplus, F.hardswish, F.relu6, F.silu])
def test_gradients_that_come_transposed(check_training, function, passes):
    check_training(
        Einsum(function),
        lambda model, batch: model(batch["x"]).square().mean(),
        [{"x": torch.randn(3, 4)} for _ in range(2)],
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True),
        passes=passes,
    )


def test_a_view_after_a_transposed_activation(check_training):
    check_training(
        nn.Linear(4, 2),
        lambda model, batch: F.softplus(model(batch["x"])).transpose(1, 2).contiguous().square().sum(),
        [{"x": torch.randn(2, 12, 4)} for _ in range(2)],
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        passes=[],
    )


@pytest.mark.parametrize(
    "given, shape", [(((2, 1, 32), (32, 1, 1)), (2, 1, 32)), (((2, 1, 32), (32, 2, 1)), (2, 1, 1, 32))]
)
def test_views_with_dimensions_of_size_1(given, shape):
    """Products choose how they read a matrix by the strides of dimensions of size 1 too."""
    real = torch.empty_strided(*given).view(shape)
    with fake_mode() as mode:
        viewed = (x := torch.empty_strided(*given)).view(shape)
    assert viewed.fake_mode is mode and viewed.stride() == real.stride()
    assert viewed.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_a_pooled_sequence_has_eagers_bits(check_training):
    """The Compact Convolutional Transformer's pooling, whose backward has a matrix of one row."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.pool, self.down = nn.Linear(32, 32), nn.Linear(32, 1), nn.Linear(32, 5)

        def forward(self, x):
            x = self.up(x).relu()
            weights = F.softmax(self.pool(x), dim=1)
            return self.down(torch.einsum("b n, b n d -> b d", weights.squeeze(-1), x))

    batches = [{"x": torch.randn(2, 64, 32)} for _ in range(2)]
    loss = lambda model, batch: model(batch["x"]).square().mean()  # noqa: E731
    check_training(Pooled(), loss, batches, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), steps=3)
