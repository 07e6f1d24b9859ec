"""What cannot be captured fails at capture, in one line that names module and source line; the model stays the same."""

import gc
import inspect
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError
from stepgraph.options import StepOptions
from stepgraph.passes import Pass
from stepgraph.passes.contract import NoOptions

OUTSIDE = torch.ones(4, requires_grad=True)


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("empty", None)
        self.plain = torch.zeros(())
        self.calls, self.history = 0, []

    def forward(self, x):
        self.calls += 1
        return self.function(self, self.linear(x))


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Inner(function)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, x):
    return model(x).sum()


def refuse(function, loss_fn=loss_fn, batch=None, error=CaptureError, optimizer=None, model=None, **options):
    """Capture a model that applies ``function``; it must fail and leave everything as it was. The message."""
    model = model or Model(function)
    before = snapshot(model)
    optimizer = optimizer and optimizer(model)
    batch = torch.randn(3, 4) if batch is None else batch
    rng = torch.get_rng_state()
    with pytest.raises(error) as caught:
        stepgraph.capture(model, loss_fn, batch, optimizer, **options)
    assert gc.isenabled()
    assert torch.equal(rng, torch.get_rng_state())
    assert optimizer is None or not optimizer.state
    after = snapshot(model)
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] or before[key] == after[key] for key in before)
    message = str(caught.value)
    assert "\n" not in message
    return message


def snapshot(model):
    """Everything a module holds, by identity; hooks by their number."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            found[path, key] = len(value) if key.endswith("hooks") else id(value)
        for kind in ("_parameters", "_buffers"):
            for key, value in getattr(module, kind).items():
                found[path, kind, key] = (id(value), value is not None and value._version)
        for p in module.parameters(recurse=False):
            found[path, id(p), "grad"] = id(p.grad)
    return found


def item(self, x):
    return x * x.sum().item()


def branch(self, x):
    if x.sum() > 0:
        return x
    return -x


def nonzero(self, x):
    return x[x.nonzero()[:, 0]]


def mask(self, x):
    return x[x > 0]


def tolist(self, x):
    return x * x.tolist()[0][0]


def numpy(self, x):
    return x * torch.from_numpy(x.detach().numpy())


def integer(self, x):
    return x * int(x.sum())


def assertion(self, x):
    assert (x < 1e9).all()
    return x


def formatted(self, x):
    return x * float(f"{x.sum():.3f}")


def cond(self, x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def unique(self, x):
    return x * torch.unique(x.detach()).numel()


@pytest.mark.parametrize(
    "function", [item, branch, nonzero, mask, tolist, numpy, integer, assertion, unique, formatted, cond]
)
@pytest.mark.parametrize("fused", [False, True])
def test_values_of_tensors(function, fused):
    message = refuse(function, optimizer=lambda m: torch.optim.AdamW(m.parameters(), fused=fused), max_grad_norm=1.0)
    lines, first = inspect.getsourcelines(function)
    path, file, line = re.match(r"cannot capture (\S+) at (.+):(\d+): ", message).groups()
    assert path == "layers.1"
    assert file == __file__
    assert first < int(line) <= first + len(lines)
    assert int(line) == first + 1  # the offending line, not the one before


def keep_in_new_buffer(self, x):
    self.register_buffer("late", x.detach())
    return x


def keep_in_empty_buffer(self, x):
    self.empty = x.detach()
    return x


@pytest.mark.parametrize("function", [keep_in_new_buffer, keep_in_empty_buffer])
def test_tensors_kept_in_new_buffers(function):
    assert "forward puts a tensor of the step into layers.1._buffers, where there was none" in refuse(function)


def test_write_into_a_plain_attribute():
    """torch itself would write into the user's tensor while it traces."""

    def count(self, x):
        self.plain.add_(1)
        return x * self.plain

    assert re.search(r"layers.1 \(.*test_errors.py:\d+\) writes into a tensor that is neither", refuse(count))


def test_memory_of_a_parameter_replaced():
    def replace(self, x):
        self.linear.weight.data = self.linear.weight.data * 0.5
        return x

    assert "forward assigns layers.1.linear.weight.data" in refuse(replace)


