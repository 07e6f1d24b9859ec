"""``torch.utils.checkpoint`` calls inside a captured model: the same bits as eager, dropout included."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import stepgraph
from stepgraph.errors import CaptureError
from stepgraph.graph.provenance import provenance
from stepgraph.passes import configured

PASSES = pytest.mark.parametrize("passes", [[], "exact"])
FLAVOURS = pytest.mark.parametrize("use_reentrant", [False, True])


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pairs():
    return [{"x": torch.randn(4, 12), "y": torch.randn(4, 12)} for _ in range(2)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(12, 24), nn.Linear(24, 12), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.dropout(self.up(x)))))


class Stack(nn.Module):
    def __init__(self, run, dropout=0.2):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.run = run

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


@PASSES
@FLAVOURS
@pytest.mark.parametrize("make_optimizer", [adamw, None])
def test_with_dropout(check_training, passes, use_reentrant, make_optimizer):
    model = Stack(functools.partial(checkpoint, use_reentrant=use_reentrant))
    step = check_training(model, mse, pairs(), make_optimizer, max_grad_norm=0.5, passes=passes, accumulate=2)
    calls = {provenance(n).checkpoint for n in step.graph.nodes("forward")}
    assert calls == {None, *range(3)}


@PASSES
@FLAVOURS
def test_nested(check_training, passes, use_reentrant):
    run = functools.partial(checkpoint, use_reentrant=use_reentrant)
    step = check_training(Stack(lambda block, x: run(run, block, x)), mse, pairs(), passes=passes)
    assert {provenance(n).checkpoint for n in step.graph.nodes("forward")} == {None, 0, 1, 2}


@FLAVOURS
def test_sequential(check_training, use_reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.tower = nn.Linear(12, 12), nn.Sequential(Block(0.1), Block(0.1), Block(0.1))

        def forward(self, x):
            return checkpoint_sequential(self.tower, 2, self.first(x), use_reentrant=use_reentrant)

    check_training(Model(), mse, pairs(), adamw)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@FLAVOURS
def test_without_an_input_that_requires_a_gradient(check_training, use_reentrant):
    """The re-entrant flavour then gives the block no gradient at all."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.last = Block(0.0), nn.Linear(12, 12)

        def forward(self, x):
            return self.last(checkpoint(self.block, x, use_reentrant=use_reentrant))

    step = check_training(Model(), mse, pairs())
    names = {s.name.split(".")[0] for s in step.graph.outputs if s.kind == "grad"}
    assert names == ({"last"} if use_reentrant else {"block", "last"})


def test_recomputation_takes_place(check_training):
    step = check_training(Stack(functools.partial(checkpoint, use_reentrant=False), dropout=0.0), mse, pairs(), adamw)
    again = [n for n in step.graph.nodes("backward") if "recomputes" in n.meta]
    assert sum(n.target is torch.ops.aten.gelu.default for n in again) == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_other_random_numbers_in_backward_are_refused(check_training, use_reentrant):
    run = functools.partial(checkpoint, use_reentrant=use_reentrant, preserve_rng_state=False)
    with pytest.raises(CaptureError, match=r"blocks.0.dropout \(.*\) draws random numbers.*preserve_rng_state=True"):
        stepgraph.capture(Stack(run), mse, pairs()[0], passes="exact")
    check_training(Stack(run, dropout=0.0), mse, pairs(), adamw, steps=2)  # nothing is drawn


# State that the checkpointed function writes: eager writes it twice, and its backward reads it as it is then.


