"""The inductor pass on a CPU: close to eager, with eager's random numbers, and honest about what it left out."""

import copy
import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.passes import configured, get
from stepgraph.passes.compile.inductor import adds_in_any_order, differs_on_gpu, drawn_out_of_order, rounds_the_quotient
from tests.models.flex_llama import flex_llama

# Inductor's C++ compiler takes most of a test's time.
pytestmark = pytest.mark.slow

PASSES = configured(inductor="full")


def train(model, loss_fn, batches, make_optimizer, step=None):
    """Losses of a few steps, plain or captured, from one seed."""
    torch.manual_seed(3)
    losses, optimizer = [], None if step else make_optimizer(model)
    for batch in batches:
        if step:
            losses.append(step(batch).item())
            continue
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.get_rng_state()


def compare(model, loss_fn, batches, make_optimizer, *, parameters=1e-4, twice=True):
    """Inductor's kernels sum in another order than eager's: losses agree to about 1e-5 (fp32, sums of some hundred
    terms), parameters after four steps of lr 3e-3 to ``parameters``: AdamW turns a gradient near zero into a step of
    either sign, so a wrong gradient would show as up to 4 * 3e-3 = 1.2e-2."""
    eager, captured, again = model, copy.deepcopy(model), copy.deepcopy(model)
    expected, generator = train(eager, loss_fn, batches, make_optimizer)
    step = stepgraph.capture(captured, loss_fn, batches[0], make_optimizer(captured), passes=PASSES)
    actual, generator_after = train(captured, loss_fn, batches, make_optimizer, step)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=2e-5, atol=2e-5)
    assert torch.equal(generator, generator_after), "the random state does not advance as in eager"
    for (name, a), b in zip(eager.state_dict().items(), captured.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=parameters, msg=lambda m, name=name: f"{name}: {m}")
    if not twice:
        return step
    step = stepgraph.capture(again, loss_fn, batches[0], make_optimizer(again), passes=PASSES)
    assert train(again, loss_fn, batches, make_optimizer, step)[0] == actual, "two runs differ"
    return step


def report_of(step, name="inductor"):
    return next(r for r in step.report if r.name == name)


def test_llama(tools):
    step = compare(tools.llama(n_layers=1), tools.next_token_loss, tools.tokens(n=4), tools.fused_adamw)
    report = report_of(step)
    assert report.changed > 50 and report.compile_s > 0
    assert "compiled piece" in report.summary and f"compile {report.compile_s:.2f} s" in report.line()


def test_equal_blocks_share_what_was_compiled(tools):
    step = compare(tools.llama(n_layers=4), tools.next_token_loss, tools.tokens(n=2), tools.fused_adamw, twice=False)
    summary = report_of(step).summary
    pieces, structures = map(int, re.search(r"in (\d+) compiled pieces of (\d+) structures", summary).groups())
    assert pieces >= 9 and pieces - structures >= 3, summary


class Counting(nn.Module):
    """Blocks with a constant and a counter; one counter is also read through a view that is older than its update."""

    def __init__(self, viewed: int):
        super().__init__()
        self.blocks, self.viewed = nn.ModuleList(nn.Linear(16, 16) for _ in range(5)), viewed
        for k, block in enumerate(self.blocks):
            block.register_buffer("count", torch.full((16,), float(k)))

    def forward(self, x):
        seen = self.blocks[self.viewed].count.view(4, 4)
        for block in self.blocks:
            block.count.add_(1)
            x = block(x) * torch.tensor([0.5, 2.0] * 8) + block.count + seen.sum()
        return x


@pytest.mark.parametrize("viewed", [0, 2])
def test_blocks_with_constants_and_a_view_of_what_one_writes(tools, viewed):
    torch.manual_seed(2)
    model, batch = Counting(viewed), tools.vectors(6, 16)[0]
    eager = copy.deepcopy(model)
    step = stepgraph.capture(model, tools.mse, batch, passes=PASSES)
    for _ in range(2):
        torch.testing.assert_close(step(batch), tools.mse(eager, batch).detach(), rtol=1e-4, atol=1e-4)
    assert [b.count.tolist() for b in model.blocks] == [b.count.tolist() for b in eager.blocks]
    assert any("it writes into what a view reads" in note for note in report_of(step).notes)


