"""Python that reads values of a step to store them: after the step, with eager's values."""

import copy

import pytest
import torch
from torch import nn

import stepgraph


class Storing:
    """A loss as Trainers have: it reads, branches, counts and stores in Python."""

    def __init__(self):
        self.metrics = {"train": {}}
        self.seen = 0
        self.beta = 2.0

    def __call__(self, model, batch):
        y = model(batch["x"])
        loss = self.beta * y.square().mean()
        valid = batch["mask"].sum()
        stored = self.metrics["train"]
        stored.setdefault("mean", []).append((y.sum() / valid).item() if valid > 0 else 0.0)
        self.seen += valid.item()
        stored["seen"] = [self.seen]
        total, count = float(y.detach()[batch["mask"]].sum()), int(batch["mask"].sum())
        stored.setdefault("masked", []).append(total / count if count > 0 else -1.0)
        stored.setdefault("first", []).append(y.detach()[0].tolist())
        return loss * 0.5


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(6, generator=generator) > 0.5 for _ in range(count)]
    masks[1] = torch.zeros(6, dtype=torch.bool)  # the other branch
    return [{"x": torch.randn(6, 4, generator=generator), "mask": mask} for mask in masks]


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def eager(loss_fn, model, parts=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches():
        split = zip(*(value.chunk(parts) for value in batch.values()), strict=True)
        found = [loss_fn(model, dict(zip(batch, part, strict=True))) / parts for part in split]
        for loss in found:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.detach() for loss in found))
    return losses


