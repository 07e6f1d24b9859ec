"""A head and its tokens' log-probabilities in parts: loss and gradients as eager gives them, less memory, a reason
where they stay."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.costs.memory import estimate_memory
from stepgraph.passes import get, run_passes
from stepgraph.passes.loss import fuse

aten = torch.ops.aten
FUSE = replace(get("fuse_loss"), needs_cuda=False)
VOCAB, WIDTH = 37, 12


class Head(nn.Module):
    """Ids (B, T) to logits (B, T, V)."""

    def __init__(self, bias=False, tied=False, dtype=torch.float32):
        super().__init__()
        self.table, self.up = nn.Embedding(VOCAB, WIDTH, dtype=dtype), nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.out = nn.Linear(WIDTH, VOCAB, bias, dtype=dtype)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.up(self.table(ids))))


class Pair(nn.Module):
    """A policy and its frozen reference."""

    def __init__(self, dtype=torch.float32, **options):
        super().__init__()
        self.policy, self.reference = (Head(dtype=dtype, **options) for _ in range(2))
        self.reference.requires_grad_(False)


def picked(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def shifted(model, ids):
    return picked(model(ids)[:, :-1].float(), ids[:, 1:])


def preference(pair, ids):
    chosen, rejected = (shifted(pair.policy, ids) - shifted(pair.reference, ids)).sum(1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def weighted(pair, ids):
    """At a temperature, in rows, with the entropy as a number to report, before the labels are gathered."""
    logits = pair.policy(ids).flatten(0, 1) / 0.7
    logs, labels = logits.log_softmax(-1), ids.roll(1, 1).view(-1, 1)
    with torch.no_grad():
        stepgraph.metric("entropy", -(logs.exp() * logs).sum(-1).mean())
    return -(logs.gather(1, labels).squeeze(1) * (ids.view(-1) > 5)).sum() * 0.1


def gradients(model, loss_fn, ids, passes):
    """(loss, gradients, metrics, report or None); ``passes=None`` is plain eager."""
    model = copy.deepcopy(model)
    if passes is None:
        loss = loss_fn(model, ids)
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, {}, None
    step = stepgraph.capture(model, loss_fn, ids, passes=passes)
    loss = step(ids)
    return loss, {n: p.grad for n, p in model.named_parameters()}, step.metrics, next(iter(step.report), None)


def ids_of(shape=(4, 7)):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


OPTIONS = [{}, {"bias": True}, {"tied": True}, {"dtype": torch.bfloat16, "bias": True}]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_fn", [preference, weighted])
def test_gradients(loss_fn, options, chunks):
    torch.manual_seed(0)
    model, ids = Pair(**options), ids_of()
    wide = gradients(copy.deepcopy(model).double(), loss_fn, ids, None)
    _, plain, metrics, _ = gradients(model, loss_fn, ids, [])
    loss, grads, mine, report = gradients(model, loss_fn, ids, [FUSE.with_options(chunks=chunks)])
    assert report.notes == []
    rows = 24 if loss_fn is preference else 28
    parts = f"3 parts of {rows // 3 + (rows % 3 > 0)} rows" if chunks == 3 else "one part"
    heads = report.summary.split("; head")[1:]
    assert report.matched == report.changed == len(heads) and "log-probabilities" in report.line()
    assert heads == [f" and log-probabilities of {rows} x 37 logits in {parts}"] * (2 if loss_fn is preference else 1)
    tolerance = 2e-2 if "dtype" in options else 1e-5
    torch.testing.assert_close(loss.double(), wide[0].double(), rtol=tolerance, atol=tolerance)
    for name, value in metrics.items():
        torch.testing.assert_close(mine[name], value, rtol=tolerance, atol=tolerance)
    for name, slope in wide[1].items():
        if slope is None:
            assert grads[name] is None
            continue
        assert grads[name].dtype == plain[name].dtype
        error = (grads[name].double() - slope).norm() / slope.norm()
        before = (plain[name].double() - slope).norm() / slope.norm()
        assert error < max(1e-5, 2 * before), f"{name}: {error:.1e} rewritten, {before:.1e} before"


@pytest.mark.parametrize("chunks", [1, 4])
def test_nothing_of_all_logits_exists(tools, chunks):
    """bf16 logits of a part alone, in forward and in backward."""
    model, ids = Pair(dtype=torch.bfloat16), ids_of((4, 17))
    step = tools.trace(model, preference, ids)
    before = estimate_memory(step.graph).peak
    run_passes(step, [FUSE.with_options(chunks=chunks)])
    wide = [n.meta["val"] for n in step.graph.nodes
            if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].shape[-1:] == (VOCAB,)]  # fmt: skip
    assert {(v.dtype, len(v)) for v in wide if v.shape[0] != WIDTH} == {(torch.bfloat16, 64 // chunks)}
    assert estimate_memory(step.graph).peak < before - 64 * VOCAB * 4
    targets = [n.target for n in step.graph.nodes]
    assert aten._log_softmax.default not in targets and aten.scatter_add.default not in targets
    assert targets.count(torch.ops.stepgraph.token_gradient_.default) == chunks


def entropy_bonus(pair, ids):
    logs = pair.policy(ids).log_softmax(-1)
    return (logs.exp() * logs).sum(-1).mean() - logs.gather(-1, ids.unsqueeze(-1)).mean()


def logs_of(pair, ids, scale=1.0):
    return [model(ids).float().mul(scale).log_softmax(-1) for model in (pair.policy, pair.reference)]


def forward_kl(pair, ids):
    """As it is distilled at a temperature."""
    logs, target = (logs.flatten(0, 1) for logs in logs_of(pair, ids, 1 / 1.7))
    return F.kl_div(logs, target, log_target=True, reduction="batchmean") * 1.7**2


def masked_kl(pair, ids):
    """Of the teacher's probabilities, for some of the tokens; the teacher runs first."""
    with torch.no_grad():
        target = pair.reference(ids).softmax(-1)
    logs = pair.policy(ids).log_softmax(-1)
    return (F.kl_div(logs, target, reduction="none").sum(-1) * (ids > 5)).sum() / 3


