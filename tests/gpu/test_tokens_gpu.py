"""Log-probabilities, entropies and KL divergences of tokens on a GPU: right, repeatable, in parts, and captured."""

import copy

import pytest
import torch
from torch.nn import functional as F

import stepgraph
from stepgraph.kernels.loss import token_kl, token_log_probs, token_log_probs_and_entropies
from tests.kernels.loss.test_tokens import by_operators, inputs, truth

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [1, 33, 8192, 50257, 151936])
def test_kernels(V, dtype):
    case = [t.to(DEVICE) for t in inputs(48, V, dtype)]
    runs = [by_operators(case, 0.7) for _ in range(2)]
    for a, b in zip(*(torch.utils._pytree.tree_leaves(run) for run in runs), strict=True):
        assert torch.equal(a, b), "equal bits from run to run"
    (stats, kl, written), (right, right_kl, slopes) = runs[0], truth(case, 0.7)
    for mine, exact in zip((*stats, kl), (*right, right_kl), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=5e-5)
    for mine, exact in zip(written, slopes, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=max(torch.finfo(dtype).eps, 1e-4), atol=1e-4)


class Pair(torch.nn.Module):
    """A hidden layer and a head, next to a frozen copy."""

    def __init__(self, vocab=32000, width=512):
        super().__init__()
        self.up, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width, vocab, bias=False)
        self.frozen = copy.deepcopy(torch.nn.ModuleList([self.up, self.head])).requires_grad_(False)


def in_parts(pair, batch):
    hidden, other = pair.up(batch["x"]).tanh(), pair.frozen[0](batch["x"]).tanh()
    logs, entropy = token_log_probs_and_entropies(hidden, pair.head.weight, batch["y"], parts=4)
    with torch.no_grad():
        reference = token_log_probs(other, pair.frozen[1].weight, batch["y"], parts=4)
    kl = token_kl(hidden, pair.head.weight, other, pair.frozen[1].weight, reverse=True, parts=4)
    return -F.logsigmoid((logs - reference).mean(1)).mean() + 0.1 * kl.mean() - 0.01 * entropy.mean()


def whole(pair, batch):
    hidden, other = pair.up(batch["x"]).tanh(), pair.frozen[0](batch["x"]).tanh()
    logs, others = pair.head(hidden).float().log_softmax(-1), pair.frozen[1](other).float().log_softmax(-1)
    at = batch["y"].unsqueeze(-1)
    margin = (logs.gather(-1, at) - others.gather(-1, at)).squeeze(-1)
    kl, entropy = (logs.exp() * (logs - others)).sum(-1), -(logs.exp() * logs).sum(-1)
    return -F.logsigmoid(margin.mean(1)).mean() + 0.1 * kl.mean() - 0.01 * entropy.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_parts(dtype):
    """Captured with all passes: the whole logits' loss and gradients, and less memory than theirs in bf16."""
    torch.manual_seed(0)
    pair = Pair().to(DEVICE, dtype)
    with torch.no_grad():
        pair.head.weight.mul_(1.1)
    x = torch.randn(4, 2048, 512, device=DEVICE, dtype=dtype)
    batch = {"x": x, "y": torch.randint(32000, (4, 2048), device=DEVICE)}
    results = []
    for loss_fn in (whole, in_parts):
        twin = copy.deepcopy(pair)
        step = stepgraph.capture(twin, loss_fn, batch)
        loss = step(batch).item()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(batch)
        results.append((loss, twin.head.weight.grad, torch.cuda.max_memory_allocated() - before))
    (expected, gradient, much), (loss, mine, little) = results
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert abs(loss - expected) < tolerance * max(1, abs(expected))
    assert (mine.float() - gradient.float()).norm() < tolerance * gradient.float().norm()
    assert little < much


def plain(pair, batch):
    """As `in_parts` without entropies and KL, by whole logits."""
    at = batch["y"][:, 1:].unsqueeze(-1)

    def log_probs(head, hidden):
        return head(hidden.tanh())[:, :-1].float().log_softmax(-1).gather(-1, at).squeeze(-1)

    return -F.logsigmoid(
        (log_probs(pair.head, pair.up(batch["x"])) - log_probs(pair.frozen[1], pair.frozen[0](batch["x"]))).mean(1)
    ).mean()


