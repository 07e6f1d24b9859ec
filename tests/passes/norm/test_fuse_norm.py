"""The norm pass on a CPU, where our operators are their reference: what is found, and what it computes."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.models import Golf, GolfConfig
from stepgraph.passes import configured, get, run_passes
from tests.passes.norm import norm_models
from tests.passes.norm.norm_checks import (
    BF16,
    GOLF,
    KERNEL,
    check,
    check_rounded,
    count,
    found,
    report_of,
    rows,
    run,
    square,
)
from tests.passes.norm.norm_models import DECOYS, WIDTH, WRITTEN, Around, ByFunction

aten, ours = torch.ops.aten, torch.ops.stepgraph


# What is found


@pytest.mark.parametrize("batch", [1, 2])  # one sequence: tensors of the shape of (T, N) are no weights per head
@pytest.mark.parametrize("name", WRITTEN)
def test_norms_written_by_hand(name, batch):
    function, shape, form, each = WRITTEN[name]
    step = check(Around(lambda: ByFunction(function, shape)), square, rows(batch, 5, WIDTH))
    assert found(step) == {form: (2 * each, 2 * each)}
    report = report_of(step)
    assert (report.matched, report.changed) == (2 * each, 2 * each)
    assert count(step, ours.norm) == count(step, ours.norm_backward) == 2 * each
    for gone in (aten.rsqrt, aten.native_layer_norm, aten.native_layer_norm_backward):
        assert not count(step, gone)


@pytest.mark.parametrize(
    ("norm", "form"),
    [
        (functools.partial(nn.RMSNorm, WIDTH), "composite rms"),
        (functools.partial(nn.RMSNorm, WIDTH, eps=1e-3, elementwise_affine=False), "composite rms"),
        (functools.partial(nn.LayerNorm, WIDTH), "fused layer norm"),
        (functools.partial(nn.LayerNorm, WIDTH, bias=False), "fused layer norm"),
        (functools.partial(nn.LayerNorm, WIDTH, elementwise_affine=False), "fused layer norm"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("how", ["fp32", "bf16", "autocast"])
def test_norms_of_torch(norm, form, how, batch):
    model, x = Around(norm), rows(batch, 5, WIDTH)
    if how == "fp32":
        step = check(model, square, x)
    elif how == "bf16":
        step = check_rounded(model.to(BF16), functools.partial(square, dtype=BF16), square, x)
    else:
        step = check_rounded(model, functools.partial(square, autocast=True), square, x)
    assert found(step) == {form: (2, 2)}
    assert "2 residual adds and 2 residual gradients taken in" in report_of(step).summary


@pytest.mark.parametrize(
    "function",
    [norm_models.rms_llama, norm_models.rms_gemma, norm_models.layer_in_float, norm_models.llama_twice,
     norm_models.both_of_one],
)  # fmt: skip
def test_norms_with_casts_in_bf16(function):
    model = Around(lambda: ByFunction(function)).to(BF16)
    step = check_rounded(model, functools.partial(square, dtype=BF16), square, rows())
    assert report_of(step).changed == (4 if function in (norm_models.llama_twice, norm_models.both_of_one) else 2)
    if function is norm_models.rms_llama:
        assert found(step) == {"composite rms, cast before the weight": (2, 2)}


def test_a_wide_stream_around_narrow_norms():
    """The gradient of the norm's rows, in bf16, is added to that of the stream, in fp32, inside the operator."""
    model = Around(lambda: ByFunction(norm_models.rms_rounded_before))
    step = check_rounded(model, square, square, rows())
    assert report_of(step).changed == 2 and "2 residual gradients taken in" in report_of(step).summary


@pytest.mark.parametrize("function", DECOYS, ids=lambda f: f.__name__)
def test_what_only_looks_like_a_norm_is_left_alone(function):
    step = check(Around(lambda: ByFunction(function)), square, rows())
    report = report_of(step)
    assert report.matched == report.changed == 0 and not count(step, ours.norm)
    assert "found nothing to do" in report.line() and "no RMS or layer norm found" in report.notes
    assert sum("is not a norm that this pass knows: " in note for note in report.notes) == 2


def test_layer_norm_over_two_dimensions_is_left_alone():
    step = check(Around(lambda: nn.LayerNorm((5, WIDTH))), square, rows())
    assert not report_of(step).changed
    assert any("it normalizes 2 dimensions at once" in note for note in report_of(step).notes)