class Mixed(nn.Module):
    """Dropout, batch norm's running statistics, a buffer written by hand, and a call of ``torch.utils.checkpoint``."""

    def __init__(self):
        super().__init__()
        # No bias before a batch norm: its gradient is zero but for rounding, and AdamW would step by its sign.
        self.up, self.norm, self.down = nn.Linear(12, 24, bias=False), nn.BatchNorm1d(24), nn.Linear(24, 12)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        h = nn.functional.dropout(nn.functional.gelu(self.norm(self.up(x))), 0.3)
        return x + checkpoint(lambda h: torch.dropout(self.down(h).tanh(), 0.2, True), h, use_reentrant=False)


def test_dropout_buffers_and_checkpoint(tools):
    step = compare(Mixed(), tools.mse, tools.vectors(8, 12, n=4), tools.fused_adamw)
    assert any("torch.utils.checkpoint" in note for note in report_of(step, "recompute").notes)


def test_gradients_without_an_optimizer(tools):
    """Outputs in a tuple, not one tensor; and a parameter that the loss does not reach."""
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
    batch = tools.vectors(6, 4)[0]
    loss_fn = lambda model, batch: tools.mse(model["used"], batch)  # noqa: E731
    step = stepgraph.capture(model, loss_fn, batch, passes=PASSES)
    loss = step(batch)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    expected = loss_fn(twin, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_compiled_pieces_let_go_of_what_they_read(tools):
    """A tensor that only the piece reads is freed while it runs: its list of arguments comes back empty."""
    batch = tools.vectors(6, 12)[0]
    step = stepgraph.capture(tools.Tower(n=1), tools.mse, batch, passes=PASSES)
    step(batch)
    executable = step.graph.executable
    calls = executable.graph.find_nodes(op="call_module")
    assert calls
    for node in calls:
        args = [torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in node.args]
        getattr(executable, node.target).boxed(args)
        assert args == []


@pytest.mark.long
def test_flex_attention_is_left_to_eager_on_a_cpu(tools):
    """Its backward is not compiled for CPUs; all around it is."""
    batch, plain = tools.tokens()[0], tools.llama(n_layers=1)
    models = [flex_llama(plain.config, batch["tokens"].shape[1]), plain]
    models[0].load_state_dict(models[1].state_dict())
    step = stepgraph.capture(models[0], tools.next_token_loss, batch, passes="default")
    loss, expected = step(batch), tools.next_token_loss(models[1], batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)
    report = report_of(step)
    assert report.changed > 40
    notes = [note for note in report.notes if "GPUs only" in note]
    for note, name in zip(notes, ("flex_attention", "flex_attention_backward"), strict=True):
        assert note.startswith(f"left to eager: {name} ({name}) in layers.0.attn at ")
        assert note.endswith("Inductor compiles its backward for GPUs only")


def test_an_operator_of_ours_stays_between_compiled_pieces(tools):
    """It writes the logits' gradient over what one piece made, and the next piece reads that."""
    model, batch = tools.llama(n_layers=1, dtype=torch.bfloat16), tools.tokens()[0]
    fuse = dataclasses.replace(get("fuse_loss"), needs_cuda=False)
    results = []
    for passes in ([], ["remove_noop_views", fuse, "inductor"]):
        twin = copy.deepcopy(model)
        step = stepgraph.capture(twin, tools.next_token_loss, batch, passes=passes)
        results.append((step(batch), {name: param.grad for name, param in twin.named_parameters()}))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-3, atol=0)
    for name, grad in results[0][1].items():
        error = (results[1][1][name].double() - grad.double()).norm() / grad.double().norm()
        assert error < 3e-2, f"{name}: {error:.1e}"  # bf16: a rounding is up to 2^-9, through some ten operators
    calls = tools.called(step)
    assert calls[:2] == ["compiled", "stepgraph.cross_entropy_.default"] and calls[2] == "compiled"
    assert calls[-1] == "aten.embedding_dense_backward.default" and calls.count("compiled") == 2


