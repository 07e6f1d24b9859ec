"""What a trace and passes ask of torch's graphs."""

from torch import fx

from stepgraph import compat


def copied(count):
    """A graph of ``count`` additions, and as many copies of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(len, (x,)) for _ in range(count)]
    return graph, [graph.node_copy(node, {x: x}.__getitem__) for node in nodes]


def test_copies_have_names_of_their_own():
    with compat.names_of_copies():
        graph, copies = copied(50)
    names = [node.name for node in graph.nodes]
    assert len(set(names)) == len(names) == 101
    assert all(node.name.startswith("len") for node in copies)


def test_the_name_of_a_copy_is_not_searched_from_the_first_on(monkeypatch):
    """A name that is taken is met a few times for each copy, not as often as there are nodes."""
    graph, _ = copied(2)
    met = 0

    class Taken(set):
        def __contains__(self, name):
            nonlocal met
            met += 1
            return super().__contains__(name)

    names = graph._graph_namespace
    monkeypatch.setattr(names, "_used_names", Taken(names._used_names))
    x = next(iter(graph.nodes))
    with compat.names_of_copies():
        nodes = [graph.call_function(len, (x,)) for _ in range(300)]
        met = 0
        for node in nodes:
            graph.node_copy(node, {x: x}.__getitem__)
    assert met < 300 * 12