class Pooled(nn.Module):
    """A residual stream that is read transposed too, so that its gradient comes in that order (Hiera's pooling)."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pool = nn.Linear(5, WIDTH)

    def forward(self, x):
        stream = self.up(x).unsqueeze(1).sin().squeeze(1)
        y = self.down(self.norm(stream))
        return y + self.pool(stream.transpose(1, 2)).mean(1, keepdim=True)


def test_a_gradient_of_another_order_is_left_alone():
    step = check(Pooled(), square, rows())
    assert not report_of(step).changed
    assert any("the rows that it writes are not contiguous" in note for note in report_of(step).notes)


def test_a_model_without_norms(tools):
    step = tools.trace(nn.Linear(12, 12), tools.mse, tools.vectors(6, 12)[0])
    (report,) = run_passes(step, [get("fuse_norm")])
    assert report.matched == 0 and "found nothing to do" in report.line()
    assert report.notes == ["no RMS or layer norm found"]


# Models


def test_llama(tools):
    model, batch = tools.llama(), tools.tokens()[0]
    step = check(model, tools.next_token_loss, batch)
    assert found(step) == {"composite rms": (5, 5)}
    assert "4 residual adds and 4 residual gradients taken in" in report_of(step).summary
    assert (count(step, ours.norm), count(step, ours.norm_backward)) == (5, 5)


def test_two_runs_are_bitwise_equal(tools):
    model, batch = Golf(GOLF), tools.tokens()[0]
    (loss, grads, _), (again, others, _) = (run(model, tools.next_token_loss, batch, KERNEL) for _ in range(2))
    assert torch.equal(loss, again) and all(torch.equal(others[name], grad) for name, grad in grads.items())


@pytest.mark.parametrize("scales", [False, True])
def test_golf(tools, scales):
    model = Golf(GolfConfig(**{**vars(GOLF), "residual_scales": scales}))
    step = check(model, tools.next_token_loss, tools.tokens()[0])
    assert found(step) == {"composite rms": (10, 10)}
    assert (count(step, ours.norm), count(step, ours.norm_backward)) == (10, 10)


def hugging_face_loss(model, batch):
    logits = model(batch["tokens"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
                           batch["targets"].flatten())  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "form", "norms"),
    [
        ("Llama", {}, "composite rms", 5),
        ("Gemma", {"head_dim": 8}, "composite rms, weight + 1", 5),
        ("Gemma3", {"head_dim": 8}, "composite rms, weight + 1", 13),  # q and k normalized after transposing
        ("Qwen3", {"head_dim": 8}, "composite rms", 9),
    ],
)
@pytest.mark.parametrize("batch", [1, None])
def test_hugging_face(tools, name, options, form, norms, batch):
    pytest.importorskip("transformers")
    model = norm_models.hugging_face(name, **options)
    step = check(model, hugging_face_loss, {key: value[:batch] for key, value in tools.tokens()[0].items()})
    assert found(step) == {form: (norms, norms)}
    assert "4 residual adds and 4 residual gradients taken in" in report_of(step).summary


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_hugging_face_in_bf16(tools, name):
    pytest.importorskip("transformers")
    model = norm_models.hugging_face(name, **({"head_dim": 8} if name == "Gemma" else {})).to(BF16)
    step = check_rounded(model, hugging_face_loss, hugging_face_loss, tools.tokens()[0])
    assert report_of(step).changed == 5


def test_accumulated_microbatches(tools):
    step = check(tools.llama(), tools.next_token_loss, tools.tokens()[0], accumulate=2)
    assert found(step) == {"composite rms": (5, 5)}


@pytest.mark.parametrize("memory", ["full", "selective", "budget=0.5"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_after_recomputation(tools, name, memory):
    """Norms that are computed again are replaced too; one that only its backward needs is not computed again."""
    pytest.importorskip("transformers")
    model = norm_models.hugging_face(name, **({"head_dim": 8} if name == "Gemma3" else {}))
    passes = configured(memory=memory, inductor="off", norm="kernel")
    step = check(model, hugging_face_loss, tools.tokens()[0], passes)
    assert not count(step, aten.rsqrt) and report_of(step).changed == report_of(step).matched
    assert report_of(step).matched > (5 if name == "Llama" else 13)


def test_rows_of_zeros_by_normalize():
    """``F.normalize`` divides them by its least length, 1e-12: loss and gradient are eager's."""
    torch.manual_seed(0)
    model = ByFunction(lambda x, w, b: F.normalize(x, dim=-1) * 8.0 * w, (64,))
    model.x = nn.Parameter(torch.randn(2, 3, 64).index_fill_(1, torch.tensor(1), 0.0))
    twin = copy.deepcopy(model)

    def loss_fn(model, batch):
        return (model(model.x) * batch).sum()

    batch = torch.randn(2, 3, 64)
    step = stepgraph.capture(model, loss_fn, batch, passes=configured(norm="kernel", inductor="off"))
    assert any(report.name == "fuse_norm" and report.changed == 1 for report in step.report)
    loss = loss_fn(twin, batch)
    loss.backward()
    torch.testing.assert_close(step(batch), loss.detach())
    assert twin.x.grad[:, 1].abs().max() > 1e12
    torch.testing.assert_close(model.x.grad, twin.x.grad)


