"""Pieces compiled once for all lengths: they serve exactly the lengths whose numbers and assumptions fit."""

import copy
import gc

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.inductor import library
from stepgraph.inductor.library import ForLengths, generalize, numbers, skeleton
from stepgraph.passes import StepOptions

# Inductor's C++ compiler takes most of a test's time.
pytestmark = pytest.mark.slow

CONFIG = {"fallback_random": True}


# ---- numbers in terms of a length ----

forms = st.tuples(st.integers(1, 40), st.integers(1, 2), st.sampled_from([0, 0, 0, -1, 1]))


@settings(suppress_health_check=[HealthCheck.too_slow])  # a pause of a loaded machine is no slow strategy
@given(st.lists(forms, max_size=6), st.lists(st.integers(-3, 100), max_size=4), *[st.integers(2, 300)] * 3)
def test_numbers_of_two_lengths_give_those_of_a_third(made, constants, a, b, third):
    """Where the length itself is among them, whatever else depends on it; two lengths leave open whether a number grows
    with the length or its square only where both forms fit, which the third length then tells."""
    assume(a != b)

    def at(length):
        return [length, *(k * length**p + (c if p == 1 else 0) for k, p, c in made), *constants]

    found, where = generalize(at(a), at(b))
    for length in (a, b):
        n = at(length)[where]
        assert [number.at(n) for number in found] == at(length)
    if all(p == 1 and c == 0 for _, p, c in made):
        assert [number.at(at(third)[where]) for number in found] == at(third)


@pytest.mark.parametrize("pair", [([8], [8]), ([8, 3], [13, 5]), ([1], [7]), ([-1], [5])])
def test_numbers_that_are_no_length(pair):
    assert generalize(*pair) is None


# ---- pieces ----


def piece(function, *inputs):
    module = make_fx(function, tracing_mode="fake")(*inputs)
    for node in module.graph.find_nodes(op="placeholder"):
        node.target = node.name
    return module


def scores(x, w):
    """Sizes of the length, twice and three times it, its square, and less than it."""
    b, s, d = x.shape
    y = (x.view(b * s, d) @ w).view(b, s, -1)
    products = torch.softmax(y @ y.transpose(1, 2), -1) + torch.arange(s).float()
    shifted = y[:, : s - 1] * y[:, 1:]
    return products.view(b, s * s).sum(-1), shifted.cumsum(1), torch.cat([y, x, y], 1)


def arguments(length):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, length, 6, generator=generator), torch.randn(6, 6, generator=generator)


def test_one_compilation_serves_all_lengths():
    first, second = (piece(scores, *arguments(n)) for n in (10, 16))
    assert skeleton(first) == skeleton(second)
    found, where = generalize(numbers(first), numbers(second))
    made = ForLengths(second, found, where, numbers(second)[where], CONFIG)
    for length in (10, 16, 33, 60):
        n = made.at(numbers(piece(scores, *arguments(length))))
        inputs = [n, *arguments(length)]
        for ours, eager in zip(made.function(inputs), scores(*arguments(length)), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
        assert inputs == []
    # Other batches and widths differ in numbers that no length gives.
    x, w = arguments(10)
    assert made.at(numbers(piece(scores, x[:1], w))) is None
    assert made.at(numbers(piece(scores, x[..., :4], w[:4, :4]))) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w: (x @ w).mul(0.5),  # another constant
        lambda x, w: (x @ w).mul(2),  # an int that is a float in the other
        lambda x, w: (x @ w).exp(),
        lambda x, w: (w @ x.transpose(1, 2)).mul(2.0),
    ],
)
def test_skeletons_that_differ(other):
    x, w = arguments(8)
    mine = skeleton(piece(lambda x, w: (x @ w).mul(2.0), x, w))
    assert mine != skeleton(piece(other, x, w))
    assert mine == skeleton(piece(lambda x, w: (x @ w).mul(2.0), *arguments(24)))
    assert mine != skeleton(piece(lambda x, w: (x @ w).mul(2.0), x.double(), w.double()))