def masked_elements(pair, ids):
    logs, target = logs_of(pair, ids)
    return (F.kl_div(logs, target, log_target=True, reduction="none") * (ids > 5).float().unsqueeze(-1)).sum() / 30


def reverse_kl(pair, ids):
    logs, target = logs_of(pair, ids)
    return (logs.exp() * (logs - target)).sum(-1).mean()


def soft_targets(pair, ids):
    return -(pair.reference(ids).softmax(-1) * pair.policy(ids).log_softmax(-1)).sum(-1).mean()


def softmax_entropy(pair, ids):
    logits = pair.policy(ids)
    return (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def policy_gradient(pair, ids):
    """GRPO's loss for one update, with both divergences and an entropy bonus."""
    logs, target = logs_of(pair, ids)
    mine = logs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    kls = (logs.exp() * (logs - target)).sum(-1), (target.exp() * (target - logs)).sum(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    stepgraph.metric("entropy", entropy.mean())
    return ((mine.detach() - mine).exp() * (ids > 5)).mean() + 0.1 * kls[0].mean() + 0.3 * (kls[1] - entropy).mean()


WRITTEN = {
    "heads and divergences": [forward_kl, masked_kl, masked_elements, reverse_kl, soft_targets, policy_gradient],
    "head and entropies": [softmax_entropy],
    "head and log-probabilities": [entropy_bonus],
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16, "bias": True}], ids=str)
@pytest.mark.parametrize("loss_fn", [loss_fn for losses in WRITTEN.values() for loss_fn in losses])
def test_sums_over_the_vocabulary(loss_fn, options, chunks):
    """However they are written, they are found, and as exact as eager."""
    torch.manual_seed(0)
    model, ids = Pair(**options), ids_of()
    wide = gradients(copy.deepcopy(model).double(), loss_fn, ids, None)
    _, plain, metrics, _ = gradients(model, loss_fn, ids, [])
    loss, grads, mine, report = gradients(model, loss_fn, ids, [FUSE.with_options(chunks=chunks)])
    (what,) = (what for what, losses in WRITTEN.items() if loss_fn in losses)
    parts = "3 parts of 10 rows" if chunks == 3 else "one part"
    assert report.notes == [] and report.summary.endswith(f"; {what} of 28 x 37 logits in {parts}")
    tolerance = 2e-2 if options else 1e-5
    torch.testing.assert_close(loss.double(), wide[0].double(), rtol=tolerance, atol=tolerance)
    for name, value in metrics.items():
        torch.testing.assert_close(mine[name], value, rtol=tolerance, atol=tolerance)
    assert all(grads[name] is None for name, _ in model.reference.named_parameters("reference"))
    for name, slope in wide[1].items():
        if slope is not None:
            error, before = ((g[name].double() - slope).norm() / slope.norm() for g in (grads, plain))
            # Where three kernels add their gradients, each has rounded its own.
            most = max(2e-6, (3 if loss_fn is policy_gradient else 2) * before)
            assert error < most, f"{name}: {error:.1e} rewritten, {before:.1e} before"