@pytest.mark.parametrize("chunks", ["auto", 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pass_puts_a_plain_loss_in_parts(dtype, chunks):
    torch.manual_seed(0)
    pair = Pair().to(DEVICE, dtype)
    with torch.no_grad():
        pair.head.weight.mul_(1.1)
    batch = {"x": torch.randn(4, 2048, 512, device=DEVICE, dtype=dtype)}
    batch["y"] = torch.randint(32000, (4, 2048), device=DEVICE)
    results = []
    for disable in (("fuse_loss",), ()):
        twin = copy.deepcopy(pair)
        passes = stepgraph.StepOptions(loss_chunks=chunks, disable_pass=disable)
        step = stepgraph.capture(twin, plain, batch, passes=passes)
        loss = step(batch).item()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(batch)
        results.append((loss, twin.head.weight.grad, torch.cuda.max_memory_allocated() - before))
    report = next(r for r in step.report if r.name == "fuse_loss")
    assert report.notes == [] and report.summary.count("log-probabilities of 8188 x 32000 logits") == 2
    (expected, gradient, much), (loss, mine, little) = results
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert abs(loss - expected) < tolerance
    assert (mine.float() - gradient.float()).norm() < tolerance * gradient.float().norm()
    assert little < much


def logs_of(pair, batch, scale=1.0):
    heads = (pair.up, pair.head), pair.frozen
    return [(head(up(batch["x"]).tanh()).float() * scale).log_softmax(-1) for up, head in heads]


def distilled(pair, batch):
    logs, target = (logs.flatten(0, 1) for logs in logs_of(pair, batch, 0.5))
    return 4 * F.kl_div(logs, target, log_target=True, reduction="batchmean")


def reversed_kl(pair, batch):
    logs, target = logs_of(pair, batch)
    return (logs.exp() * (logs - target)).sum(-1).mean()


def policy_gradient(pair, batch):
    logs, target = logs_of(pair, batch)
    mine = logs.gather(-1, batch["y"].unsqueeze(-1)).squeeze(-1)
    kl, entropy = (logs.exp() * (logs - target)).sum(-1), -(logs.exp() * logs).sum(-1)
    return (0.1 * kl - (mine - mine.detach()).exp() - 0.01 * entropy).mean()


def taught(pair, batch):
    """Of labels, and of the teacher at a temperature, of the same logits."""
    heads = (pair.up, pair.head), pair.frozen
    mine, other = (head(up(batch["x"]).tanh()).flatten(0, 1).float() for up, head in heads)
    logs, target = (mine / 2).log_softmax(-1), (other / 2).log_softmax(-1)
    soft = F.kl_div(logs, target, log_target=True, reduction="batchmean")
    return 0.3 * F.cross_entropy(mine, batch["y"].flatten()) + 2.8 * soft


@pytest.mark.parametrize("loss_fn", [distilled, reversed_kl, policy_gradient, taught])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_as_they_are_written(loss_fn, dtype):
    """Found by `fuse_loss`: eager's loss and gradients, equal bits from run to run, and no logits of all in fp32."""
    torch.manual_seed(0)
    pair = Pair().to(DEVICE, dtype)
    with torch.no_grad():
        pair.head.weight.mul_(1.1)
    x = torch.randn(4, 2048, 512, device=DEVICE, dtype=dtype)
    batch = {"x": x, "y": torch.randint(32000, (4, 2048), device=DEVICE)}
    loss_fn(pair, batch).backward()
    expected, gradient = loss_fn(pair, batch).item(), pair.head.weight.grad
    twin = copy.deepcopy(pair)
    twin.zero_grad(set_to_none=True)
    step = stepgraph.capture(twin, loss_fn, batch, passes=stepgraph.StepOptions(loss_chunks=4))
    (report,) = (report for report in step.report if report.name == "fuse_loss")
    assert "heads and divergences of 8192 x 32000 logits in 4 parts" in report.summary, (report.summary, report.notes)
    runs = []
    for _ in range(3):
        twin.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = step(batch).item()
        runs.append((loss, twin.head.weight.grad.clone(), torch.cuda.max_memory_allocated() - before))
    assert runs[1][0] == runs[2][0] and torch.equal(runs[1][1], runs[2][1])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert abs(runs[2][0] - expected) < tolerance * max(1, abs(expected))
    assert (runs[2][1].float() - gradient.float()).norm() < tolerance * gradient.float().norm()
    assert runs[0][2] < 8192 * 32000 * 4
