"""Results that backward recomputes at a price per stored byte: the least time, and the same in equal blocks."""

import functools
import itertools
import operator
import random

import pytest
import torch

from stepgraph.lower import StepSpec, copied, trace
from stepgraph.models import Llama3, Llama3Config, next_token_loss
from stepgraph.passes import StepOptions
from stepgraph.passes.memory.fit import Fit, FitOptions
from stepgraph.passes.memory.least_time import _Form, _Result, _solved
from tests.passes.memory.test_fit import TARGET

DEEP = Llama3Config(dim=512, n_layers=12, n_heads=4, n_kv_heads=2, ffn_dim=1536, vocab_size=256, max_seq_len=2048)


def random_form(seed):
    """Up to seven results, each made from earlier ones; some cannot be computed again, some are not read."""
    rng = random.Random(seed)
    results, operators = [], []
    for number in range(rng.randint(2, 7)):
        again, read = rng.random() < 0.8, rng.random() < 0.7
        if again:
            sources = tuple(sorted(rng.sample(range(number), min(number, rng.randint(0, 2)))))
            operators.append((rng.randint(1, 40), sources))
        results.append(_Result(rng.randint(1, 20), read, read or not again, len(operators) - 1 if again else -1))
    return _Form(tuple(results), tuple(operators))


def cost(form, price, again):
    """Of computing the results ``again`` and what they need, with all else stored."""
    needed, runs, queue = set(), set(), [i for i, r in enumerate(form.results) if r.read]
    while queue:
        number = queue.pop()
        result = form.results[number]
        if number in needed:
            continue
        needed.add(number)
        if number in again or not result.stored:
            runs.add(result.operator)
            queue += form.operators[result.operator][1]
    stored = sum(form.results[i].size for i in needed if i not in again and form.results[i].stored)
    return sum(form.operators[i][0] for i in runs) + price * stored, stored


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_takes_less(seed):
    form = random_form(seed)
    free = [i for i, r in enumerate(form.results) if r.read and r.operator >= 0]
    subsets = [{*s} for n in range(len(free) + 1) for s in itertools.combinations(free, n)]
    for price in (0, 1, 3, 10):
        again, seconds, size = _solved(form, price)
        assert (seconds + price * size, size) == cost(form, price, {*again})
        assert seconds + price * size == min(cost(form, price, subset)[0] for subset in subsets)


@functools.cache
def deep():
    ids = torch.zeros(4, 2048, dtype=torch.int64)
    batch = {"tokens": ids, "targets": ids}
    spec = StepSpec(Llama3(DEEP).bfloat16(), next_token_loss, batch, passes=StepOptions("exact"))
    return spec, trace(spec, TARGET).program


def solved(share):
    """A solved `Fit` for ``share`` of what activations take."""
    fit = Fit(copied(deep()[1]).main, FitOptions(compiled=True, trial=True))
    least, most = fit.base.max(), fit.peak()
    fit.solve(limit := least + share * (most - least))
    assert fit.peak() <= limit
    return fit


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_equal_blocks_choose_alike(share):
    """At most two choices of what is computed again, and what lies at the ends of a model may differ."""
    fit, blocks = solved(share), {}
    for root in fit.needs:
        kind = fit.plan.operator(root).target, fit.sizes[root], root.args[1:] if root.target is operator.getitem else ()
        blocks.setdefault(fit.plan.block[root], []).append((kind, root in fit.dropped))
    choices = {tuple(sorted(map(str, kinds))) for block, kinds in blocks.items() if block}
    assert len(choices) <= 5 < len(fit.step.blocks)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_it_costs_no_more_than_the_cheapest_results_first(share):
    found, greedy = solved(share), Fit(copied(deep()[1]).main, FitOptions(compiled=True))
    least, most = greedy.base.max(), greedy.peak()
    limit = least + share * (most - least)
    rate = {root: greedy._again_seconds(root) / greedy.sizes[root] for root in greedy.needs if root in greedy.again}
    order = sorted(rate, key=lambda root: (rate[root], root.name))
    assert any(greedy._set(set(order[:count]), []) <= limit for count in range(len(order) + 1))
    assert 0 < sum(found.prices.values()) <= sum(greedy.prices.values())


def test_ranks_choose_the_same():
    names = [[sorted(root.name for root in roots) for roots in (f.dropped, f.gone)] for f in [solved(0.3), solved(0.3)]]
    assert names[0] == names[1] and names[0][0]


def test_a_copy_that_comes_back_late_is_not_waited_for_on_its_way_out():
    fit = Fit(copied(deep()[1]).main, FitOptions(compiled=True))
    trips = fit.trips
    root = next(root for root in fit.needs if root in fit.movable and fit.plan.block[root] == "layers.8")
    last, (first, _) = fit.last_forward[root], fit.needs[root]
    late, soon = (trips.schedule([(root, last, place)])[root] for place in (first, trips.earliest + 1))
    assert late.hidden and not soon.hidden and soon.away == late.away


def test_time_to_compute_again_delays_what_follows():
    fit = Fit(copied(deep()[1]).main, FitOptions(compiled=True))
    place = fit.trips.earliest + 20
    before = list(fit.trips.times)
    fit.trips.delay({place: 1.0})
    assert fit.trips.times == pytest.approx([t + (i > place) for i, t in enumerate(before)])