def ignored(ids):
    return torch.where(ids % 5 == 0, -100, ids)


def smoothed_labels(pair, ids):
    return F.cross_entropy(pair.policy(ids).float().flatten(0, 1), ignored(ids).flatten(), label_smoothing=0.1)


def smoothed_by_hand(pair, ids):
    """As `transformers.trainer_pt_utils.LabelSmoother` has it, in place."""
    logs, labels = -pair.policy(ids).log_softmax(-1), ignored(ids).unsqueeze(-1)
    left_out = labels.eq(-100)
    one = logs.gather(-1, labels.clamp(min=0)).masked_fill_(left_out, 0.0)
    rest = logs.sum(-1, keepdim=True, dtype=torch.float32).masked_fill_(left_out, 0.0)
    count = left_out.numel() - left_out.sum()
    return 0.9 * one.sum() / count + 0.1 * rest.sum() / (count * VOCAB)


def z_loss(pair, ids):
    logits = pair.policy(ids).float()
    return F.cross_entropy(logits.view(-1, VOCAB), ignored(ids).view(-1)) + 0.1 * logits.logsumexp(-1).square().mean()


def z_loss_of_rows(pair, ids):
    """Written without a softmax, at a temperature."""
    logits = pair.policy(ids) / 0.7
    total, label = logits.logsumexp(-1, keepdim=True), logits.gather(-1, ids.unsqueeze(-1))
    return (total - label + 0.1 * total**2).mean()


def weights_of_tokens(pair, ids):
    losses = F.cross_entropy(pair.policy(ids).flatten(0, 1), ignored(ids).flatten(), reduction="none")
    return (losses * ids.flatten().sqrt()).sum() / 7


def weights_of_classes(pair, ids):
    weight = torch.linspace(0.5, 2, VOCAB, dtype=pair.policy.out.weight.dtype)
    return F.cross_entropy(pair.policy(ids).flatten(0, 1), ignored(ids).flatten(), weight)


CRITERION = nn.CrossEntropyLoss(torch.linspace(0, 2, VOCAB), reduction="sum")


def weights_of_a_criterion(pair, ids):
    """Constants of the step, which forward and backward read by nodes of their own."""
    return CRITERION(pair.policy(ids).flatten(0, 1).float(), ignored(ids).flatten())


def focal(pair, ids):
    losses = F.cross_entropy(pair.policy(ids).transpose(1, 2), ignored(ids), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def classes_in_front(pair, ids):
    return F.cross_entropy(pair.policy(ids).float().transpose(1, 2), ignored(ids))


def shifted_logits(pair, ids):
    logits = pair.policy(torch.cat([ids, ids[:, :1]], 1)).float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ignored(ids).reshape(-1), reduction="sum")


