"""The program that runs a graph's pieces: results as the graph's, and nothing held after its last reader started."""

import weakref

import pytest
import torch
from torch import fx, nn

from stepgraph.graph.partition import split
from stepgraph.run.interpreter import Interpreter


class Watch:
    """Functions for a graph that note which earlier tensors are alive while they run."""

    def __init__(self):
        self.made: dict[str, weakref.ref] = {}
        self.alive: dict[str, set[str]] = {}

    def make(self, name, *sources):
        """A tensor with a name; what lives while it is made is noted under that name."""
        self.note(name)
        result = torch.ones(3)
        self.made[name] = weakref.ref(result)
        return result

    def note(self, name):
        self.alive[name] = {other for other, ref in self.made.items() if ref() is not None}


class Boxed(nn.Module):
    """A piece that lets go of each argument after it has read it, as compiled ones do."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def boxed(self, args):
        self.watch.note("piece, before")
        total = torch.zeros(3)
        while args:
            total += args.pop(0)
            self.watch.note(f"piece, {len(args)} left")
        return total


def program(graph, module=None, **options):
    """The program of a graph over ``module``."""
    return Interpreter(fx.GraphModule(module or nn.Module(), graph), **options)


def test_a_value_dies_with_its_last_reader():
    watch, graph = Watch(), fx.Graph()
    a = graph.call_function(watch.make, ("a",))
    b = graph.call_function(watch.make, ("b", a))
    c = graph.call_function(watch.make, ("c", a, b))
    d = graph.call_function(watch.make, ("d", c))
    graph.output((b, d))
    b_value, _ = program(graph)([])
    assert watch.alive == {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"b", "c"}}
    assert watch.made["b"]() is b_value and watch.made["c"]() is None


def test_a_result_that_nothing_reads_is_not_kept():
    watch, graph = Watch(), fx.Graph()
    graph.call_function(watch.make, ("unread",))
    graph.output(graph.call_function(watch.make, ("read",)))
    program(graph)([])
    assert watch.alive["read"] == set()


def test_a_boxed_piece_frees_what_it_is_last_to_read():
    watch, graph, module = Watch(), fx.Graph(), nn.Module()
    module.piece = Boxed(watch)
    a, b, c = (graph.call_function(watch.make, (name,)) for name in "abc")
    total = graph.call_module("piece", (a, b, c))
    graph.output((total, b))  # b is read again, so the program keeps it
    total, _ = program(graph, module)([])
    assert torch.equal(total, torch.full((3,), 3.0))
    assert watch.alive["piece, before"] == {"a", "b", "c"}
    assert watch.alive["piece, 2 left"] == {"b", "c"} and watch.alive["piece, 0 left"] == {"b"}


def test_inputs_belong_to_the_caller():
    """The program drops its own references only; a list of inputs stays as it is."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(torch.add, (x, y), {"alpha": 2}))
    inputs = [torch.ones(2), torch.ones(2)]
    run = program(graph)
    for _ in range(2):
        assert torch.equal(run(inputs), torch.full((2,), 3.0)) and len(inputs) == 2


def test_attributes_are_read_at_every_call():
    module, graph = nn.Module(), fx.Graph()
    module.register_buffer("scale", torch.tensor(2.0))
    graph.output(graph.call_function(torch.mul, (graph.placeholder("x"), graph.get_attr("scale"))))
    run = program(graph, module)
    assert run([torch.tensor(3.0)]) == 6
    run.module.scale = torch.tensor(5.0)
    assert run([torch.tensor(3.0)]) == 15


def test_outputs_keep_their_form():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.neg, (x,))
    graph.output({"pair": (x, [y, None]), "again": y, "number": 3})
    value = torch.ones(2)
    result = program(graph)([value])
    assert result["pair"][0] is value and torch.equal(result["again"], -value)
    assert result["pair"][1][0] is result["again"] and result["pair"][1][1] is None and result["number"] == 3


def test_on_node_sees_every_call_in_order():
    graph, seen = fx.Graph(), []
    x = graph.placeholder("x")
    y = graph.call_function(torch.neg, (x,))
    graph.output(graph.call_function(torch.abs, (y,)))
    program(graph, on_node=lambda node: seen.append(node.name))([torch.ones(2)])
    assert seen == ["neg", "abs_1"]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_pieces_of_a_graph_run_as_the_whole(tools, size):
    """Any cut into pieces gives the same bits, writes into inputs included."""

    def function(x, state):
        first, second = (x * 2).chunk(2)
        state.add_(first.sum())
        return first.sin() + second, state * 3

    inputs = [torch.linspace(-1, 1, 6), torch.tensor(0.5)]
    step = tools.by_hand(function, *inputs)
    expected = step.module(*(before := [t.clone() for t in inputs]))
    number = {node: i for i, node in enumerate(step.graph.nodes)}
    module = split(step.module, lambda node: number[node] // size)
    actual = Interpreter(module)(after := [t.clone() for t in inputs])
    for a, b in zip([*expected, *before], [*actual, *after], strict=True):
        assert torch.equal(a, b)
    assert len(list(module.children())) == len({piece.group for piece in module.children()})


def test_a_graph_of_one_group_is_called_as_it_is(tools):
    step = tools.by_hand(lambda x, y: (x + y, x, (x * y).sum()), torch.ones(3), torch.arange(3.0))
    module = split(step.module, lambda node: "device")
    (piece,) = module.children()
    assert piece is step.module and piece.group == "device"
    given = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]
    for a, b in zip(Interpreter(module)(given), step.module(*given), strict=True):
        assert torch.equal(a, b)
