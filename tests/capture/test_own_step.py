"""Optimizers by their own ``step``, which no formula of stepgraph knows: as eager, bit for bit; else refused."""

import copy
import functools
import os
import warnings
from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph import CaptureError
from tests.capture.own_optimizers import WRITTEN, Counted, Momentum, OfItself, ScheduleFree, Written

optim = torch.optim
FACTOR = 1.0

TORCHS = {
    "rmsprop": functools.partial(optim.RMSprop, momentum=0.9, centered=True, weight_decay=0.1),
    "nadam": functools.partial(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "nadam_foreach": functools.partial(optim.NAdam, foreach=True),
    "radam": optim.RAdam,
    "adagrad": functools.partial(optim.Adagrad, lr_decay=0.1),
    "adadelta": optim.Adadelta,
    "adamax_foreach": functools.partial(optim.Adamax, foreach=True),
    "asgd": functools.partial(optim.ASGD, t0=2),
    "rprop": optim.Rprop,
    "adamw_amsgrad": functools.partial(optim.AdamW, amsgrad=True),
}


def model():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pairs(n=2):
    return [{"x": torch.randn(4, 5), "y": torch.randn(4, 5)} for _ in range(n)]


@pytest.mark.parametrize("kind", [*TORCHS.values(), *WRITTEN.values()], ids=[*TORCHS, *WRITTEN])
def test_training(check_training, kind):
    def groups(m):
        return kind([{"params": [*m[0].parameters()]}, {"params": [*m[2].parameters()], "lr": 0.03}], lr=0.01)

    schedule = functools.partial(optim.lr_scheduler.CosineAnnealingLR, T_max=8)
    check_training(model(), mse, pairs(), groups, make_schedule=schedule, max_grad_norm=0.3, steps=7)


@pytest.mark.parametrize("kind", [Counted, Momentum, optim.NAdam])
def test_accumulation_and_half_precision(check_training, kind):
    batches = [{key: value.bfloat16() for key, value in pair.items()} for pair in pairs()]
    check_training(model().bfloat16(), mse, batches, lambda m: kind(m.parameters()), accumulate=2, steps=4)


def trained(make, captured, change=None, before=None, steps=6, schedule=None):
    """(parameters after training, the step): ``before`` the first step and in the midst the user changes something."""
    torch.manual_seed(0)
    twin, batches = model(), pairs()
    optimizer = make(twin.parameters())
    scheduler = schedule and schedule(optimizer)
    step = stepgraph.capture(twin, mse, batches[0], optimizer, passes="exact") if captured else None
    if before:
        before(twin, optimizer)
    for i in range(steps):
        if change and i == 3:
            change(twin, optimizer)
        if step:
            step(batches[i % 2])
        else:
            mse(twin, batches[i % 2]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return list(twin.parameters()), step


class Reading(OfItself):
    """Reads numbers from everywhere."""

    constant = 1.0

    def __init__(self, params):
        super().__init__(params)
        self.helper, self.table = SimpleNamespace(value=1.0), {"a": [1.0]}

    def update(self, p, grad, state, group):
        factor = (
            FACTOR
            * self.constant
            * self.factor
            * self.defaults.get("scale", 1.0)
            * self.helper.value
            * self.table["a"][0]
        )
        state["n"] = state.get("n", 0) + 1
        p.add_(grad, alpha=-group["lr"] * factor / sqrt(state["n"]))


class OfContainers(Written):
    """Reads the optimizer's own containers, and attributes of parameters."""

    def update(self, p, grad, state, group):
        known = (p in self.state) + len(self.state) + len(state) + sum(map(len, self.state.values()))
        known += len(self.param_groups) + len(self.defaults) + len(group) + ("key" in self.state)
        p.add_(grad, alpha=-group["lr"] * getattr(p, "factor", 1.0) / (1 + known))


class Looked(Written):
    """A first step that is another one, by membership alone."""

    def update(self, p, grad, state, group):
        p.add_(grad, alpha=-group["lr"])

    def step(self, closure=None):
        new = [p for p in self.param_groups[0]["params"] if p not in self.state]
        super().step()
        with torch.no_grad():
            for p in new:
                p.mul_(0.5)


def mark(model, optimizer):
    for param in model.parameters():
        param.factor = 3.0


def add_state(model, optimizer):
    for state in optimizer.state.values():
        state["note"] = "x"


def set_option(key, value):
    def change(model, optimizer):
        for group in optimizer.param_groups:
            group[key] = value

    return change


def set_counts(model, optimizer):
    for i, state in enumerate(optimizer.state.values()):
        state["step"] = 7 + i % 2


def fill_rate(model, optimizer):
    optimizer.param_groups[0]["lr"].fill_(0.2)


def double(model, optimizer):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def resume(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CHANGES = {
    "eps": (Counted, set_option("eps", 0.01), None),
    "betas": (Counted, set_option("betas", (0.5, 0.6)), None),
    "counts": (Counted, set_counts, None),
    "attribute": (Reading, lambda m, o: setattr(o, "factor", 2.0), None),
    "table": (Reading, lambda m, o: o.table.update(a=[3.0]), None),
    "defaults": (Reading, lambda m, o: o.defaults.update(scale=2.0), None),
    "helper": (Reading, lambda m, o: setattr(o.helper, "value", 2.0), None),
    "containers": (OfContainers, None, None),
    "marks_before": (OfContainers, None, mark),
    "marks": (OfContainers, mark, None),
    "entries": (OfContainers, add_state, None),
    "group_entries": (OfContainers, set_option("note", "x"), None),
    "membership": (Looked, None, None),
    "tensor": (
        lambda p: optim.RMSprop(p, lr=torch.tensor(0.01)),
        lambda m, o: o.param_groups[0]["lr"].fill_(0.2),
        None,
    ),
    "resumed": (Counted, resume, None),
    "resumed_groups": (ScheduleFree, resume, None),
    "resumed_tensors": (optim.NAdam, resume, None),
    "parameters_before": (ScheduleFree, None, double),
    "rate_before": (optim.Rprop, None, set_option("lr", 0.3)),
}


@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize(("make", "change", "before"), CHANGES.values(), ids=CHANGES)
def test_nothing_is_frozen(make, change, before):
    (eager, _), (captured, _) = (trained(make, captured, change, before) for captured in (False, True))
    assert all(map(torch.equal, eager, captured))


@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize("place", ["global", "class"])
def test_constants_of_code_are_watched(place, monkeypatch):
    def change(model, optimizer):
        if place == "global":
            monkeypatch.setitem(globals(), "FACTOR", 2.0)
        else:
            monkeypatch.setattr(Reading, "constant", 2.0)

    ends = []
    for captured in (False, True):
        ends.append(trained(Reading, captured, change)[0])
        monkeypatch.undo()
    assert all(map(torch.equal, *ends))


def test_a_schedule_of_betas_costs_one_more_capture():
    schedule = functools.partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20)
    (eager, _), (captured, step) = (trained(Counted, captured, schedule=schedule) for captured in (False, True))
    assert all(map(torch.equal, eager, captured))
    assert len(step._forms) == 2


def test_the_first_step_of_a_later_parameter(check_training):
    """A parameter that some batches do not reach counts its own steps."""

    def loss(model, batch):
        out = model[0](batch["x"]).tanh()
        return F.mse_loss(model[2](out), batch["y"]) if batch["deep"] else out.square().mean()

    batches = [pair | {"deep": i % 2 == 1} for i, pair in enumerate(pairs(3))]
    for kind in (Counted, Momentum, optim.NAdam):
        check_training(model(), loss, batches, lambda m, kind=kind: kind(m.parameters()), steps=6)


def test_a_step_that_is_left_out_counts_nothing():
    twin, (batch,) = model(), pairs(1)
    optimizer = Counted(twin.parameters())
    step = stepgraph.capture(twin, mse, batch, optimizer, passes="exact", on_nonfinite="skip")
    step(batch)
    before = copy.deepcopy((twin.state_dict(), optimizer.state_dict()))
    step({"x": batch["x"] * float("nan"), "y": batch["y"]})
    assert step.metrics["skipped"]
    after = twin.state_dict(), optimizer.state_dict()
    assert repr(before) == repr(after)


class Asking(Written):
    def update(self, p, grad, state, group):
        if grad.norm().item() > 1:
            p.add_(grad, alpha=-group["lr"])


class AskingOrNot(Asking):
    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["capturable"] = False


class Looping(Written):
    def update(self, p, grad, state, group):
        state["n"] = state.get("n", 0) + 1
        for _ in range(state["n"]):
            p.add_(grad, alpha=-group["lr"])


class Assigning(Written):
    def update(self, p, grad, state, group):
        p.data = p.data - group["lr"] * grad


class Logging(Reading):
    def update(self, p, grad, state, group):
        self.table["a"].append(1.0)


class Marking(Written):
    def update(self, p, grad, state, group):
        p.count = getattr(p, "count", 0) + 1


class Forgetting(Momentum):
    def step(self, closure=None):
        super().step()
        self.state = {}


class Growing(Written):
    def update(self, p, grad, state, group):
        self.param_groups.append({**group, "params": []})


class Sharing(Written):
    def update(self, p, grad, state, group):
        self.state.setdefault("n", 1)


class Indexing(Written):
    def update(self, p, grad, state, group):
        state["n"] = state.get("n", 0) + 1
        state.setdefault("last", torch.zeros(3, *p.shape))[state["n"] % 3] = grad


class Twice(Written):
    """Moments that are views of what is kept too."""

    def update(self, p, grad, state, group):
        if not state:
            state["both"] = torch.zeros(2, *p.shape)
            state["first"] = state["both"][0]
        state["first"].add_(grad)
        p.sub_(state["both"][0], alpha=group["lr"])


class Following(Written):
    """What it keeps of a parameter is the parameter."""

    def update(self, p, grad, state, group):
        p.sub_(grad + p - state.get("before", p * 0.5), alpha=group["lr"])
        state["before"] = p.detach()


class Averaging(Written):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.average = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def update(self, p, grad, state, group):
        self.average[0].lerp_(self.param_groups[0]["params"][0], 0.1)


class Around(optim.Optimizer):
    """Another optimizer with something done after its step, without ``Optimizer.__init__``."""

    def __init__(self, params):
        self.inner = optim.AdamW(params)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        self.inner.step()


class Drawing(Written):
    """Draws numbers on the host, by a generator of its own."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.draw = np.random.default_rng(0).random

    def update(self, p, grad, state, group):
        p.add_(grad, alpha=-self.draw())


class Entropic(Written):
    def update(self, p, grad, state, group):
        p.add_(grad, alpha=-os.urandom(1)[0] / 255)


class Seeding(Written):
    def update(self, p, grad, state, group):
        torch.manual_seed(1)
        p.add_(torch.rand_like(grad), alpha=-0.1)


class Projecting(Written):
    """Keeps an object, which it fills (as GaLore does)."""

    def update(self, p, grad, state, group):
        projector = state.setdefault("projector", SimpleNamespace())
        projector.last = grad * 2
        p.add_(projector.last, alpha=-0.1)


LOG = []


class LoggingElsewhere(Written):
    def update(self, p, grad, state, group):
        LOG.append(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Asking, r"Asking.step \(.*test_own_step.py:\d+\) reads a tensor's value.*use torch.where"),
        (AskingOrNot, r"AskingOrNot.step .* reads a tensor's value.*create it with capturable=True"),
        (Looping, r"Looping.step \(.*test_own_step.py:\d+\).*plain number"),
        (Assigning, r"Assigning.step assigns .data"),
        (Indexing, r"step \(.*test_own_step.py:\d+\) uses a count as a plain number, such as an index"),
        (Twice, r"Twice.step keeps state\['first'\] in the memory of state\['both'\]"),
        (Following, r"Following.step keeps state\['before'\] in the memory of the parameter"),
        (Averaging, "step writes into a tensor that is neither a parameter nor in its state"),
        (Around, "Around.inner is another optimizer, AdamW"),
        (Logging, "Logging.step changes what its attributes hold"),
        (LoggingElsewhere, r"sets .*LOG from .* in Python"),
        (Drawing, r"the optimizer's step draws numbers from the generator Drawing\.draw, which"),
        (Entropic, "the optimizer's step draws numbers from the system's entropy, which"),
        (Seeding, r"\(.*test_own_step.py:\d+\) sets the state of torch's random generator"),
        (Marking, "Marking.step sets count of a parameter in Python"),
        (Forgetting, "Forgetting.step replaces its state as a whole"),
        (Growing, "Growing.step changes its list of parameter groups"),
        (Projecting, r"Projecting.step keeps a SimpleNamespace in state\['projector'\].*; keep its tensors"),
        (Sharing, r"Sharing.step \(.*:\d+\) keeps state of a str"),
        (optim.LBFGS, r"LBFGS.step \(.*lbfgs.py:\d+\) needs a closure"),
        (functools.partial(optim.Adagrad, fused=True), r"Adagrad\(fused=True\)"),
    ],
)
def test_refusals(make, message):
    twin, (batch,) = model(), pairs(1)
    optimizer = make(twin.parameters())
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message) as error:
        stepgraph.capture(twin, mse, batch, optimizer, passes="exact")
    assert "\n" not in str(error.value)
    assert optimizer.state.keys() <= set(twin.parameters())
    assert not compat_left(optimizer)


def test_a_buffer_of_the_model_as_a_number_of_the_optimizer():
    """The host would read it before forward writes it."""

    class Scaled(Written):
        def update(self, p, grad, state, group):
            p.add_(grad * twin.scale, alpha=-0.1)

    twin, (batch,) = model(), pairs(1)
    twin.register_buffer("scale", torch.ones(()))
    with pytest.raises(CaptureError, match="reads scale of the model as a number"):
        stepgraph.capture(twin, mse, batch, Scaled(twin.parameters()), passes="exact")


def compat_left(optimizer):
    """Stand-ins that a failed trace would leave."""
    found = [value for group in optimizer.param_groups for value in (*group["params"], *group.values())]
    return [value for value in found if isinstance(value, torch.SymFloat | torch.SymInt) or "Fake" in str(type(value))]