def captured(loss_fn, model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stepgraph.capture(model, loss_fn, batches()[0], optimizer, passes="exact", replay=True, **options)


@pytest.mark.parametrize("parts", [1, 2])
def test_stores_what_eager_stores_one_step_late(parts):
    plain, storing, model = Storing(), Storing(), linear()
    losses = eager(plain, copy.deepcopy(model), parts)
    step = captured(storing, model, accumulate=parts)
    assert storing.metrics == {"train": {}} and storing.seen == 0  # the capture left nothing
    first, after = step.program, lambda: None
    for batch, loss in zip(batches(), losses, strict=True):
        assert step(batch) == loss
        after()
        after = step.after
    after()
    assert storing.metrics == plain.metrics and storing.seen == plain.seen
    assert step.program is first  # what is stored captures nothing again
    storing.beta = 3.0
    step(batches()[0])
    assert step.program is not first


def refused(loss_fn):
    with pytest.raises(stepgraph.CaptureError) as error:
        captured(loss_fn, linear())
    return str(error.value)


def line_of(function, offset):
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def test_what_branches_on_a_value_is_refused_with_its_line():
    def loss_fn(model, batch):
        loss = model(batch["x"]).square().mean()
        seen.append(loss.item())
        if loss > 5:
            loss = loss * 0.1
        return loss

    seen = []
    assert line_of(loss_fn, 3) in refused(loss_fn)
    assert seen == []


@pytest.mark.parametrize("use", [lambda x, n: x * n, lambda x, n: x[: int(n)].mean() * 0 + x, lambda x, n: x.add_(n)])
def test_a_value_that_the_loss_is_made_of_is_refused(use):
    def loss_fn(model, batch):
        x = model(batch["x"]).square().mean(dim=1)
        count = x.detach().sum().item()
        return use(x, count).mean() if use.__code__.co_argcount else x

    assert line_of(loss_fn, 2) in refused(loss_fn)


def test_a_tensor_picked_by_values_is_refused_in_the_loss():
    def loss_fn(model, batch):
        y = model(batch["x"])
        return y[y > 0].square().mean()

    assert line_of(loss_fn, 2) in refused(loss_fn)


def test_what_the_loss_reads_of_the_batch_alone_is_part_of_the_form():
    def loss_fn(model, batch):
        return model(batch["x"])[batch["mask"]].square().sum() / batch["mask"].sum().clamp(min=1).item()

    losses, step = eager(loss_fn, linear()), captured(loss_fn, linear())
    assert [step(batch) for batch in batches()] == losses


def test_the_batch_may_decide_on_a_loss_that_also_stores_values():
    def loss_fn(model, batch):
        y = model(batch["x"]).square().mean(dim=1)
        chosen = torch.nonzero(batch["mask"]).view(-1)
        picked = y.index_select(0, chosen) if len(chosen) else y[:1] * 0
        loss = nn.MSELoss()(picked, torch.zeros_like(picked)) + y[~batch["mask"]].sum()
        seen.append((loss.item(), picked.shape[0], batch["x"].sum().item(), batch["rows"].sum().item()))
        return loss

    given = [batch | {"rows": torch.full((6,), i)} for i, batch in enumerate([*batches()[:2], *batches()])]
    plain, model = linear(), linear()
    seen = []
    losses = [loss_fn(plain, batch) for batch in given]
    expected, seen = seen, []
    step = stepgraph.capture(model, loss_fn, given[0], passes="exact", replay=True)
    assert seen == []
    programs, after = [], lambda: None
    for batch, loss in zip(given, losses, strict=True):
        assert step(batch) == loss
        after()
        after = step.after
        programs.append(step.program)
    after()
    assert seen == expected
    assert programs[0] is programs[2] and programs[1] is programs[3]  # not by what is only stored
    assert programs[0] is not programs[1]
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        p.grad = q.grad = None
        loss_fn(plain, given[0]).backward()
        step(given[0])
        assert torch.equal(p.grad, q.grad)


def test_a_minimum_of_what_a_mask_picks_is_stored():
    """As GRPO stores the least of what is no NaN: of nothing there is none."""

    def least(x):
        return torch.tensor(float("nan")) if x.isnan().all() else x[~x.isnan()].min()

    def loss_fn(model, batch):
        y = model(batch["x"]).square()
        seen.append(least((y.detach() * batch["mask"][:, None]).sum(1) / batch["mask"].float()).item())
        return y.mean()

    seen, model = [], linear()
    losses = eager(loss_fn, copy.deepcopy(model))
    expected, seen = seen, []
    step = captured(loss_fn, model)
    for batch, loss in zip(batches(), losses, strict=True):
        assert step(batch) == loss
        step.after()
    assert repr(seen) == repr(expected) and "nan" in repr(seen)


def test_a_read_of_another_branch():
    def loss_fn(model, batch):
        y = model(batch["x"])
        empty = batch["mask"].sum() == 0
        seen.append(-1.0 if empty else y.mean().item())
        return y.square().mean()

    seen = []
    losses = eager(loss_fn, linear())
    expected, seen[:] = list(seen), []
    step = captured(loss_fn, linear())
    for batch, loss in zip(batches(), losses, strict=True):
        assert step(batch) == loss
        step.after()
    assert seen == expected and seen[1] == -1.0


def test_a_read_that_another_read_picks_is_refused():
    def loss_fn(model, batch):
        y = model(batch["x"])
        place = batch["mask"].sum().item() % 4
        seen.append(y[0, place].item())
        return y.square().mean()

    seen = []
    assert line_of(loss_fn, 3) in refused(loss_fn)


def test_without_replay_a_read_stays_refused():
    with pytest.raises(stepgraph.CaptureError, match=r"\.item\(\)"):
        stepgraph.capture(linear(), Storing(), batches()[0], passes="exact")


@pytest.mark.parametrize("check", [torch.isfinite, lambda loss: not torch.isnan(loss).any()], ids=["finite", "nan"])
def test_a_loss_that_asserts_what_its_values_are(check):
    def loss_fn(model, batch):
        loss = model(batch["x"]).square().mean()
        assert check(loss)
        return loss

    model, batch = linear(), batches()[0]
    step = stepgraph.capture(model, loss_fn, batch, passes="exact", replay=True)
    assert torch.equal(step(batch), loss_fn(model, batch))
    step.after()
    step({**batch, "x": batch["x"] * float("nan")})
    with pytest.raises(AssertionError):
        step.after()