class Stateful(nn.Module):
    """Applies ``function`` to its buffers and to a linear layer's result."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.norm, self.function = nn.Linear(12, 12), nn.BatchNorm1d(12), function
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("average", torch.zeros(12))

    def forward(self, x):
        return self.function(self, self.linear(x).tanh())


def counts(m, x):
    m.count += 1
    return x * m.count


def counts_last(m, x):
    """Without the re-entrant flavour the second run ends before the write."""
    y = x.sin()
    m.count += 1
    return y


def replaces_count(m, x):
    m.count = torch.add(m.count, 1)
    return x * m.count


def averages(m, x):
    m.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - m.average


def keeps_last(m, x):
    y = x * m.average.cos()
    m.average.copy_(x.detach()[0])
    return y


def drops_and_averages(m, x):
    return averages(m, F.dropout(x, 0.3)) + torch.rand_like(x) * x.cos() * torch.randn(12)


def normalizes(m, x):
    return m.norm(x).sin()


def nests(m, x):
    return checkpoint(m.norm, checkpoint(lambda y: averages(m, F.dropout(y, 0.2)), x, use_reentrant=False).cos(),
                      use_reentrant=False)  # fmt: skip


STATE = [counts, counts_last, replaces_count, averages, keeps_last, drops_and_averages, normalizes, nests]


class Layers(nn.Module):
    """Checkpoints one module twice and another once, and reads the state of the first in between and at the end."""

    def __init__(self, function, use_reentrant):
        super().__init__()
        self.first, self.a, self.b = nn.Linear(12, 12), Stateful(function), Stateful(function)
        self.run = functools.partial(checkpoint, use_reentrant=use_reentrant)

    def forward(self, x):
        x = self.run(self.a, self.first(x))
        x = self.run(self.b, x * (1 + self.a.average))
        x = self.run(self.a, x)
        return self.run(lambda y: y * self.b.average.cos(), x) + self.a.count * 0.1


def test_a_re_entrant_call_of_what_writes_its_buffers_inside_another_is_refused():
    """Eager runs it three times."""
    model = Layers(lambda m, x: checkpoint(averages, m, x, use_reentrant=True), False)
    with pytest.raises(CaptureError, match="set use_reentrant=False"):
        stepgraph.capture(model, mse, pairs()[0], passes="exact")


@FLAVOURS
@pytest.mark.parametrize("function", STATE)
def test_state_that_the_function_writes(check_training, function, use_reentrant):
    if function is nests and use_reentrant:
        with pytest.raises(CaptureError, match="set use_reentrant=False"):
            stepgraph.capture(Layers(function, use_reentrant), mse, pairs()[0], passes="exact")
        return
    check_training(Layers(function, use_reentrant), mse, pairs(), adamw, max_grad_norm=0.5, passes="exact")


SAVED = {"products": ("addmm", "mm"), "norms": ("native_batch_norm",), "sines": ("sin", "tanh"), "nothing": ()}


def selective(names):
    """The ``context_fn`` of a policy that saves results of the operators ``names``."""

    def policy(context, operator, *args, **kwargs):
        name = operator.overloadpacket.__name__
        return CheckpointPolicy.MUST_SAVE if name in names else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("names", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("function", [counts, averages, drops_and_averages, normalizes])
def test_state_under_selective_checkpointing(check_training, function, names):
    """A saved operator writes once, and others twice."""
    model = Layers(function, False)
    model.run = functools.partial(model.run, context_fn=selective(names))
    check_training(model, mse, pairs(), adamw, max_grad_norm=0.5, passes="exact")


def test_a_policy_that_saves_what_is_written_is_refused_as_in_eager():
    model = Layers(counts, False)
    model.run = functools.partial(model.run, context_fn=selective(("add_",)))
    with pytest.raises(RuntimeError, match="has been mutated"):
        mse(model, pairs()[0]).backward()
    with pytest.raises(CaptureError, match="let its policy recompute"):
        stepgraph.capture(model, mse, pairs()[0], passes="exact")


def test_state_with_accumulation(check_training):
    check_training(Layers(drops_and_averages, False), mse, pairs(), adamw, passes="exact", accumulate=2)


def test_state_of_a_skipped_step_stays():
    model = Layers(averages, False)
    before = copy.deepcopy(dict(model.named_buffers()))
    step = stepgraph.capture(model, mse, pairs()[0], adamw(model), passes="exact", on_nonfinite="skip")
    step({"x": torch.full((4, 12), float("nan")), "y": torch.zeros(4, 12)})
    assert step.metrics["skipped"] and all(torch.equal(before[name], b) for name, b in model.named_buffers())
    step(pairs()[0])
    assert not step.metrics["skipped"] and not torch.equal(before["a.average"], model.a.average)


@pytest.mark.parametrize("memory", ["selective", "full"])
def test_state_with_a_memory_policy(check_training, memory):
    check_training(Layers(averages, False), mse, pairs(), adamw, passes=configured("exact", memory=memory))


@FLAVOURS
def test_state_that_is_written_after_the_call(check_training, use_reentrant):
    """The second run reads the new values, of a buffer and of its own argument."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
            self.register_buffer("scale", torch.ones(12))

        def forward(self, x):
            x = self.first(x)
            y = checkpoint(lambda x: (x * self.scale).sin(), x, use_reentrant=use_reentrant)
            self.scale.mul_(1.5)
            return self.last(y)

    check_training(Model(), mse, pairs(), adamw, passes="exact")