def test_what_torch_says_gets_a_place():
    message = refuse(lambda self, x: x @ x.new_zeros(5, 5), error=RuntimeError)
    assert re.search(r"cannot capture layers.1 at .*test_errors.py:\d+: RuntimeError: .*custom_op", message)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3])).values(), "one padded tensor"),
        (lambda x: x.as_subclass(Marked), "use plain tensors"),
    ],
)
def test_tensors_that_a_trace_does_not_make(make, fix):
    assert fix in refuse(lambda self, x: make(x), error=RuntimeError)


def test_what_python_says_keeps_its_type():
    with pytest.raises(KeyError) as caught:
        stepgraph.capture(Model(lambda self, x: {}["name"]), loss_fn, torch.randn(3, 4), passes="exact")
    (note,) = caught.value.__notes__
    assert re.search(r"raised in layers.1 \(.*test_errors.py:\d+\) while the step was traced", note)


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_buffer_that_changes_its_form(value):
    def change(self, x):
        self.mean = value + 0
        return x

    message = refuse(change)
    assert "forward replaces layers.1.mean, a torch.float32 tensor of shape [4]" in message


def follows(self, x):
    self.mean = self.linear.bias.detach()
    return x


def copies(self, x):
    self.mean, self.last = self.last, self.last
    self.last.mul_(0.5)
    return x


def replaces_a_part(self, x):
    self.last = x.detach().sum(0)
    return x


def one_of_two(self, x):
    self.mean = x.detach().mean(0)
    return x + self.twin.mean


@pytest.mark.parametrize(
    "function, change, message",
    [
        (follows, lambda m: None, "replaces layers.1.mean, and layers.1.linear.bias shares its old memory or its new"),
        (
            copies,
            lambda m: m.register_buffer("last", torch.ones(4)),
            "replaces layers.1.mean, and layers.1.last shares",
        ),
        (replaces_a_part, lambda m: m.register_buffer("last", m.mean[:]), "replaces layers.1.last, and layers.1.mean"),
        (one_of_two, lambda m: m.twin.register_buffer("mean", m.mean), "replaces layers.1.mean in one of the modules"),
    ],
)
def test_buffers_that_forward_makes_share_memory_or_share_it_no_more(function, change, message):
    model = Model(function)
    model.layers[1].twin = nn.Module()
    change(model.layers[1])
    assert message in refuse(function, model=model)


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x.detach(), lambda x: x[:, :4]])
def test_a_buffer_that_is_memory_of_the_batch(part):
    """Its caller may fill the same tensor for the next step, and eager's buffer with it."""

    def loss(model, x):
        loss = (model(x) + model.before.mean()).square().mean()
        model.before = part(x)
        return loss

    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    model.register_buffer("before", torch.zeros(3, 4))
    with pytest.raises(CaptureError, match=r"forward stores a tensor of the batch in before.*assign a clone"):
        stepgraph.capture(model, loss, x, passes="exact")
    with pytest.warns(UserWarning, match="forward stores a tensor of the batch in before"):
        stepgraph.capture(model, loss, x, passes=["fuse_norm"])


@pytest.mark.parametrize("share", [lambda t: t, lambda t: t[1:], lambda t: torch.from_numpy(t.numpy())])
@pytest.mark.parametrize("name", ["plain", "other"])
def test_a_buffer_that_is_written_and_read_by_another_name(share, name):
    """A graph does not know that they are one."""

    def forward(self, x):
        self.mean.add_(1)
        return x * getattr(self, name).sum()

    model = Model(forward)
    inner = model.layers[1]
    if name == "plain":
        inner.plain = share(inner.mean)
    else:
        inner.register_buffer("other", torch.from_numpy(share(inner.mean).numpy()))
    assert "the step writes into buffer layers.1.mean, whose memory" in refuse(forward, model=model)


def test_tensor_from_outside_that_requires_a_gradient():
    message = refuse(lambda self, x: x * OUTSIDE)
    assert re.search(
        r"a tensor of shape \[4\] that requires a gradient is used in layers.1 \(.*test_errors.py", message
    )


def test_cached_copy_of_a_parameter():
    model = Model(lambda self, x: x)
    cached = list(model.parameters())
    with pytest.raises(CaptureError, match="use no cached copy of a parameter"):
        stepgraph.capture(model, lambda m, x: m(x).sum() + sum(p.sum() for p in cached), torch.randn(3, 4))


