"""Log-probabilities, entropies and KL divergences of tokens against torch's own in float64: references, operators, the
kernels interpreted, and the heads that compute them in parts."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph.costs.memory import estimate_memory
from stepgraph.kernels.loss import heads, token_kl, token_log_probs, token_log_probs_and_entropies
from stepgraph.kernels.loss.tokens import token_gradient_, token_kl_gradient_, token_kl_stats, token_stats
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("tokens_child.py")
IGNORE, INF = -100, float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows, V, dtype=torch.float32, *, seed=0):
    """(logits, other logits, labels, slopes (4, rows) of log-probabilities, log sums, entropies and means)"""
    generator = torch.Generator().manual_seed(seed)
    logits, other = ((torch.randn(rows, V, generator=generator) * 3).to(dtype) for _ in range(2))
    labels = torch.randint(V, (rows,), generator=generator)
    slopes = torch.randn(4, rows, generator=generator)
    labels[0], slopes[:, -1] = IGNORE, 0.0
    return logits, other, labels, slopes


def picked(logs, labels):
    return logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(labels != IGNORE, 0.0)


def entropies(logs):
    return -(logs.exp() * logs).sum(-1)


def divergences(logs, others):
    return (logs.exp() * (logs - others)).sum(-1)


def truth(case, scale):
    """What `tokens_child` computes, in float64 by torch's autograd."""
    logits, other, labels, of_stats = case
    x, y = (t.double().requires_grad_() for t in (logits, other))
    logs, others = (x * scale).log_softmax(1), (y * scale).log_softmax(1)
    stats = picked(logs, labels), (x * scale).logsumexp(1), entropies(logs), (x * scale).mean(1)
    kl = divergences(logs, others)
    (of_x,) = torch.autograd.grad((torch.stack(stats) * of_stats).sum(), x, retain_graph=True)
    return stats, kl, (of_x, *torch.autograd.grad((kl * of_stats[0]).sum(), (x, y)))


def check(found, expected, dtype):
    (stats, kl, written), (right, right_kl, slopes) = found, expected
    for mine, exact in zip((*stats, kl), (*right, right_kl), strict=True):
        assert mine.dtype == torch.float32
        # Sums of fp32 exponentials, each off by some units of 2^-24, and logarithms up to 10.
        torch.testing.assert_close(mine.double(), exact, rtol=5e-6, atol=5e-6)
    eps = torch.finfo(dtype).eps
    for mine, exact in zip(written, slopes, strict=True):
        assert mine.dtype == dtype and not mine[-1].any(), "a row without slopes"
        # Differences of logits up to 40 and log sums, each off by 2^-20, times slopes up to 6.
        torch.testing.assert_close(mine.double(), exact, rtol=max(eps, 2e-5), atol=5e-5)


def by_operators(case, scale):
    logits, other, labels, slopes = case
    stats, (kl, log_sum, other_sum) = token_stats(logits, labels, scale, IGNORE), token_kl_stats(logits, other, scale)
    written = logits.clone(), logits.clone(), other.clone()
    token_gradient_(written[0], labels, *stats[1:3], *slopes, scale, IGNORE)
    token_kl_gradient_(written[1], other, log_sum, other_sum, kl, slopes[0], scale, True)
    token_kl_gradient_(written[2], logits, other_sum, log_sum, kl, slopes[0], scale, False)
    return stats, kl, written


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(2, 9), V=st.integers(1, 40), dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1.0, 0.6, 2.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_operators(rows, V, dtype, scale, seed):
    case = inputs(rows, V, dtype, seed=seed)
    check(by_operators(case, scale), truth(case, scale), dtype)


def test_opcheck():
    logits, other, labels, slopes = inputs(4, 6)
    stats, (kl, *sums) = token_stats(logits, labels, 0.5, IGNORE), token_kl_stats(logits, other, 0.5)
    torch.library.opcheck(token_stats, (logits, labels, 0.5, IGNORE))
    torch.library.opcheck(token_kl_stats, (logits, other, 0.5))
    torch.library.opcheck(token_gradient_, (logits, labels, *stats[1:3], *slopes, 0.5, IGNORE))
    torch.library.opcheck(token_kl_gradient_, (logits, other, *sums, kl, slopes[0], 0.5, True))