def accuracy(pair, ids):
    """With a metric of the greatest logits, before they are widened."""
    logits = pair.policy(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids.roll(1, 1).flatten())
    stepgraph.metric("accuracy", (logits.argmax(-1) == ids.roll(1, 1)).float().mean())
    return loss


def confidence(pair, ids):
    logits = pair.policy(ids).float().flatten(0, 1)
    return F.nll_loss(logits.log_softmax(-1), ids.flatten()) + 0.1 * (logits.logsumexp(-1) - logits.mean(-1)).mean()


def nothing_counts(pair, ids):
    return F.cross_entropy(pair.policy(ids).flatten(0, 1), torch.full((ids.numel(),), -100), reduction="none").sum()


OF_CLASSES = [smoothed_labels, smoothed_by_hand, z_loss, z_loss_of_rows, weights_of_tokens, weights_of_classes,
              weights_of_a_criterion, focal, classes_in_front, shifted_logits, accuracy, confidence,
              nothing_counts]  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16, "bias": True}], ids=str)
@pytest.mark.parametrize("loss_fn", OF_CLASSES)
def test_losses_of_classes(loss_fn, options, chunks):
    """However they are written, they need no logits in fp32, and are as exact as eager."""
    torch.manual_seed(0)
    model, ids = Pair(**options), ids_of()
    wide = gradients(copy.deepcopy(model).double(), loss_fn, ids, None)
    _, plain, metrics, _ = gradients(model, loss_fn, ids, [])
    loss, grads, mine, report = gradients(model, loss_fn, ids, [FUSE.with_options(chunks=chunks)])
    parts = "3 parts of 10 rows" if chunks == 3 else "one part"
    assert report.notes == [] and report.summary.endswith(f"; head and log-probabilities of 28 x 37 logits in {parts}")
    tolerance = 2e-2 if options else 1e-5
    torch.testing.assert_close(loss.double(), wide[0].double(), rtol=tolerance, atol=tolerance)
    assert all(torch.equal(mine[name], value) for name, value in metrics.items())
    for name, slope in wide[1].items():
        if slope is not None and loss_fn is not nothing_counts:
            error, before = ((g[name].double() - slope).norm() / slope.norm() for g in (grads, plain))
            # bf16 gradients of a bias or table of 37: either's rounding may be the lucky one.
            assert error < max(2e-6, 3 * before), f"{name}: {error:.1e} rewritten, {before:.1e} before"
        assert slope is None or loss_fn is not nothing_counts or not grads[name].any()


