"""Shows what a pass changed: a few short excerpts, before and after, each with its number of occurrences."""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from stepgraph.graph.provenance import provenance
from stepgraph.graph.report import Excerpt
from stepgraph.graph.step_graph import StepGraph, line_of

#: Forms of change that a report shows, and lines of each side.
_MOST_FORMS, _MOST_LINES = 4, 14


class _Call(NamedTuple):
    """What a node called when it was looked at: erasing a node empties it."""

    target: Any
    args: tuple
    kwargs: dict


class Changes:
    """The calls of a graph's nodes as they were when they were last looked at. They are compared by identity, and only
    nodes that differ are looked at again, so that it costs next to nothing. ``touched``: whether, when `changed` was
    last asked, a node had come, gone, moved or had other objects in its call, equal ones among them."""

    def __init__(self, step: StepGraph):
        self.step = step
        self.order = list(step.graph.nodes)
        self.calls = {n: _Call(n.target, n.args, n.kwargs) for n in self.order}
        self.touched = False

    def changed(self) -> bool:
        """Whether a node has come, gone, moved or changed its call since the last time."""
        nodes = list(self.step.graph.nodes)
        if nodes != self.order:
            self.touched = True
            return True
        others = [
            (node, call)
            for node, call in zip(nodes, self.calls.values(), strict=True)
            if node.args is not call[1] or node.kwargs is not call[2] or node.target is not call[0]
        ]
        self.touched = bool(others)
        return any(_differs(node, call) for node, call in others)

    def excerpts(self) -> list[Excerpt]:
        """What has changed since the last time, the most frequent form first."""
        old, old_order, order = self.calls, self.order, list(self.step.graph.nodes)
        new: dict[fx.Node, _Call] = {}
        kept: dict[fx.Node, _Call] = {}
        now: dict[fx.Node, _Call] = {}
        for n in order:
            call = old.get(n)
            if call is None or _differs(n, call):
                made = now[n] = _Call(n.target, n.args, n.kwargs)
                (new if call is None else kept)[n] = made
            else:
                now[n] = call
        present = set(order)
        gone = [n for n in old_order if n not in present]
        self.order, self.calls = order, now
        groups = _Groups([*gone, *new])
        for node in gone:
            groups.join(node, *(n for n in _nodes(old[node]) if n not in present))
        for node in new:
            groups.join(node, *(n for n in _nodes(now[node]) if n in new))
        for node, call in kept.items():
            _join_reader(groups, node, old[node], call)
        then, place = ({n: i for i, n in enumerate(nodes)} for nodes in (old_order, order))
        forms: dict[tuple, list[tuple[list[fx.Node], list[fx.Node]]]] = defaultdict(list)
        for members in groups.all():
            before = sorted((n for n in members if n in then), key=then.__getitem__)
            after = sorted((n for n in members if n in place), key=place.__getitem__)
            form = (tuple(old[n].target for n in before), tuple(now[n].target for n in after))
            forms[form].append((before, after))
        shown = []
        for alike in sorted(forms.values(), key=len, reverse=True)[:_MOST_FORMS]:
            before, after = alike[0]
            shown.append(Excerpt(len(alike), _where([*before, *after]), _lines(before, old), _lines(after, now)))
        stayed = [n for n in order if n not in new]
        then_stayed = [n for n in old_order if n in present]
        return shown if stayed == then_stayed else shown + _moves(then_stayed, stayed, old, now)


def _join_reader(groups: "_Groups", reader: fx.Node, old: _Call, new: _Call) -> None:
    """What ``reader`` reads now replaces what it read at the same place; the reader is shown with them."""
    before, after = list(_nodes(old)), list(_nodes(new))
    pairs = zip(before, after, strict=True) if len(before) == len(after) else [(*before, *after)]
    changed = [pair for pair in pairs if len(pair) != 2 or pair[0] is not pair[1]]
    for pair in changed or [()]:  # nothing: another operator, or another constant
        members = [n for n in pair if n in groups]
        groups.join(*members)
        if members:
            groups.note_reader(members[0], reader)
        else:
            groups.add(reader)