def test_sums_that_inductor_would_add_in_any_order_stay_with_eager(tools):
    """Its atomic additions leave other bits every time; eager's are the same."""
    torch.manual_seed(5)
    model, index = nn.Embedding(8, 16), torch.randint(0, 8, (20_000,))
    batch = {"index": index, "scale": torch.randn(20_000, 16)}
    loss_fn = lambda model, batch: (model(batch["index"]).tanh() * batch["scale"]).sum()  # noqa: E731
    step = stepgraph.capture(model, loss_fn, batch, passes=PASSES)
    step(batch)
    first = model.weight.grad.clone()
    for _ in range(5):
        model.zero_grad()
        step(batch)
        assert torch.equal(model.weight.grad, first)
    (note,) = [note for note in report_of(step).notes if "atomic" in note]
    assert note.startswith("left to eager: embedding_dense_backward")
    assert tools.called(step) == ["compiled", "aten.embedding_dense_backward.default"]


@pytest.mark.parametrize(
    "device, dtype, alone", [("cuda", None, True), ("cuda", torch.int64, False), ("cpu", None, False)]
)
def test_which_index_puts_stay_with_eager(device, dtype, alone):
    def count(table, index, values):
        return torch.index_put(table, (index,), values, accumulate=True)

    with FakeTensorMode():
        table, index = torch.zeros(8, 4, dtype=dtype, device=device), torch.zeros(6, dtype=torch.int64, device=device)
        graph = make_fx(count)(table, index, torch.ones(6, 4, dtype=dtype, device=device)).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    assert (adds_in_any_order(node) is not None) == alone


FP8, INT = torch.float8_e4m3fn, torch.int32


@pytest.mark.parametrize(
    "function, dtype, left",
    [
        (lambda x: x << 31, INT, False),
        (lambda x: x >> 32, INT, True),
        (lambda x: x << x, INT, True),
        (lambda x: x.to(FP8), torch.float32, True),
        (lambda x: x.clamp(-448, 448).to(FP8), torch.bfloat16, False),
        (lambda x: x.to(FP8), torch.float64, True),
        (lambda x: x.to(FP8), INT, True),
        (lambda x: x.float(), FP8, False),
        (lambda x: x.round().to(torch.int8), torch.float32, True),
        (lambda x: x.clamp(-127, 127).round().to(torch.int8), torch.float32, False),
        (lambda x: x.clamp(min=0).to(torch.uint8), torch.float32, True),
        (lambda x: x.clamp(-300, 300).to(torch.int8), torch.float32, True),
        (lambda x: F.relu6(x).to(torch.uint8), torch.float32, False),
        (lambda x: x.to(torch.int8), INT, False),
        (lambda x: torch.div(x, x, rounding_mode="trunc"), torch.float32, True),
        (lambda x: torch.div(x, 2.0, rounding_mode="trunc"), torch.float32, False),
        (lambda x: torch.div(x, x, rounding_mode="trunc"), INT, False),
    ],
)
def test_what_stays_with_eager_on_a_gpu(function, dtype, left):
    for device, expected in ("cuda", left), ("cpu", False):
        with FakeTensorMode():
            graph = make_fx(function)(torch.empty(8, 8, dtype=dtype, device=device)).graph
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        assert any(differs_on_gpu(node) or rounds_the_quotient(node) for node in nodes) == expected


def test_random_numbers_are_drawn_in_order():
    def draw(x):
        noise, times = torch.randn_like(x), torch.randint(0, 9, (8,))
        return torch.rand_like(x * times) + torch.randn_like(noise), torch.rand_like(x)

    graph = make_fx(draw)(torch.zeros(8)).graph
    names = [node.name for node in graph.nodes if node in drawn_out_of_order(graph)]
    assert names == ["randint", "randn_like_1"]


