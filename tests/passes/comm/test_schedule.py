"""List scheduling: what waits for what by hand, and generated programs whose results stay."""

import operator
import random
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import ROWS_BEGIN, ROWS_END, WAIT
from stepgraph.passes.comm.overlap_experts import Travel, _narrow, _where_read, reorder

aten = torch.ops.aten
BEGIN = aten.clone.default  # stands for a collective


class Program:
    """A graph whose nodes are called by name; ``seconds`` and ``travels`` as for `reorder`."""

    def __init__(self):
        self.graph, self.seconds, self.travels = fx.Graph(), {}, {}

    def input(self):
        return self.graph.placeholder(f"x{len(self.graph.nodes)}")

    def call(self, target, *args, takes=0.0):
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(4, device="meta")
        if takes:
            self.seconds[node] = takes
        return node

    def travel(self, x, takes, group="ep"):
        begin = self.call(BEGIN, x)
        self.travels[begin] = Travel(group, takes)
        return begin, self.call(WAIT, begin)

    def order(self):
        window = [node for node in self.graph.nodes if node.op == "call_function"]
        return reorder(window, Aliases(self.graph), self.seconds, self.travels)


def test_halves_and_a_shared_expert():
    """Both dispatches start at once; experts a run next to dispatch b, and b next to combine a."""
    p = Program()
    x = p.input()
    chains = []
    for _ in "ab":
        pack = p.call(aten.neg.default, x, takes=0.1)
        dispatch, there = p.travel(pack, 2.0)
        experts = p.call(aten.sin.default, there, takes=3.0)
        combine, back = p.travel(experts, 2.0)
        chains.append((pack, dispatch, there, experts, combine, back))
    shared = [p.call(aten.cos.default, x, takes=1.0) for _ in range(4)]
    total = p.call(aten.add.Tensor, chains[0][-1], chains[1][-1])
    a, b = chains
    found = p.order()
    assert found == [
        *(a[0], a[1], b[0], b[1], shared[0], shared[1]),
        *(a[2], a[3], a[4], b[2], b[3], b[4], a[5], shared[2], shared[3], b[5], total),
    ]


def test_a_chunk_leaves_as_soon_as_it_is_computed():
    """As chunks of experts' tokens are written: both dispatches, the experts of both, both combines."""
    p = Program()
    x, weight = p.input(), p.input()
    dispatched = [p.travel(p.call(aten.neg.default, x, takes=0.1), 2.0) for _ in "ab"]
    cast = p.call(aten.cos.default, weight, takes=1.0)
    computed = [p.call(aten.add.Tensor, there, cast, takes=3.0) for _, there in dispatched]
    combined = [begin for begin, _ in [p.travel(rows, 2.0) for rows in computed]]
    found = p.order()
    wanted = [dispatched[1][0], cast, dispatched[0][1], computed[0], combined[0], computed[1], combined[1]]
    assert [node for node in found if node in wanted] == wanted


def test_what_a_compiler_computes_where_it_is_read_overlaps_there():
    p = Program()
    cast = p.call(aten._to_copy.default, p.input(), takes=1.0)
    product = p.call(aten.mm.default, p.call(aten.t.default, cast), cast, takes=2.0)
    p.graph.output(product)
    assert _where_read(p.graph, p.seconds) == {product: 3.0}


def test_exchanges_next_to_products_in_fp8_are_narrow():
    p, ours = Program(), torch.ops.stepgraph
    x, found = p.input(), []
    for product in (ours.grouped_scaled_mm.default, aten.mm.default, None, ours.grouped_scaled_mm.default):
        begin = p.call(ROWS_BEGIN, x)
        if product:
            p.call(product, x, x)
        p.call(ROWS_END, begin, x)
        found.append(begin)
    p.call(ours.grouped_scaled_mm.default, x, x)  # after all
    assert _narrow(SimpleNamespace(graph=p.graph), set(found)) == [found[0], found[3]]


def test_gradients_of_weights_fill_what_backward_waits_for():
    """In backward's order: a gradient of weights lies before what the next exchange needs."""
    p = Program()
    grad = p.input()
    _, there = p.travel(grad, 1.0)
    of_weight = p.call(aten.sin.default, there, takes=1.0)
    of_rows = p.call(aten.cos.default, there, takes=1.0)
    begin, back = p.travel(of_rows, 1.0)
    last = p.call(aten.neg.default, back, takes=1.0)
    assert p.order()[2:] == [of_rows, begin, of_weight, back, last]


@pytest.mark.parametrize("seed", range(40))
def test_results_stay(seed):
    """Views, writes, random numbers and collectives that read until they are waited for, in any order."""
    chosen = random.Random(seed)
    p = Program()
    inputs = [p.input() for _ in range(3)]
    values, made = list(inputs), []
    for _ in range(40):
        x, y = chosen.choice(values), chosen.choice(values)
        takes = chosen.random()
        kind = chosen.choice(["pure", "pure", "travel", "travel", "view", "write", "random", "parts"])
        if kind == "travel":
            values.append(p.travel(x, 3 * takes, chosen.choice("ab"))[1])
        elif kind == "view":
            values.append(p.call(aten.view.default, x, [-1]))
        elif kind == "write":
            p.call(aten.add_.Tensor, x, y, takes=takes)
        elif kind == "random":
            values.append(p.call(aten.rand_like.default, x, takes=takes))
        elif kind == "parts":
            parts = p.call(aten.sort.default, x, takes=takes)
            values.append(p.call(operator.getitem, parts, 0))
        else:
            values.append(p.call(aten.sub.Tensor, x, y, takes=takes))
        made.append(values[-1])
    p.graph.output([*values])
    before = list(p.graph.nodes)
    results = [run(before, p.travels, late) for late in (False, True)]
    found = p.order()
    assert sorted(found, key=before.index) == [node for node in before if node.op == "call_function"]
    after = [*inputs, *found, before[-1]]
    results += [run(after, p.travels, late) for late in (False, True)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def run(nodes, travels, late):
    """The program's results in the order of ``nodes``; ``late``: collectives read what they send when waited for."""
    torch.manual_seed(0)
    env = {}
    for node in nodes:
        if node.op == "placeholder":
            env[node] = torch.randn(4)
        elif node.op == "output":
            return [env[n].clone() for n in node.args[0]]
        elif late and node in travels:
            env[node] = env[node.args[0]]
        elif late and node.target is WAIT and node.args[0] in travels:
            env[node] = env[node.args[0]].clone()
        else:
            env[node] = node.target(*fx.map_arg(node.args, lambda n: env[n]))
    raise AssertionError("no output")