def _moves(then: list[fx.Node], order: list[fx.Node], old: dict, now: dict) -> list[Excerpt]:
    """The node that came furthest, where nodes changed places: with its neighbours, then and now. ``then``,
    ``order``: the nodes that were there and still are, in their orders."""
    then, order = ([n for n in nodes if n.op == "call_function"] for nodes in (then, order))
    ranks = {n: i for i, n in enumerate(then)}
    moved = _out_of_order([ranks[n] for n in order])
    if not moved:
        return []
    i = max(moved, key=lambda i: abs(ranks[order[i]] - i))
    around = [nodes[max(at - 2, 0) : at + 3] for nodes, at in ((then, ranks[order[i]]), (order, i))]
    return [Excerpt(len(moved), _where([order[i]]), _lines(around[0], old), _lines(around[1], now), moved=True)]


def _where(nodes: Sequence[fx.Node]) -> str:
    return next((found.path for n in nodes if (found := provenance(n))), "")


def _lines(nodes: Sequence[fx.Node], calls: dict[fx.Node, _Call]) -> list[str]:
    lines = [line_of(n, *calls[n]) for n in nodes[:_MOST_LINES]]
    return lines + ([f"... {len(nodes) - _MOST_LINES} more"] if len(nodes) > _MOST_LINES else [])


def _differs(node: fx.Node, call: _Call) -> bool:
    """Whether ``node`` calls something else than it did; an equal call in other objects is the same."""
    (target, args, kwargs), now, named = call, node.args, node.kwargs
    return target is not node.target or (args is not now and args != now) or (kwargs is not named and kwargs != named)


def _nodes(call: _Call) -> Iterator[fx.Node]:
    """The nodes in a call's arguments, in order, each as often as it is there."""
    found: list[fx.Node] = []
    fx.map_arg((call.args, call.kwargs), lambda n: found.append(n) or n)
    return iter(found)


def _out_of_order(numbers: Sequence[int]) -> list[int]:
    """The fewest positions without which ``numbers`` rise: all but a longest rising subsequence."""
    tails: list[int] = []
    ends: list[int] = []
    previous: list[int] = []
    for i, number in enumerate(numbers):
        at = bisect.bisect_left(tails, number)
        previous.append(ends[at - 1] if at else -1)
        tails[at:at + 1], ends[at:at + 1] = [number], [i]  # fmt: skip
    keep, i = set(), ends[-1] if ends else -1
    while i >= 0:
        keep.add(i)
        i = previous[i]
    return [i for i in range(len(numbers)) if i not in keep]


class _Groups:
    """Nodes in groups that are joined; ``note_reader``: a reader that is shown with a group without joining groups."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self._parent = {n: n for n in nodes}
        self._seen_by: dict[fx.Node, list[fx.Node]] = defaultdict(list)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._parent

    def add(self, node: fx.Node) -> None:
        self._parent.setdefault(node, node)

    def join(self, *nodes: fx.Node) -> None:
        for node in nodes[1:]:
            self._parent[self._top(node)] = self._top(nodes[0])

    def note_reader(self, node: fx.Node, reader: fx.Node) -> None:
        self._seen_by[node].append(reader)

    def all(self) -> list[list[fx.Node]]:
        """Members of each group, its readers among them (of many alike, as the readers of a gradient, the first)."""
        groups: dict[fx.Node, dict[fx.Node, None]] = defaultdict(dict)
        for node in self._parent:
            groups[self._top(node)].setdefault(node)
        for node, readers in self._seen_by.items():
            members, targets = groups[self._top(node)], Counter()
            for reader in readers:
                targets[reader.target] += 1
                if targets[reader.target] == 1:
                    members.setdefault(reader)
        return [list(members) for members in groups.values()]

    def _top(self, node: fx.Node) -> fx.Node:
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node
