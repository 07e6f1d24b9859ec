"""Losses that change the state of modules outside of the model: another network, a critic, a criterion with buffers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from tests.capture.conftest import assert_same_state


def _generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


def _critic() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))


class Centered(nn.Module):
    """DINO's criterion: a moving average that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (x - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
        return loss


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-2)


def trained(networks: nn.ModuleDict, losses: dict, batches: list, captured: bool, **options) -> tuple[list, list]:
    """Each step trains every network of ``losses`` by its own; (the losses of all steps, the captured steps)."""
    optimizers = {name: adam(networks[name]) for name in losses}
    steps = {}
    if captured:
        for name, loss in losses.items():
            steps[name] = stepgraph.capture(networks[name], loss, batches[0], optimizers[name], **options)
    found = []
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        for name, loss_fn in losses.items():
            optimizers[name].zero_grad()
            if captured:
                found.append(steps[name](batch).clone())
                continue
            n = options.get("accumulate", 1)
            for part in batch.chunk(n):
                loss = loss_fn(networks[name], part)
                (loss / n if n > 1 else loss).backward()
            found.append(loss.detach())
            if "max_grad_norm" in options:
                nn.utils.clip_grad_norm_(networks[name].parameters(), options["max_grad_norm"])
            optimizers[name].step()
            optimizers[name].zero_grad()
    return found, list(steps.values())


def gan() -> tuple[nn.ModuleDict, dict]:
    networks = nn.ModuleDict({"critic": _critic(), "generator": _generator()})
    critic, generator = networks["critic"], networks["generator"]

    def critics(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = generator(torch.randn(len(batch), 4))
        return F.softplus(-model(batch)).mean() + F.softplus(model(fake)).mean()

    def generators(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.softplus(-critic(model(torch.randn(len(batch), 4)))).mean()

    return networks, {"critic": critics, "generator": generators}


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05}, {"accumulate": 2}])
def test_two_networks_train_each_other_as_in_eager(options: dict):
    batches = list(torch.randn(4, 6, 6))
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        networks, losses = gan()
        runs.append((networks, *trained(networks, losses, batches, captured, passes="exact", **options)))
    if "accumulate" not in options:
        assert torch.equal(torch.stack(runs[0][1]), torch.stack(runs[1][1]))
    assert_same_state(runs[0][0], runs[1][0], 0)


def test_verify_compares_and_restores_the_other_network():
    networks, losses = gan()
    batches = list(torch.randn(2, 6, 6))
    _, (_, generator) = trained(networks, losses, batches, True, passes="exact", max_grad_norm=1.0)
    networks["critic"].zero_grad()
    before = copy.deepcopy(networks.state_dict())
    report = generator.verify(batches[0])
    assert report.bitwise
    assert all(torch.equal(value, before[name]) for name, value in networks.state_dict().items())


def test_its_gradients_land_as_backward_leaves_them():
    model, critic, x = nn.Linear(4, 4), nn.Linear(4, 1), torch.randn(3, 4)
    step = stepgraph.capture(model, lambda m, b: critic(m(b)).mean(), x, adam(model), passes="exact")
    expected = torch.zeros_like(critic.weight)
    for _ in range(2):
        expected += torch.autograd.grad(critic(model(x)).mean(), critic.weight)[0]
        step(x)
        assert torch.equal(critic.weight.grad, expected) and model.weight.grad is None


def test_a_criterion_with_a_buffer_that_it_replaces():
    batches, runs = list(torch.randn(4, 5, 4)), []
    for captured in (False, True):
        torch.manual_seed(0)
        networks = nn.ModuleDict({"model": nn.Linear(4, 6), "criterion": Centered()})
        criterion = networks["criterion"]
        losses = {"model": lambda m, x, criterion=criterion: criterion(m(x))}
        runs.append((networks, *trained(networks, losses, batches, captured, passes="exact")))
    assert torch.equal(torch.stack(runs[0][1]), torch.stack(runs[1][1])) and criterion.center.any()
    assert_same_state(runs[0][0], runs[1][0], 0)


class Margins(nn.Module):
    """A criterion that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.centers, self.scale = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.normalize(x) @ F.normalize(self.centers).T * self.scale.exp(), torch.arange(len(x)))


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.05}, {"accumulate": 2}])
def test_a_criterion_that_the_same_optimizer_trains(options: dict):
    batches, runs = list(torch.randn(4, 6, 4)), []
    for captured in (False, True):
        torch.manual_seed(0)
        networks = nn.ModuleDict({"model": nn.Linear(4, 6), "criterion": Margins()})
        model, criterion, optimizer = networks["model"], networks["criterion"], adam(networks)
        loss_fn = lambda m, b, criterion=criterion: criterion(m(b))  # noqa: E731
        n = options.get("accumulate", 1)
        if captured:
            step = stepgraph.capture(model, loss_fn, batches[0], optimizer, passes="exact", **options)
            assert step.verify(batches[0]).bitwise
        for batch in batches:
            if captured:
                step(batch)
                continue
            for part in batch.chunk(n):
                (loss_fn(model, part) / n).backward()
            if n == 1:
                nn.utils.clip_grad_norm_(networks.parameters(), options["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
        runs.append(networks)
    assert_same_state(*runs, 0)


def test_a_module_around_the_model():
    """One that holds the model, as a diffusion process does, counts with what else it has."""
    batches, runs = list(torch.randn(3, 5, 4)), []
    for captured in (False, True):
        torch.manual_seed(0)
        around = nn.ModuleDict({"model": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6)})
        losses = {"model": lambda m, x, around=around: around["norm"](around["model"](x)).square().sum()}
        runs.append((around, *trained(around, losses, batches, captured, passes="exact")))
    assert torch.equal(torch.stack(runs[0][1]), torch.stack(runs[1][1]))
    assert_same_state(*[run[0]["norm"] for run in runs], 0)


def test_another_network_or_mode_is_captured_again():
    class Loss:
        def __init__(self) -> None:
            self.critic = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

        def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return self.critic(model(x)).square().sum() + self.critic[0].weight.sum()

    model, loss, x = nn.Linear(4, 4), Loss(), torch.randn(5, 4)
    step = stepgraph.capture(model, loss, x, passes="exact")
    for change in (loss.critic.eval, loss.critic.train, lambda: setattr(loss, "critic", Loss().critic)):
        change()
        twin = copy.deepcopy(loss)
        assert torch.equal(step(x), twin(model, x))
        assert all(torch.equal(a, b) for a, b in zip(loss.critic.buffers(), twin.critic.buffers(), strict=True))


def test_skipped_steps_leave_its_buffers():
    model, critic, x = nn.Linear(4, 6), _critic(), torch.randn(5, 4)
    loss = lambda m, b: critic(m(b)).square().sum()  # noqa: E731
    step = stepgraph.capture(model, loss, x, adam(model), max_grad_norm=1.0, on_nonfinite="skip", passes="exact")
    before = copy.deepcopy(critic.state_dict())
    step(torch.full_like(x, torch.inf))
    assert step.metrics["skipped"]
    assert all(torch.equal(value, before[name]) for name, value in critic.state_dict().items())


def test_a_tensor_that_no_module_holds_is_refused():
    class Loss:
        def __init__(self) -> None:
            self.mean = torch.zeros(4)

        def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(model(x).detach().mean(0))
            return (model(x) - self.mean).square().sum()

    with pytest.raises(stepgraph.CaptureError, match="neither its parameter nor its buffer; register it as a buffer"):
        stepgraph.capture(nn.Linear(4, 4), Loss(), torch.randn(5, 4), passes="exact")