def test_recomputation_survives_compilation(tools):
    """Losses as eager's, with blocks computed again inside one compiled piece."""
    model = tools.Tower(p=0.0, n=1)
    batches = tools.vectors(6, 12, n=4)
    eager, captured = copy.deepcopy(model), copy.deepcopy(model)
    passes = configured(memory="full", inductor="full")
    make = functools.partial(torch.optim.AdamW, lr=3e-3, fused=True)
    step = stepgraph.capture(captured, tools.mse, batches[0], make(captured.parameters()), passes=passes)
    expected, _ = train(eager, tools.mse, batches, lambda m: make(m.parameters()))
    actual, _ = train(captured, tools.mse, batches, None, step)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=2e-5, atol=2e-5)


class Cached(nn.Module):
    """Keys behind an empty tensor, as a key-value cache gives them at its first use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        k = self.linear(x).view(2, 8, 4, 8).transpose(1, 2)
        k = torch.cat([torch.tensor([]), k], -2)
        pair = torch.cat([torch.tensor([]), k, k], -1)
        return (k @ k.transpose(2, 3) * 0.1).exp().sum() + pair.square().mean()


@pytest.mark.slow
def test_keys_behind_an_empty_tensor():
    model, x = Cached(), torch.randn(2, 8, 32)
    step = stepgraph.capture(model, lambda model, x: model(x), x, passes=["inductor"])
    torch.testing.assert_close(step(x), model(x).detach())


def test_numbers_are_drawn_before_they_are_read():
    """A dropout after a norm, at the end of a compiled piece: Inductor read its buffer before it drew into it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x):
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            y = nn.functional.dropout(h, 0.1)
            ones = y.new_zeros(32)
            ones[0:] = 1.0  # a write through a view is left to eager, so that a piece ends here
            return y * ones

    results = []
    for passes in ("exact", "default"):
        model, batch = Model(), {"x": torch.ones(2, 8, 32)}
        step = stepgraph.capture(model, lambda m, b: m(b["x"]).square().mean(), batch, passes=passes)
        torch.manual_seed(0)
        results.append((step(batch), model.weight.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    "unread",
    [lambda: torch.rand(1) > 0.5, lambda: torch.randint(9, (5,)), lambda: torch.bernoulli(torch.full((5,), 0.3))],
    ids=["rand", "randint", "bernoulli"],
)
def test_numbers_that_nobody_reads_are_drawn(unread):
    """As `module_dropout` of LoKr draws them: the draws that follow are eager's."""
    model, x = nn.Linear(6, 6), torch.randn(4, 6)

    def loss_fn(model, x):
        for _ in range(3):
            unread()
            x = x @ (model.weight * (torch.rand(6) > 0.5)[:, None])
        return x.square().mean()

    step = stepgraph.capture(model, loss_fn, x, passes=["dead_code", "inductor"])
    for seed in range(2):
        torch.manual_seed(seed)
        expected = loss_fn(model, x).detach()
        torch.manual_seed(seed)
        torch.testing.assert_close(step(x), expected)


def test_a_margin_loss_ends_at_a_rows_last_target():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    def loss_fn(model, x):
        return nn.functional.multilabel_margin_loss(model(x), torch.tensor([[3, 1, -1, 0], [2, -1, 1, 0]]))

    step = stepgraph.capture(model, loss_fn, x, passes=["inductor"])
    torch.testing.assert_close(step(x), loss_fn(model, x).detach())


@pytest.mark.parametrize("padding", [0, (1, 1), (1,)])
def test_the_gradient_of_pooling_windows_that_reach_past_the_end(padding):
    model, x = nn.Linear(6, 6), torch.randn(1, 2, 6, 6)

    def loss_fn(model, x):
        return nn.functional.avg_pool2d(model(x), (4, 4), (3, 3), padding, ceil_mode=True).sin().sum()

    loss_fn(model, x).backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    stepgraph.capture(model, loss_fn, x, passes=["inductor"])(x)
    torch.testing.assert_close(model.weight.grad, expected)


def shared(alias, i):
    rows = torch.linspace(-1, 1, 12) + i
    return {"x": rows[2:10].view(2, 4), "y": (rows if alias else rows.clone())[:8]}


def test_batches_whose_tensors_share_memory_or_do_not():
    """Inductor compiles a write for which inputs are views of each other, and keeps no such piece apart."""

    def loss_fn(model, batch):
        batch["y"].mul_(0.5)
        return model(batch["x"]).square().mean()

    model = nn.Linear(4, 4)
    step = stepgraph.capture(model, loss_fn, shared(True, 0), passes=["inductor"])
    for i, alias in enumerate((True, False, True, True)):
        torch.testing.assert_close(step(shared(alias, i)), loss_fn(model, shared(alias, i)).detach())


def test_tangents_that_torch_does_not_store():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)

    def loss_fn(model, x):
        return torch.func.jvp(model, (x,), (x.cos(),))[1].square().mean()

    step = stepgraph.capture(model, loss_fn, x, passes=["inductor"])
    torch.testing.assert_close(step(x), loss_fn(model, x).detach())