def masked(V=40):
    """A case whose tokens are ruled out for some rows, in both models, and one with a label that is none."""
    case = inputs(5, V, seed=7)
    for logits in case[:2]:
        logits[1, : V // 2] = -INF
        logits[2, : V - 1] = -INF
    case[2][1] = case[2][2] = V - 1
    return case


def check_masked(stats, kl, written):
    case = masked()
    logs, others = (t.double().log_softmax(1) for t in case[:2])
    p = logs.exp()
    entropy = -torch.where(p > 0, p * logs, 0).sum(1)
    torch.testing.assert_close(stats[0].double(), picked(logs, case[2]), rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(stats[2].double(), entropy, rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(kl.double(), torch.where(p > 0, p * (logs - others), 0).sum(1), rtol=5e-6, atol=5e-6)
    assert all(slopes.isfinite().all() for slopes in written)


def test_tokens_that_are_ruled_out():
    check_masked(*by_operators(masked(), 1.0))
    logits, _, labels, *_ = inputs(4, 9)
    labels[1] = 9
    assert token_stats(logits, labels, 1.0, IGNORE)[0].isnan().tolist() == [False, True, False, False]


def test_kernels_interpreted(tmp_path):
    """In one block and over several, rows apart in memory, and tokens that are ruled out."""
    pytest.importorskip("triton")
    cases, expected = [], []
    for i, (rows, V) in enumerate([(2, 1), (3, 50), (3, 129)]):
        case = inputs(rows, V, DTYPES[i % 3], seed=i)
        scale = (1.0, 0.6)[i % 2]
        for config in ((32, 1), None):
            cases.append((*case, scale, config))
            expected.append((truth(case, scale), case[0].dtype))
    logits, other, *rest = inputs(4, 40)
    apart = torch.zeros(4, 50)[:, :40].copy_(logits)
    cases.append((apart, other.t().contiguous().t(), *rest, 1.0, (16, 1)))
    expected.append((truth((logits, other, *rest), 1.0), torch.float32))
    cases.append((*masked(), 1.0, (16, 1)))
    *found, last = interpreted(CHILD, tmp_path, cases)
    for (stats, kl, written), (right, dtype) in zip(found, expected, strict=True):
        check((stats, kl[0], written), right, dtype)
    check_masked(last[0], last[1][0], last[2])


@pytest.mark.parametrize("element", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_no_configuration_spills(element):
    kernels = pytest.importorskip("stepgraph.kernels.loss.tokens_triton")
    logits, numbers = {"logits": f"*{element}", "scale": "fp32"}, {"stride": "i32", "V": "i32", "other_stride": "i32"}
    numbers |= {"labels": "*i64", "ignore": "i32", "other": f"*{element}"}
    numbers |= {n: "*fp32" for n in ("log_prob", "log_sum", "other_log_sum", "entropy", "mean", "slope", "kl")}
    numbers |= {f"{n}_slope": "*fp32" for n in ("sum", "entropy", "mean")}
    for V in (151936,) if element == "bf16" else (100, 151936):
        for kernel, config, constants in (
            (kernels._stats_kernel, kernels.configuration(V), {}),
            (kernels._gradient_kernel, kernels.gradient_configuration(V), {}),
            (kernels._kl_kernel, kernels.kl_configuration(V), {}),
            (kernels._kl_gradient_kernel, kernels.gradient_configuration(V), {"OF_P": True}),
            (kernels._kl_gradient_kernel, kernels.gradient_configuration(V), {"OF_P": False}),
        ):
            kinds = {name: kind for name, kind in (logits | numbers).items() if name in kernel.arg_names}
            assert_no_spills(kernel, kinds, {"BLOCK": config[0]} | constants, config[1])


# Heads


class Model(nn.Module):
    """A hidden layer and a head for it; ``width`` of the head's input."""

    def __init__(self, vocab=37, width=12, bias=True, dtype=torch.float32):
        super().__init__()
        self.table, self.out = nn.Embedding(vocab, width, dtype=dtype), nn.Linear(width, vocab, bias, dtype=dtype)

    def forward(self, ids):
        return self.table(ids).tanh()


def head_loss(model, batch):
    """Both outputs, with gradients that depend on the loss, as DPO's do."""
    hidden = model(batch["ids"])
    logs, entropy = token_log_probs_and_entropies(
        hidden, model.out.weight, batch["labels"], model.out.bias, scale=0.7, parts=batch["parts"]
    )
    return -F.logsigmoid(logs.sum(1)).mean() + (entropy * logs).mean()


def plain_loss(model, batch):
    logs = (model.out(model(batch["ids"])) * 0.7).log_softmax(-1)
    chosen = picked(logs, batch["labels"])
    return -F.logsigmoid(chosen.sum(1)).mean() + (entropies(logs) * chosen).mean()


def batch_of(shape=(3, 8), vocab=37, parts=None):
    labels = torch.randint(vocab, shape)
    labels[0, :3] = IGNORE
    return {"ids": torch.randint(vocab, shape), "labels": labels, "parts": parts}


@pytest.mark.parametrize("parts", [None, 1, 5, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_head_in_parts(bias, parts):
    torch.manual_seed(0)
    model, batch = Model(bias=bias), batch_of(parts=parts)
    loss = head_loss(model, batch)
    grads = torch.autograd.grad(loss, [*model.parameters()])
    wide = Model(bias=bias).double()
    wide.load_state_dict(model.state_dict())
    expected = plain_loss(wide, batch)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, right in zip(grads, torch.autograd.grad(expected, [*wide.parameters()]), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("trained", ["student", "teacher", "both"])
def test_divergence_in_parts(trained, reverse):
    torch.manual_seed(0)
    student, teacher = Model(width=12), Model(width=5, bias=False)
    for name, model in (("student", student), ("teacher", teacher)):
        model.requires_grad_(trained in (name, "both"))
    batch = batch_of()

    def loss(s, t, parts=4):
        args = s(batch["ids"]), s.out.weight, t(batch["ids"]), t.out.weight, s.out.bias
        return (token_kl(*args, reverse=reverse, scale=0.5, parts=parts) * batch["labels"]).mean()

    def plain(s, t):
        logs, others = ((m.out(m(batch["ids"])) * 0.5).log_softmax(-1) for m in ((s, t) if reverse else (t, s)))
        return (divergences(logs, others) * batch["labels"]).mean()

    def gradients(function, *models):
        value = function(*models)
        return value, torch.autograd.grad(value, [p for m in models for p in m.parameters() if p.requires_grad])

    (value, grads), before = gradients(loss, student, teacher), [*student.parameters(), *teacher.parameters()]
    assert len(grads) == {"student": 3, "teacher": 2, "both": 5}[trained] == sum(p.requires_grad for p in before)
    expected, right = gradients(plain, student.double(), teacher.double())
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, exact in zip(grads, right, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_captured_as_eager_computes_it(autocast):
    torch.manual_seed(0)
    model, batch = Model(), batch_of(parts=3)

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return head_loss(model, batch)

    step = stepgraph.capture(model, loss_fn, batch, torch.optim.AdamW(model.parameters(), fused=True), passes="exact")
    assert step.verify(batch).bitwise
    ops = [str(n.target) for n in step.graph.graph.nodes]
    assert sum("token_stats" in op for op in ops) == sum("token_gradient_" in op for op in ops) == 3
    if autocast:
        assert "bfloat16[8, 37]" in step.graph.text()


@pytest.mark.parametrize("parts", [1, 4])
def test_logits_of_one_part_exist_at_a_time(parts):
    """Forward and backward: their bytes in bf16 once, and never in fp32."""
    model, batch = Model(512, 4, bias=False, dtype=torch.bfloat16), batch_of((8, 32), 512, parts)

    def loss_fn(model, batch):
        hidden = model(batch["ids"])
        return token_log_probs(hidden, model.out.weight, batch["labels"], parts=batch["parts"]).sum(1).sigmoid().mean()

    step = stepgraph.capture(model, loss_fn, batch, passes="exact")
    estimate, logits = estimate_memory(step.graph.graph), 8 * 32 * 512 * 2 // parts
    values = [n.meta.get("val") for n in step.graph.graph.nodes]
    large = [v for v in values if isinstance(v, torch.Tensor) and v.numel() * 2 >= logits]
    assert {(v.dtype, v.numel() * 2) for v in large} == {(torch.bfloat16, logits)}
    assert logits <= estimate.peak - estimate.inputs <= logits + 4 * 512 * 4 * 2 + 2**14


def test_auto_is_by_memory():
    assert (
        heads.parts_of(16384, 151936, 2) == 4 and heads.parts_of(2048, 151936, 4) == 1 and heads.parts_of(0, 5, 2) == 1
    )


def test_what_does_not_fit_is_refused():
    hidden, weight, labels = torch.randn(2, 5, 8), torch.randn(37, 8), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"labels \[2, 4\] torch.int64 for hidden \[2, 5, 8\].*shift both"):
        token_log_probs(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match=r"labels \[2, 5\] torch.int32"):
        token_log_probs(hidden, weight, labels.int())
    with pytest.raises(ValueError, match=r"hidden \[2, 5, 8\], weight \[8, 37\]; they must be"):
        token_log_probs(hidden, weight.t(), labels)
    with pytest.raises(ValueError, match=r"hidden torch.float32 and weight torch.bfloat16; cast one"):
        token_log_probs(hidden, weight.bfloat16(), labels)
    with pytest.raises(ValueError, match=r"student \[2, 5, 8\] of 37 and teacher \[2, 5, 8\] of 36 tokens"):
        token_kl(hidden, weight, hidden, weight[1:])
