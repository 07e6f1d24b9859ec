"""torch's random generators in forward: those of the model are drawn from, and none is seeded there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.errors import CaptureError

OWN = torch.Generator()


class Noisy(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.linear, self.noise = nn.Linear(6, 6), noise

    def forward(self, x):
        return self.linear(x) + self.noise(x)


def loss_fn(model, batch):
    return model(batch).sin().mean()


def seeds(x):
    torch.manual_seed(3)
    return torch.randn(6)


def forks(x):
    with torch.random.fork_rng(devices=[]):
        return torch.randn(6)


def rewinds(x):
    state = torch.get_rng_state()
    noise = torch.randn(6)
    torch.set_rng_state(state)
    return noise


def seeds_gpus(x):
    torch.cuda.manual_seed_all(3)
    return torch.randn(6)


def makes(x):
    return torch.randn(6, generator=torch.Generator().manual_seed(3))


def reads_the_seed(x):
    return torch.initial_seed() % 3


def seeds_own(x):
    return torch.empty(6).normal_(generator=OWN.manual_seed(3))


def rewinds_default(x):
    state = torch.default_generator.get_state()
    noise = torch.randn(6)
    torch.default_generator.set_state(state)
    return noise


def reads_own(x):
    return torch.randn(6) * OWN.initial_seed()


@pytest.mark.parametrize(
    "noise, message",
    [(one, "sets the state of torch's random generator") for one in (seeds, forks, seeds_gpus)]
    + [(rewinds, "reads the state of torch's random generator")]
    + [(reads_the_seed, "reads the seed of torch's random generator")]
    + [(makes, "draws from a torch.Generator that forward makes or seeds")]
    + [(one, r"calls \w+\(\) of a torch.Generator") for one in (seeds_own, rewinds_default, reads_own)],
)
def test_seeding_in_forward_is_refused(noise, message):
    model, place = Noisy(noise), rf"the model \(.*test_generators.py:\d+\) {message}.*in the batch"
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=place) as caught:
        stepgraph.capture(model, loss_fn, torch.ones(4, 6), passes="exact")
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)  # works again


def test_the_default_generator_as_an_object():
    def noise(x):
        torch.default_generator.manual_seed(3)
        return torch.randn(6)

    model, before = Noisy(noise), torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"calls manual_seed\(\) of a torch\.Generator"):
        stepgraph.capture(model, loss_fn, torch.ones(4, 6), passes="exact")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_model_is_drawn_from():
    start, ends = Noisy(lambda x: torch.randn(6, generator=OWN)), []
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for captured in (False, True):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        OWN.manual_seed(1)
        step = stepgraph.capture(model, loss_fn, x, optimizer, passes="exact") if captured else None
        for _ in range(3):
            if captured:
                assert step.verify(x).bitwise
                step(x)
                continue
            loss_fn(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*model.parameters(), OWN.get_state()])
    assert all(map(torch.equal, *ends))


def test_what_distributions_check_changes_nothing_where_it_holds(check_training, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile turns it off for good

    def sampled(model, batch):
        loc, scale = model(batch["x"]).chunk(2, -1)
        posterior = torch.distributions.Normal(loc, F.softplus(scale))
        choice = torch.distributions.Categorical(logits=loc)
        return posterior.rsample().square().mean() - choice.log_prob(choice.sample()).mean()

    check_training(nn.Linear(6, 8), sampled, [{"x": torch.randn(4, 6)}], None, accumulate=2, steps=2)
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)