def distilled(pair, ids):
    """As students learn: of labels, and of the teacher at a temperature."""
    mine, other = pair.policy(ids), pair.reference(ids)
    logs, target = ((logits.float() / 2.0).log_softmax(-1) for logits in (mine, other))
    soft = F.kl_div(logs.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean")
    return 0.3 * F.cross_entropy(mine.float().flatten(0, 1), ids.roll(1, 1).flatten()) + 0.7 * 2.0**2 * soft


def distilled_in_rows(pair, ids):
    """The cross entropy first, both of rows in the model's dtype, at a temperature below 1."""
    mine, other = (model(ids).flatten(0, 1) for model in (pair.policy, pair.reference))
    hard = F.cross_entropy(mine, ids.flatten())
    return hard + F.kl_div((mine * 1.5).log_softmax(-1), (other * 1.5).softmax(-1), reduction="batchmean")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_fn", [distilled, distilled_in_rows])
def test_labels_and_a_teacher_at_a_temperature(loss_fn, options):
    """Two losses of the same logits, each in parts."""
    torch.manual_seed(0)
    model, ids = Pair(**options), ids_of()
    wide = gradients(copy.deepcopy(model).double(), loss_fn, ids, None)
    _, plain, *_ = gradients(model, loss_fn, ids, [])
    loss, grads, _, report = gradients(model, loss_fn, ids, [FUSE.with_options(chunks=3)])
    assert report.notes == [] and "1 of 1 cross entropies computed with the gradient" in report.summary
    said = (
        "1 heads made 2, one for each of their losses",
        "head and loss of 28 x 37",
        "heads and divergences of 28 x 37",
    )
    assert all(words in report.summary for words in said) and report.summary.count("in 3 parts of 10 rows") == 2
    tolerance = 2e-2 if "dtype" in options else 1e-5
    torch.testing.assert_close(loss.double(), wide[0].double(), rtol=tolerance, atol=tolerance)
    for name, slope in wide[1].items():
        if slope is not None:
            error, before = ((g[name].double() - slope).norm() / slope.norm() for g in (grads, plain))
            assert error < max(2e-6, 2 * before), f"{name}: {error:.1e} rewritten, {before:.1e} before"


def taught(pair, ids):
    """Both heads learn, each of the labels and of the other one."""
    one, other = (model(ids).flatten(0, 1).float() for model in (pair.policy, pair.reference))
    total = F.cross_entropy(one, ids.flatten()) + F.cross_entropy(other, ids.roll(1, 1).flatten())
    for mine, teacher in ((one, other.detach()), (other, one.detach())):
        logs, target = (mine / 1.7).log_softmax(-1), (teacher / 1.7).log_softmax(-1)
        total = total + F.kl_div(logs, target, log_target=True, reduction="batchmean")
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_heads_that_learn_from_each_other(dtype):
    torch.manual_seed(0)
    model, ids = Pair(dtype=dtype).requires_grad_(True), ids_of()
    wide = gradients(copy.deepcopy(model).double(), taught, ids, None)
    _, plain, *_ = gradients(model, taught, ids, [])
    loss, grads, _, report = gradients(model, taught, ids, [FUSE.with_options(chunks=3)])
    assert report.notes == [] and "2 heads made 6, one for each of their losses" in report.summary
    assert report.summary.count("in 3 parts of 10 rows") == 4 and report.matched == report.changed == 4
    torch.testing.assert_close(loss.double(), wide[0].double(), rtol=1e-3, atol=1e-3)
    for name, slope in wide[1].items():
        error, before = ((g[name].double() - slope).norm() / slope.norm() for g in (grads, plain))
        assert error < max(2e-6, 2 * before), f"{name}: {error:.1e} rewritten, {before:.1e} before"
    assert stepgraph.capture(model, taught, ids, passes="exact").verify(ids).bitwise


def test_no_logits_of_two_losses(tools):
    model, ids = Pair(dtype=torch.bfloat16), ids_of((4, 256))
    step = tools.trace(model, distilled, ids)
    before = estimate_memory(step.graph).peak
    run_passes(step, [FUSE.with_options(chunks=4)])
    wide = [n.meta["val"] for n in step.graph.nodes
            if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].shape[-1:] == (VOCAB,)]  # fmt: skip
    assert {(v.dtype, len(v)) for v in wide if v.shape[0] != WIDTH} == {(torch.bfloat16, 256)}
    assert estimate_memory(step.graph).peak < before - 3 * 1024 * VOCAB * 4