def test_only_calls_with_state_run_twice():
    class Model(Stack):
        def forward(self, x):
            return self.state(super().forward(x))

    model = Model(functools.partial(checkpoint, use_reentrant=False), dropout=0.0)
    model.state = Stateful(lambda m, x: checkpoint(lambda x: averages(m, x).sin(), x, use_reentrant=False))
    step = stepgraph.capture(model, mse, pairs()[0], passes=[])
    assert {provenance(n).checkpoint for n in step.graph.nodes("forward")} == {None, 0, 1, 2}
    (again,) = [n for n in step.graph.nodes("backward") if n.target is torch.ops.aten.mul_.Tensor]
    assert provenance(again).path == "state" and "test_checkpoint.py" in provenance(again).source


def test_random_numbers_from_values_of_a_function_with_state_are_refused():
    model = Layers(lambda m, x: averages(m, x) * torch.bernoulli(x.sigmoid()), False)
    with pytest.raises(CaptureError, match=r"a \(.*test_checkpoint.py:\d+\) draws random numbers by aten.bernoulli"):
        stepgraph.capture(model, mse, pairs()[0], passes="exact")


def test_values_that_the_function_writes_after_it_saved_them(check_training):
    """Eager's backward reads them as they are after the second run, and raises without the checkpoint."""

    def write(x):
        x = x * 1
        x[:, ::2].copy_(x[:, ::2].cos())
        return x.sin()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(12, 12)

        def forward(self, x):
            return checkpoint(write, self.first(x), use_reentrant=False)

    check_training(Model(), mse, pairs(), adamw, passes="exact")


def test_formulas_of_eager_in_the_second_run(check_training):
    model = Layers(lambda m, x: averages(m, x).masked_fill(x > 0.5, m.linear.bias[0]) + x.prod(1, True), False)
    check_training(model, mse, pairs(), adamw, passes="exact")


class Shared(nn.Module):
    """Uses one weight as often as ``plan`` says, outside ("o") and inside a re-entrant checkpoint ("r"), and each
    value twice."""

    def __init__(self, *plan):
        super().__init__()
        self.first, self.weight, self.plan = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4)), plan

    def use(self, x, times):
        for _ in range(times):
            x = torch.tanh(x @ self.weight) * 1.3 + x * 0.3
        return x

    def forward(self, x):
        x, kept = self.first(x), 0.0
        for kind, times in self.plan:
            before = x
            x = self.use(x, times) if kind == "o" else checkpoint(self.use, x, times, use_reentrant=True)
            kept = kept + x.sin() + before.cos()
        return kept


def shared_loss(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize(
    "plan", [(("r", 3),), (("r", 1), ("r", 1), ("r", 1)), (("r", 1), ("o", 1), ("r", 1)), (("r", 1), ("o", 2))]
)
def test_a_weight_shared_with_a_re_entrant_call(plan):
    torch.manual_seed(0)
    model, x = Shared(*plan), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    loss = shared_loss(eager, x)
    loss.backward()
    assert torch.equal(stepgraph.capture(model, shared_loss, x, passes="exact")(x), loss)
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("plan", [(("o", 1), ("r", 1), ("o", 1)), (("o", 2), ("r", 1)), (("r", 2), ("o", 1))])
def test_a_weight_whose_gradients_eager_adds_up_in_another_order_is_refused(plan):
    model, x = Shared(*plan), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"re-entrant.*test_checkpoint.py:\d+.*use_reentrant=False"):
        stepgraph.capture(model, shared_loss, x, passes="exact")
    stepgraph.capture(model, shared_loss, x, passes=stepgraph.StepOptions(inductor="off"))


@pytest.mark.parametrize("plan", [(("r", 1), ("o", 1)), (("o", 1), ("r", 1)), (("r", 1), ("r", 1))])
def test_a_cast_weight_in_and_around_re_entrant_calls_is_refused(plan):
    """Eager casts it again in each call's backward, and adds up gradients in fp32 that one cast adds up in bf16."""

    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return shared_loss(model, x)

    with pytest.raises(CaptureError, match=r"re-entrant.*test_checkpoint.py:\d+.*use_reentrant=False"):
        stepgraph.capture(Shared(*plan), loss_fn, torch.randn(3, 4), passes="exact")
    step = stepgraph.capture(Shared(("o", 1), ("o", 1)), loss_fn, torch.randn(3, 4), passes="exact")
    assert step.verify(torch.randn(3, 4)).bitwise