def test_rows_that_need_no_gradient():
    """Only the weight's gradient is computed; then, only that of the rows."""
    model = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    model[2].requires_grad_(False)
    step = check(model, square, rows())
    first, second = step.graph.graph.find_nodes(op="call_function", target=ours.norm_backward.default)
    assert (first.args[-3:], second.args[-3:]) == ((True, False, False), (False, True, False))


def test_a_norm_without_a_backward():
    """Nothing that the norm's rows are made of needs a gradient, nor the weight."""
    model = nn.Sequential(nn.RMSNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, WIDTH))
    step = check(model, square, rows())
    assert found(step) == {"composite rms": (1, 0)}


class Between(nn.Module):
    """Something is written between the sum that a norm normalizes and the norm."""

    def __init__(self, write):
        super().__init__()
        self.a, self.n, self.write = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), write
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        h = self.a(x) + x
        self.write(self, h)
        return F.rms_norm(self.n(h), (WIDTH,), self.scale) + F.rms_norm(self.a(x) + x, (WIDTH,), self.scale)


@pytest.mark.parametrize(
    "write",
    [
        lambda m, h: h[:, 0].fill_(0.0),
        lambda m, h: h.view(-1)[::2].mul_(2),
        lambda m, h: h.transpose(0, 1)[0].add_(1),
        lambda m, h: m.scale[:3].mul_(0.5),
    ],
)
def test_a_write_through_a_view_between_sum_and_norm(write):
    check(Between(write), square, rows())


class Inside(nn.Module):
    """A norm by hand, with a write through a view into one of its steps."""

    def __init__(self, written):
        super().__init__()
        self.a, self.weight, self.written = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH)), written

    def forward(self, x):
        x = self.a(x)
        variance = x.pow(2).mean(-1, keepdim=True)
        if self.written == "variance":
            variance.detach()[:1].fill_(2.0)
        y = x * torch.rsqrt(variance + 1e-6)
        if self.written == "rows":
            y.detach()[:1].fill_(2.0)
        return F.rms_norm(x, (WIDTH,)) + y * self.weight


@pytest.mark.parametrize("written", ["variance", "rows"])
def test_a_write_through_a_view_inside_a_norm(written):
    check(Inside(written), square, rows())


@pytest.mark.parametrize("budget", [0.9, 0.8, 0.7, 0.6])
def test_norms_that_are_computed_again_in_part(tools, budget):
    passes = configured(memory=f"budget={budget}", inductor="off", norm="kernel")
    step = check(tools.llama(n_layers=4), tools.next_token_loss, tools.tokens()[0], passes)
    assert report_of(step).changed == report_of(step).matched and not count(step, aten.rsqrt)


class OwnWeight(nn.Module):
    """A norm whose weight is made of its rows, so that a copy that is computed again has no weight in time."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.c(x)
        return x + F.layer_norm(h, (WIDTH,), self.a(torch.sin(h).mean((0, 1))))


@pytest.mark.parametrize("memory", ["none", "selective", "full"])
def test_a_copy_that_the_operators_cannot_replace(memory):
    passes = configured(memory=memory, inductor="off", norm="kernel")
    check(nn.Sequential(*[OwnWeight() for _ in range(4)]), square_of_x, rows(), passes)


def square_of_x(model, batch):
    return model(batch["x"]).square().mean()


class Whole(nn.Module):
    """Normalized by the variance of everything: no norm of rows."""

    def __init__(self, variance):
        super().__init__()
        self.a, self.variance = nn.Linear(WIDTH, WIDTH), variance

    def forward(self, x):
        h = self.a(x)
        return (h - h.mean()) / torch.sqrt(self.variance(h) + 1e-5)


@pytest.mark.parametrize(
    "variance", [torch.var, lambda h: h.var(correction=0), lambda h: torch.var(h, dim=None, keepdim=True)]
)
def test_a_variance_of_everything_is_no_norm(variance):
    step = check(Whole(variance), lambda m, b: m(b["x"]).pow(3).mean(), rows())
    assert not report_of(step).matched


class Quantized(nn.Module):
    """Rounded to eight bits: a weight, or the rows that are normalized but not those that the root is of."""

    def __init__(self, rows):
        super().__init__()
        self.a, self.w, self.rows = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5), rows

    def forward(self, x):
        h = self.a(x)
        root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.rows:
            return h.to(torch.float8_e4m3fn).to(torch.float32) * root * self.w
        return h * root * self.w.to(torch.float8_e4m3fn).to(torch.float32)


@pytest.mark.parametrize("of_rows", [True, False])
def test_a_quantization_is_no_cast(of_rows):
    check(Quantized(of_rows), square, rows(), [get("fuse_norm", choice="kernel")])
    check(Quantized(of_rows), square, rows(), "exact")