def test_two_losses_that_stay_one_head():
    """One part is cheaper as it is; and a loss that cannot be rewritten leaves both."""
    torch.manual_seed(0)
    model, ids = Pair(), ids_of()
    (_, _, _, one), (_, _, _, left) = (
        gradients(model, loss_fn, ids, [FUSE.with_options(chunks=chunks)])
        for loss_fn, chunks in (
            (distilled, 1),
            (lambda p, i: distilled(p, i) + p.policy.out(p.policy.table(i)).amax(), 2),
        )
    )
    assert "heads made" not in one.summary and "1 heads made 2" in left.summary  # the third product is another head

    def weighted_labels(pair, ids):
        mine = pair.policy(ids).flatten(0, 1)
        hard = F.cross_entropy(mine, ids.flatten(), torch.arange(1.0, VOCAB + 1))
        return hard + F.kl_div(
            (mine / 2).log_softmax(-1), pair.reference(ids).flatten(0, 1).softmax(-1), reduction="sum"
        )

    expected, grads, *_ = gradients(model, weighted_labels, ids, None)
    loss, mine, _, report = gradients(model, weighted_labels, ids, [FUSE.with_options(chunks=2)])
    assert any("whose logits 2 losses read, stays one head: class weights" in note for note in report.notes)
    torch.testing.assert_close(loss, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("loss_fn", [forward_kl, reverse_kl, policy_gradient])
def test_no_logits_of_two_models(tools, loss_fn, chunks):
    """Of parts alone, in bf16, and nothing of the teacher is kept or has a gradient; a peak far below fp32 logits."""
    model, ids = Pair(dtype=torch.bfloat16), ids_of((4, 256))
    step = tools.trace(model, loss_fn, ids)
    before = estimate_memory(step.graph).peak
    run_passes(step, [FUSE.with_options(chunks=chunks)])
    wide = [n.meta["val"] for n in step.graph.nodes
            if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].shape[-1:] == (VOCAB,)]  # fmt: skip
    assert {(v.dtype, len(v)) for v in wide if v.shape[0] != WIDTH} == {(torch.bfloat16, 1024 // chunks)}
    fp32 = 1024 * VOCAB * 4
    assert estimate_memory(step.graph).peak < before - 2 * fp32
    if chunks == 4:
        assert estimate_memory(step.graph).peak < 2 * fp32
    frozen = {n for n in step.graph.nodes if n.op == "placeholder" and "reference_out" in n.name}
    readers = [user for node in frozen for t in node.users for user in t.users if user.target is aten.mm.default]
    # The teacher's product: in forward, and again for the student's gradient.
    assert len(readers) == (1 if chunks == 1 else 2 * chunks)


def read_elsewhere(pair, ids):
    logits = pair.policy(ids)
    return picked(logits, ids).mean() + logits.tanh().mean()


def top(pair, ids):
    logs = pair.policy(ids).log_softmax(-1)
    return logs.gather(-1, ids.unsqueeze(-1)).mean() + logs.amax()


def several(pair, ids):
    return pair.policy(ids).log_softmax(-1).gather(-1, torch.stack([ids, ids + 1], -1) % VOCAB).mean()


def of_other_rows(pair, ids):
    """One label for each token, in the dimension of the tokens."""
    return pair.policy(ids).log_softmax(-1).gather(1, (ids % 7).unsqueeze(-1)).mean()


def no_product(pair, ids):
    return picked(pair.policy(ids).cumsum(-1), ids).mean()


def mutual(pair, ids):
    """Two heads that both learn; the other one is the policy's own table."""
    logs, others = (
        pair.policy(ids).log_softmax(-1),
        pair.policy.up(pair.policy.table(ids)) @ pair.policy.table.weight.t(),
    )
    others = others.log_softmax(-1)
    return (logs.exp() * (logs - others)).sum(-1).mean() - logs.gather(-1, ids.unsqueeze(-1)).mean()


def squared(pair, ids):
    """A sum over the vocabulary of another form."""
    logs = pair.policy(ids).log_softmax(-1)
    return (logs.exp() * logs * logs).sum(-1).mean() - logs.gather(-1, ids.unsqueeze(-1)).mean()


def chosen_by_entropy(pair, ids):
    """Labels that depend on the entropy cannot be there before it."""
    logs = pair.policy(ids).log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    labels = torch.where(entropy.detach() > 2, ids, ids + 1) % VOCAB
    return entropy.mean() - logs.gather(-1, labels.unsqueeze(-1)).mean()


def likeliest(pair, ids):
    """A value of each row, detached, is no sum: the probabilities would have to stay."""
    logs = pair.policy(ids).log_softmax(-1)
    return (logs.exp() * logs).sum(-1).mean() - (
        logs.gather(-1, ids.unsqueeze(-1)) * logs.detach().amax(-1, True)
    ).mean()


def weighted_by_an_input(pair, ids):
    """What is multiplied is a tensor of the step, made by no operator."""
    logs = pair.policy(ids).log_softmax(-1)
    return (pair.reference.out.bias * logs).sum(-1).mean() - logs.gather(-1, ids.unsqueeze(-1)).mean()


LEFT = [likeliest, chosen_by_entropy, read_elsewhere, top, several, of_other_rows, no_product, squared]


@pytest.mark.parametrize("loss_fn", LEFT)
def test_left_as_it_is(loss_fn):
    model, ids = Pair(), ids_of()
    expected, grads, *_ = gradients(model, loss_fn, ids, None)
    loss, mine, _, report = gradients(model, loss_fn, ids, [FUSE.with_options(chunks=2)])
    (note,) = report.notes
    assert (report.matched, report.changed) == (1, 0)
    assert "of which labels are gathered, is left unchanged: " in note and "log-probabilities of" not in report.summary
    torch.testing.assert_close(loss, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-5, atol=1e-6)


def joined(pair, ids):
    logits = pair.policy(ids).flatten(0, 1)
    return F.cross_entropy(torch.cat([logits, logits * 2]), ids.repeat(2, 1).flatten(), label_smoothing=0.1)


def of_a_parameter(pair, ids):
    return F.cross_entropy(pair.policy.up.weight, ids.flatten()[:WIDTH] % WIDTH, label_smoothing=0.1)


@pytest.mark.parametrize("loss_fn", [joined, of_a_parameter])
def test_smoothed_labels_of_logits_that_no_view_makes(loss_fn):
    model, ids = Pair(), ids_of()
    expected, *_ = gradients(model, loss_fn, ids, None)
    loss, *_, report = gradients(model, loss_fn, ids, [FUSE])
    assert report.changed == 0
    torch.testing.assert_close(loss, expected)


def test_a_sum_with_an_input_of_the_step_is_left():
    model, ids = Pair(bias=True), ids_of()
    expected, *_ = gradients(model, weighted_by_an_input, ids, None)
    loss, *_, report = gradients(model, weighted_by_an_input, ids, [FUSE])
    assert report.changed == 0 and len(report.notes) == 1
    torch.testing.assert_close(loss, expected)


def test_two_heads_that_both_learn_are_left():
    model, ids = Pair(), ids_of()
    expected, *_ = gradients(model, mutual, ids, None)
    loss, *_, report = gradients(model, mutual, ids, [FUSE.with_options(chunks=2)])
    assert report.changed == 0 and all("2 heads meet in it, 2 of them with a gradient" in note for note in report.notes)
    torch.testing.assert_close(loss, expected)


def test_the_rest_of_the_passes_run_after_it():
    """With an optimizer, clipping and the exact passes, and once more with microbatches."""
    for accumulate in (1, 2):
        model, ids, losses = Pair(), ids_of(), []
        for more in ([], [FUSE.with_options(chunks=2)]):
            twin = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(twin.policy.parameters(), lr=0.01, fused=True)
            passes = [get("dead_code"), *more, get("inplace_update")]
            step = stepgraph.capture(twin, preference, ids, optimizer, max_grad_norm=1.0, accumulate=accumulate,
                                     passes=passes)  # fmt: skip
            losses.append(torch.stack([step(ids) for _ in range(4)]))
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        assert losses[0][-1] < losses[0][0]


def test_a_z_loss_of_other_than_the_head_costs_no_trial(monkeypatch):
    """Each trial copies the graph, and models have a router in every layer."""
    tried = []
    monkeypatch.setattr(fuse, "_can_be_spelled", tried.append)
    *_, report = gradients(Pair(), lambda pair, ids: pair.policy(ids).logsumexp(-1).square().mean(), ids_of(), [FUSE])
    assert report.changed == 0 and tried == []