def same(self, x):
    return x


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, x: m(x), r"a torch.float32 tensor of shape \[3, 4\]; it must return a floating-point scalar"),
        (lambda m, x: m(x).sum().long(), "it must return a floating-point scalar"),
        (lambda m, x: 3.0, "loss_fn returned a float"),
        (lambda m, x: (m(x).sum(), 1), "loss_fn returned a tuple"),
        (lambda m, x: m(x).sum().detach(), "depends on no parameter that requires a gradient"),
        (lambda m, x: x.sum(), "depends on no parameter"),
    ],
)
def test_losses(loss_fn, message):
    assert re.search(message, refuse(same, loss_fn=loss_fn))


def test_optimizer_of_another_model():
    other = Model(same)
    message = refuse(same, optimizer=lambda m: torch.optim.AdamW(other.parameters()))
    assert "build the optimizer from model.parameters()" in message


def test_autocast_around_capture():
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on around capture" in refuse(same)


@pytest.mark.parametrize("accumulate", [2, 5])
def test_microbatches_that_do_not_divide(accumulate):
    message = refuse(same, accumulate=accumulate, error=ValueError)
    assert f"accumulate={accumulate} does not divide the batch's first dimension 3; try accumulate=" in message


@pytest.mark.parametrize("accumulate", [0, -1, 2.0, "2"])
def test_microbatches_are_a_whole_number_from_one_on(accumulate):
    message = refuse(same, accumulate=accumulate, error=ValueError)
    assert f"accumulate={accumulate!r} is not allowed" in message and "from 1 on" in message


class Attributes(dict):
    __getattr__ = dict.__getitem__  # KeyError, not AttributeError, for what is not there


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (object(), "vars"),
        (np.ones(3), "torch.from_numpy"),
        (Attributes(x=1), "dict"),
        (iter([1]), "list"),
        (torch.sin, "in loss_fn by its name"),
    ],
    ids=["object", "array", "mapping", "iterator", "function"],
)
def test_batch_of_an_object(value, fix):
    message = refuse(same, loss_fn=lambda m, b: m(b["x"]).sum(), batch={"x": torch.randn(3, 4), "o": value})
    assert re.search(f"the batch holds a .*{type(value).__name__}; allowed: tensors and plain values.*{fix}", message)


def test_modules_that_another_thread_runs():
    def call(self, x):
        made = []
        thread = threading.Thread(target=lambda: made.append(self.linear(x)))
        thread.start()
        thread.join()
        return made[0]

    assert "that another thread computes" in refuse(call)


FAILING = {
    "product": lambda self, x: self.linear(x[:, :2]),
    "view": lambda self, x: x.view(5, 5),
    "in_place": lambda self, x: x.add_(torch.ones(3)),
    "buffer": lambda self, x: x + self.mean.detach().mul_(torch.ones(3)),
    "random": lambda self, x: torch.normal(torch.zeros(3), torch.ones(4)),
}