@torch.library.custom_op("test_lengths::pairs", mutates_args=())
def pairs(x: torch.Tensor) -> torch.Tensor:
    """Adds neighbouring rows; an odd number of rows keeps its last."""
    even = x[: len(x) // 2 * 2].view(len(x) // 2, 2, -1).sum(1)
    return torch.cat([even, x[-1:]]) if len(x) % 2 else even


@pairs.register_fake
def _(x):
    rows = x.shape[0] // 2 if x.shape[0] % 2 == 0 else x.shape[0] // 2 + 1
    return x.new_empty(rows, x.shape[1])


@torch.library.custom_op("test_lengths::known", mutates_args=())
def known(x: torch.Tensor) -> torch.Tensor:
    return x * len(x)


@known.register_fake
def _(x):
    return x.new_empty(int(x.shape[0]), x.shape[1])


@torch.library.custom_op("test_lengths::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@refuses.register_fake
def _(x):
    if not isinstance(x.shape[0], int):
        raise NotImplementedError("this operator wants numbers")
    return torch.empty_like(x)


def compiled(function, *inputs):
    """The piece of ``function`` as a step with ``any_length`` compiles it."""
    module = piece(function, *inputs)
    return library.compiled_once((function, *numbers(module)), module, CONFIG, True)


def test_what_the_compiler_assumed_of_the_length_is_asked_of_each():
    """It was compiled for even lengths: an odd one is compiled by itself, and right."""

    def function(x):
        return pairs(x.exp()) * 2

    uses = {}
    for n in (4, 8, 12, 7, 20):
        x = torch.randn(n, 3)
        module, uses[n] = compiled(function, x)
        torch.testing.assert_close(module(x), function(x))
        uses[n] = (uses[n].reused, uses[n].any_length)
        vars(test_what_the_compiler_assumed_of_the_length_is_asked_of_each).setdefault("kept", []).append(module)
    assert uses == {4: (False, False), 8: (False, True), 12: (True, True), 7: (False, False), 20: (True, True)}


@pytest.mark.parametrize(("operator", "why"), [(known, "the compiler had to know"), (refuses, "wants numbers")])
def test_a_piece_that_cannot_be_for_any_length_says_why(operator, why):
    def function(x):
        return operator(x.exp()) * 2

    kept = []
    for i, n in enumerate((4, 8, 12)):
        x = torch.randn(n, 3)
        module, use = compiled(function, x)
        kept.append(module)
        torch.testing.assert_close(module(x), function(x))
        assert not use.reused and not use.any_length
        assert (why in use.note) == (i > 0)


def test_torch_s_settings_are_part_of_what_is_shared():
    """Inductor is told to compile ReLU wrongly, by its own setting: what was compiled before does not serve."""

    def function(x):
        return torch.relu(x * 2) + 1

    x, results = torch.randn(5, 3), []
    for bug in (None, "accuracy", None):
        with config.patch({"cpp.inject_relu_bug_TESTING_ONLY": bug}):
            module, use = compiled(function, x)
            results.append((module, use.reused, torch.allclose(module(x), function(x))))
    assert [result[1:] for result in results] == [(False, True), (False, False), (True, True)]


# ---- steps ----


class Tiny(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed, self.inner = nn.Embedding(19, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 19)

    def forward(self, ids):
        x = self.embed(ids)
        seen = torch.softmax((x @ x.transpose(1, 2)).tril() * 0.3, -1) @ x
        return self.head(torch.tanh(self.inner(seen)))


def loss_of(model, batch):
    logits = model(batch["ids"])
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def batch_of(length, rows=3):
    generator = torch.Generator().manual_seed(length)
    return {"ids": torch.randint(19, (rows, length), generator=generator)}


def inductor_report(step):
    return next(report for report in step.report if report.name == "inductor")


def test_a_step_for_any_length_compiles_once():
    torch.manual_seed(0)
    eager = Tiny()
    model = copy.deepcopy(eager)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (eager, model)]
    step = stepgraph.capture(model, loss_of, batch_of(12), optimizers[1], passes=StepOptions(any_length=True))
    first = inductor_report(step)
    assert "for any length" in first.summary and "reused" not in first.summary
    for length in (12, 20, 7, 31, 12):
        loss = loss_of(eager, batch_of(length))
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert step(batch_of(length)).item() == pytest.approx(loss.item(), rel=1e-5)
        report = inductor_report(step)
        if length != 12:
            structures = report.summary.split(" structure")[0].split()[-1]
            assert f", {structures} reused, {structures} for any length" in report.summary
            assert "from disk" not in report.summary
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "error", [ValueError("this model takes eight tokens"), AssertionError()], ids=["said", "unsaid"]
)
def test_a_batch_that_cannot_be_halved_is_compiled_by_itself(monkeypatch, error):
    monkeypatch.setattr(library, "_families", {})  # without what other tests of this process have compiled

    def eight(model, batch):
        if batch["ids"].shape[1] != 8:
            raise error
        return loss_of(model, batch)

    passes = StepOptions(any_length=True)
    with pytest.warns(UserWarning, match=r"half the length cannot be traced .*(eight tokens|\(no message\))"):
        step = stepgraph.capture(Tiny(4), eight, batch_of(8), passes=passes)
    assert "for any length" not in inductor_report(step).summary


def test_captures_of_one_process_share_their_pieces_until_none_is_left():
    torch.manual_seed(0)
    model, results = Tiny(), []
    for _ in range(2):
        step = stepgraph.capture(copy.deepcopy(model), loss_of, batch_of(9))
        results.append((step(batch_of(9)), [p.grad for p in step.spec.model.parameters()], step))
    first, second = (inductor_report(step) for *_, step in results)
    assert "reused" not in first.summary and " 1 structure, 1 reused" in second.summary
    assert second.compile_s < first.compile_s / 2 and torch.equal(results[0][0], results[1][0])
    for p, q in zip(*(grads for _, grads, _ in results), strict=True):
        assert torch.equal(p, q)
    before = len(library._compiled)
    del step, results, first, second
    gc.collect()
    assert len(library._compiled) < before