CHECKED = {
    "a negative row": (lambda y, b: y.index_select(0, b), torch.tensor([0, -1])),
    "a negative row that is added to": (lambda y, b: torch.zeros(3, 4).index_add(0, b, y), torch.tensor([0, -1])),
    "a negative row that is written": (lambda y, b: torch.zeros(3, 4).index_copy(0, b, y), torch.tensor([0, -1])),
    "a probability of 2": (lambda y, b: nn.functional.binary_cross_entropy(y.sigmoid()[0, :2], b.float()), 2),
    "an assertion": (lambda y, b: (torch._assert_async((b < 2).all()), y)[1], 2),
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_eager_refuses_is_refused(name):
    """Inductor takes negative positions for positions from the end, and leaves out other checks."""
    function, bad = CHECKED[name]

    def loss_fn(model, batch):
        return function(model(batch["x"]), batch["b"]).square().mean()

    batch = {"x": torch.randn(2, 4), "b": torch.tensor([0, 1])}
    model = nn.Linear(4, 4)
    step = stepgraph.capture(model, loss_fn, batch, passes=["inductor"])
    torch.testing.assert_close(step(batch), loss_fn(model, batch).detach())
    batch["b"] = bad if isinstance(bad, torch.Tensor) else torch.full((2,), bad)
    with pytest.raises((IndexError, RuntimeError)):
        loss_fn(model, batch)
    with pytest.raises((IndexError, RuntimeError)):
        step(batch)


class Steps(nn.Module):
    """Mamba's step sizes: the gradient of softplus, which Inductor decomposes, lies as its operands do in turn."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(12, 4), nn.Linear(4, 12)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = x.view(2, 3, 12)
        steps = nn.functional.softplus(self.up.weight @ self.down(x).transpose(1, 2)).transpose(1, 2)
        return (steps * x).reshape(6, 12)


def test_a_view_of_what_decomposed_operators_lay_otherwise(tools):
    compare(Steps(), tools.mse, tools.vectors(6, 12, n=3), tools.fused_adamw)


def test_views_with_the_negative_bit():
    """Of the batch, of a parameter, and of a buffer that forward writes: Inductor takes their memory as it is."""

    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.complex(torch.ones(8), torch.arange(8.0)).conj().imag)
            self.register_buffer("seen", torch.complex(torch.ones(8), torch.ones(8)).conj().imag)

        def forward(self, x):
            self.seen.mul_(0.5).add_(0.1)
            return x * self.scale + self.seen

    def loss_fn(model, batch):
        return (model(batch) - 1).square().mean()

    batches = [torch.complex(x, x).conj().imag for x in torch.randn(3, 4, 8)]
    compare(Signed(), loss_fn, batches, lambda m: torch.optim.SGD(m.parameters(), lr=0.01))