def test_a_refused_capture_leaves_no_hooks_of_saved_tensors():
    """Also while its error is held, whose frames hold what torch 2.11 began: later captures would call them."""
    with pytest.raises(CaptureError, match="re-entrant"):
        stepgraph.capture(Layers(nests, True), mse, pairs()[0], passes="exact")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_weight_in_two_re_entrant_calls_is_refused_with_accumulation():
    """Eager adds the gradients of each call to those of earlier microbatches. Gradients of leaves that forward makes,
    as T5 makes a bias, are nobody's."""
    with pytest.raises(CaptureError, match="re-entrant"):
        stepgraph.capture(Shared(("r", 1), ("r", 1)), shared_loss, torch.randn(4, 4), accumulate=2, passes="exact")

    def loss_fn(model, x):
        bias = torch.zeros(x.shape, requires_grad=True)
        for layer in model:
            x = checkpoint(lambda x, layer=layer: layer(x) + bias, x.requires_grad_(), use_reentrant=True)
        return x.square().mean()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    step = stepgraph.capture(model, loss_fn, torch.randn(4, 4), accumulate=2, passes="exact")
    assert step.verify(torch.randn(4, 4)).bitwise


class Routed(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.first, self.block, self.keep = nn.Linear(4, 4), nn.Linear(4, 4), keep

    def forward(self, x):
        kept = []

        def run(x):
            y = self.block(x)
            kept.append(self.keep(y.sin()))
            return x * y

        return checkpoint(run, self.first(x), use_reentrant=True) + kept[0]


class Halved(Routed):
    """One operator makes what is returned and what is kept."""

    def __init__(self):
        super().__init__(None)

    def forward(self, x):
        kept = []

        def run(x):
            y, z = self.block(x).chunk(2, -1)
            kept.append(z)
            return y

        return checkpoint(run, self.first(x), use_reentrant=True) + kept[0]


def test_a_tensor_that_leaves_a_re_entrant_call_unreturned_is_refused():
    """Such as routers' logits: eager computes no gradient for them."""
    for passes in ("exact", stepgraph.StepOptions(inductor="off")):
        with pytest.raises(CaptureError, match=r"does not return it.*use_reentrant=False"):
            stepgraph.capture(Routed(lambda y: y), shared_loss, torch.randn(3, 4), passes=passes)
    x = torch.randn(3, 4)
    assert stepgraph.capture(Routed(torch.detach), shared_loss, x, passes="exact").verify(x).bitwise
    with pytest.raises(CaptureError, match="does not return it"):
        stepgraph.capture(Halved(), shared_loss, x, passes="exact")


def test_gradients_leave_a_re_entrant_call_laid_out_as_its_argument():
    """Products round by the order in memory of what they multiply."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.linear = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 5)

        def forward(self, x):
            y = F.gelu(self.attention(x, x, x)[0])
            return self.linear(checkpoint(torch.abs, y, use_reentrant=True))

    torch.manual_seed(0)
    model, x = Turned(), torch.randn(4, 4, 8)
    eager = copy.deepcopy(model)
    shared_loss(eager, x).backward()
    stepgraph.capture(model, shared_loss, x, passes="exact")(x)
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("function", [nn.LSTM(12, 12), torch.linalg.svdvals], ids=["lstm", "svdvals"])
def test_what_eager_computes_otherwise_without_gradients_is_refused_in_a_re_entrant_call(function):
    model = Layers(lambda m, x: function(x)[0] * m.linear(x), True)
    with pytest.raises(CaptureError, match="two runs differ in eager"):
        stepgraph.capture(model, mse, pairs()[0], passes="exact")
    if isinstance(function, nn.LSTM):
        step = stepgraph.capture(model, mse, pairs()[0], passes=stepgraph.StepOptions(inductor="off"))
        assert step.verify(pairs()[0]).close


class Scaled(nn.Module):
    """Scales by what the contexts of its checkpoint set: autocast in both runs, other factors in each."""

    def __init__(self):
        super().__init__()
        self.linear, self.factor = nn.Linear(12, 12), 1.0

    @contextlib.contextmanager
    def scaled(self, factor):
        self.factor, before = factor, self.factor
        with torch.autocast("cpu", torch.bfloat16):
            yield
        self.factor = before

    def forward(self, x):
        return checkpoint(
            lambda x: (self.linear(x) * self.factor).float().sin(),
            x,
            use_reentrant=False,
            context_fn=lambda: (self.scaled(2.0), self.scaled(3.0)),
        )


def test_each_run_is_in_its_own_context():
    step = stepgraph.capture(model := Scaled(), mse, pairs()[0], adamw(model), passes="exact")
    assert step.verify(pairs()[1]).bitwise