@pytest.mark.parametrize("fails", FAILING.values(), ids=FAILING)
def test_an_error_that_forward_catches_leaves_nothing(fails, caplog):
    """No node, which would fail in every step, and no traceback in the log of torch."""

    class Attempt(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            x = self.linear(x) * 1
            try:
                return fails(self, x)
            except RuntimeError:
                return x.sin() + torch.rand(4)

    step = stepgraph.capture(Attempt(), loss_fn, torch.randn(3, 4), passes="exact")
    assert step.verify(torch.randn(3, 4)).bitwise
    assert not caplog.records


CAUGHT = {
    "item": lambda x: x.mean().item(),
    "branch": lambda x: 2.0 if (x > 0).all() else 3.0,
    "numpy": lambda x: float(x.detach().numpy().sum()),
    "format": lambda x: float(f"{x.detach().sum():.3f}"),
    "address": lambda x: float(x.data_ptr() > 0),
    "seed": lambda x: torch.manual_seed(3) and 2.0,
}


@pytest.mark.parametrize("read", CAUGHT.values(), ids=CAUGHT)
def test_a_refusal_that_forward_catches(read):
    """Eager has the value: what follows the error would be another step."""

    def attempt(self, x):
        try:
            return x * read(x)
        except Exception:
            return x

    assert re.search(r"test_errors.py:\d+\)? ?", refuse(attempt))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks(register):
    model = Model(same)
    getattr(model.layers[1].linear.weight, register)(lambda _: None)
    with pytest.raises(CaptureError, match=r"parameter layers\.1\.linear\.weight has a gradient hook"):
        stepgraph.capture(model, loss_fn, torch.randn(3, 4))


def test_mistakes_of_the_model_pass_through():
    """An error that eager raises too keeps its type."""
    message = refuse(lambda self, x: x.view(5), error=RuntimeError)
    assert "shape '[5]' is invalid" in message


def test_the_model_is_as_before_after_success_too():
    def count(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return x

    model = Model(count)
    optimizer = torch.optim.AdamW(model.parameters())
    before = snapshot(model)
    stepgraph.capture(model, loss_fn, torch.randn(3, 4), optimizer, passes="exact")
    assert before == snapshot(model)


def test_unknown_passes():
    assert "did you mean 'recompute'" in refuse(same, passes=["recompote"], error=ValueError)
    assert "did you mean 'inductor'" in refuse(same, disable=["inducter"], error=ValueError)
    assert "unknown passes 'fast'" in refuse(same, passes="fast", error=ValueError)
    message = refuse(same, disable="dead_code", error=ValueError)
    assert message == "disable='dead_code' is one word; allowed is a tuple of them: disable=('dead_code',)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passes": 3}, "unknown passes 3; allowed: 'exact', 'default', StepOptions or a list"),
        ({"passes": None}, "unknown passes None; allowed: "),
        ({"disable": 3}, "disable=3 is not allowed; use a tuple of words"),
        ({"disable": (3,)}, "disable=(3,) is not allowed; use a tuple of words"),
        ({"passes": StepOptions(memory=None)}, "unknown memory policy 'None'; allowed: none, full"),
        ({"passes": StepOptions(disable_pass=None)}, "disable_pass=None is not allowed; use a tuple of words"),
        ({"passes": StepOptions(cuda_graph="no")}, "unknown cuda_graph 'no': choose one of False, True"),
        ({"accumulate": True}, "accumulate=True is not allowed; it counts microbatches"),
        ({"saved": 3}, "saved=3 is not a folder"),
        ({"dump": __file__}, "test_errors.py' is not a folder; use the path of one"),
    ],
)
def test_an_option_of_another_type_is_refused_in_one_line(options, message):
    assert message in refuse(same, error=ValueError, **options)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), "1.0", True])
def test_a_norm_to_clip_to_is_above_zero(norm):
    assert "must be a number above 0" in refuse(lambda m, x: x, error=ValueError, max_grad_norm=norm)


def test_layer_drop_is_told_how_to_be_turned_off(monkeypatch):
    monkeypatch.setattr(Inner, "layerdrop", 0.1, raising=False)

    def drop(self, x):
        return x if torch.rand(()) < self.layerdrop else -x

    assert "set layerdrop = 0 of layers.1" in refuse(drop)
    (model := Model(drop)).layers[0].layerdrop = 0.2
    assert "set layerdrop = 0 of layers.0 and layers.1" in refuse(drop, model=model)


def test_dynamic_rope_is_told_what_it_asks(monkeypatch):
    monkeypatch.setattr(Inner, "rope_type", "dynamic", raising=False)
    assert "longer than all before; a dynamic RoPE" in refuse(lambda self, x: x if x.max() > 3 else -x)


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand([]), lambda: torch.rand(1).item(), lambda: torch.empty(1).uniform_()]
)
def test_layer_drop_by_hand_is_told_what_helps(draw):
    message = refuse(lambda self, x: x if draw() < 0.5 else -x)
    assert "draw it outside" in message and "probability to 0" in message and "torch.where" not in message
    assert "torch.where" in refuse(lambda self, x: x if (x * torch.rand([])).sum() < 0.5 else -x)


# Kinds that a graph does not take, and what torch cannot trace.


def split_by_tensor(self, x):
    return torch.cat(x.tensor_split(x.detach()[:2, 0].long()))


def jagged(self, x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3])).values()


def nested(self, x):
    return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([x[:1], x[1:]]), 0.0)


def nested_of_rows(self, x):
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged).values()


QUANTIZED = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def quantized(self, x):
    return x * QUANTIZED.dequantize()


def sparse(self, x):
    return torch.sparse.mm(torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), x[0, :2], (3, 3)), x)


def compressed(self, x):
    return torch.eye(3).to_sparse_csr() @ x


def curvature(self, x):
    return torch.func.vmap(torch.func.hessian(lambda row: row.sin().sum()))(x)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad[:1]


