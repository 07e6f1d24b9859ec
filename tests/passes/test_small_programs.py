"""Generated programs of all kinds of operators, and sessions of captured steps, equal eager bit for bit.

The draws of CI are the same every time; the long tests have more and longer programs.
"""

import copy
import random

import pytest
import torch

import stepgraph
from tests.passes import small_programs as programs

pytestmark = pytest.mark.filterwarnings("ignore")
PACK = 50  # programs of one capture


@pytest.mark.parametrize("seed", range(10))
def test_programs(seed):
    """A thousand in all."""
    drawn = programs.drawn(seed, 100, length=2)
    assert sum(programs.compare(pack, steps=1) for pack in programs.packs(drawn, PACK)) <= 2


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 110))
def test_more_and_longer_programs(seed):
    """Three thousand in all."""
    drawn = programs.drawn(seed, 300, length=4)
    assert sum(map(programs.compare, programs.packs(drawn, PACK))) <= 15


def test_every_operator_is_drawn_in_every_way():
    lines = [line for seed in range(10) for program in programs.drawn(seed, 30) for line in program]
    assert {way for _, _, way in lines} == set(programs.WAYS)
    assert len({name for name, _, _ in lines}) > 0.9 * len(programs.OPERATORS)


# Sessions: what people do between steps.


class Session:
    """A model, its optimizers and a step, eager or captured."""

    def __init__(self, model, accumulate, captured):
        self.model, self.accumulate, self.rows = model, accumulate, 4
        parameters = list(model.parameters())
        self.optimizers = [
            torch.optim.AdamW(parameters[::2], lr=1e-2),
            torch.optim.SGD(parameters[1::2], lr=1e-2, momentum=0.9),
        ]
        self.step = None
        if captured:
            options = {"accumulate": accumulate, "max_grad_norm": 1.0, "on_nonfinite": "skip", "passes": "exact"}
            self.step = stepgraph.capture(model, programs.loss_fn, programs.batch(), self.optimizers, **options)

    def train(self, batch):
        if self.step is not None:
            return self.step(batch)
        before = copy.deepcopy((self.model.state_dict(), [o.state_dict() for o in self.optimizers]))
        total = 0
        for x in batch["x"].chunk(self.accumulate):
            loss = programs.loss_fn(self.model, {"x": x}) / self.accumulate
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if norm.isfinite() and total.isfinite():
            for optimizer in self.optimizers:
                optimizer.step()
        else:
            self.model.load_state_dict(before[0])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return total


def change_rate(session, seed):
    session.optimizers[seed % 2].param_groups[0]["lr"] *= 0.5


def freeze(session, seed):
    for name, parameter in session.model.named_parameters():
        if not name.endswith(".w") and seed % 2:
            parameter.requires_grad_(not parameter.requires_grad)


def load(session, seed):
    held = session.model.state_dict().items()
    session.model.load_state_dict({name: t * 0.9 if t.is_floating_point() else t for name, t in held})


def evaluate(session, seed):
    session.model.train(not session.model.training)


def verify(session, seed):
    if session.step is not None:
        assert session.step.verify(programs.batch(seed, session.rows)).bitwise


def skip(session, seed):
    session.train({"x": torch.full((4, 6), float("nan"))})


def change_shape(session, seed):
    session.rows = 5 - session.rows  # one row is repeated


EVENTS = [change_rate, freeze, load, evaluate, verify, skip, change_shape]


def check_session(seed, events):
    draw = random.Random(seed)
    model = programs.Pack(programs.drawn(seed, 3, length=2))
    sessions = [Session(copy.deepcopy(model), 1, captured) for captured in (False, True)]
    for i in range(events):
        event, numbers = draw.choice(EVENTS), draw.randrange(1000)
        results = []
        for session in sessions:
            event(session, numbers)
            torch.manual_seed(numbers)
            results.append(session.train(programs.batch(numbers, session.rows)))
        assert programs.same_bits(*results), (seed, i, event.__name__)
        expected, actual = (programs.state(session.model) for session in sessions)
        wrong = [name for name in expected if not programs.same_bits(expected[name], actual[name])]
        assert not wrong, (seed, i, event.__name__, wrong)


@pytest.mark.parametrize("seed", range(3))
def test_sessions(seed):
    check_session(seed, 5)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10, 50))
def test_more_sessions(seed):
    check_session(seed, 12)