@pytest.mark.parametrize(
    ("function", "fix"),
    [
        (split_by_tensor, "in the batch as a number"),
        (jagged, "one padded tensor with a mask"),
        (nested, "one padded tensor with a mask"),
        (nested_of_rows, "one padded tensor with a mask"),
        (quantized, "use dequantize"),
        (sparse, "dense"),
        (compressed, "dense"),
        (curvature, r"jacrev\(jacrev"),
        (lambda self, x: WrongGradient.apply(x), "torch.library.custom_op"),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_what_torch_cannot_trace(function, fused, fix):
    message = refuse(function, optimizer=(lambda m: torch.optim.AdamW(m.parameters(), fused=True)) if fused else None)
    assert re.search(rf"layers.1|the model.*test_errors.py:\d+.*{fix}", message)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(4).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_buffers_that_are_not_dense(buffer):
    model = Model(same)
    model.layers[1].register_buffer("table", buffer)
    with pytest.raises(CaptureError, match=r"layers\.1\.table is a .*dense"):
        stepgraph.capture(model, loss_fn, torch.randn(3, 4), passes="exact")


def test_batch_norm_that_averages_by_its_count():
    norm = nn.BatchNorm1d(4, momentum=None)
    model = nn.Sequential(nn.Linear(4, 4), norm)
    with pytest.raises(CaptureError, match=r"cannot capture 1 at .*momentum=0\.1"):
        stepgraph.capture(model, loss_fn, torch.randn(3, 4), passes="exact")


def test_packed_sequences():
    def pack(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x[None], x.detach()[:1, 0].long().abs() + 1, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]

    assert "packed sequences take lengths on the host" in refuse(pack)


def test_a_loss_that_is_a_parameter():
    assert "the loss is itself a parameter" in refuse(same, loss_fn=lambda m, x: m.scale, model=Scaled())


class Scaled(Model):
    def __init__(self):
        super().__init__(same)
        self.scale = nn.Parameter(torch.tensor(1.0))


def test_a_loss_that_reaches_no_parameter_and_clipping():
    def copies(m, x):
        params, buffers = torch.func.stack_module_state([m.layers[0], m.layers[0]])
        call = torch.func.vmap(lambda p, b: torch.func.functional_call(m.layers[0], (p, b), (x,)))
        return call(params, buffers).sum()

    message = refuse(same, loss_fn=copies, max_grad_norm=1.0)
    assert "reaches no parameter" in message and "max_grad_norm=1 " in message


@pytest.mark.parametrize("bounds", [(0, 3), (2, 9)])
def test_an_operator_whose_overload_is_a_word_of_python(bounds):
    """`random_.from` is none that generated code can name."""

    def draw(self, x):
        return x + torch.empty(3, 4).random_(*bounds)

    model, x = Model(draw), torch.randn(3, 4)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    state = torch.get_rng_state()
    loss = loss_fn(model, x).detach()
    torch.set_rng_state(state)
    assert torch.equal(step(x), loss)


def test_a_pass_that_fails():
    def fail(step, options, report):
        raise IndexError("first line\nsecond line")

    wrong = Pass("wrong", "numerics", fail, "fails", NoOptions())
    message = refuse(same, passes=[wrong], error=CaptureError)
    assert "pass wrong fails on this step: IndexError: first line; leave it out by disable=('wrong',)" in message
    compiler = Pass("inductor", "numerics", fail, "fails", NoOptions())  # as for GPT-NeoX in bf16 on a CPU
    assert 'or StepOptions(inductor="off")' in refuse(same, passes=[compiler], error=CaptureError)


@pytest.mark.parametrize(
    "choose",
    [
        lambda chosen, e: torch.where(chosen == e)[0],
        lambda chosen, e: (chosen == e).any(-1).nonzero()[:, 0],
        lambda chosen, e: torch.arange(torch.bincount(chosen.view(-1), minlength=2).tolist()[e]),
    ],
)
def test_a_loop_over_experts_by_hand(choose):
    def route(self, x):
        chosen = self.linear(x).softmax(-1).topk(2).indices
        return sum(x.new_zeros(x.shape).index_add(0, rows := choose(chosen, e), x[rows]) for e in range(2))

    message = refuse(route)
    assert re.search(r"layers.1 at .*test_errors.py:\d+: .* what a topk or argmax chose, as a loop over", message)
    assert "write Inner.forward by stepgraph.kernels.moe" in message
