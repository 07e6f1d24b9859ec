"""What differs between two accounts: options, costs, passes, and nodes, module by module.

Nodes are matched within each module and phase, in order, by what they call and return. Their names are not compared:
one more node renames all later ones. Repeated blocks with the same difference are shown once.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgraph.inspect.account.account import peak_of

#: Forms of difference that are listed, and lines of each.
_MOST_FORMS, _MOST_LINES = 200, 40


def difference(a: Mapping[str, Any], b: Mapping[str, Any], name_a: str, name_b: str) -> dict[str, Any]:
    """How ``b`` differs from ``a``.

    - ``names``: a label for each, by the options that differ. ``options``: [name, in a, in b]. ``figures``: the same
      for what the steps cost.
    - ``modules``: [path, phase, ns in a, ns in b], equal blocks together. ``passes``: [name, line in a, line in b].
    - ``nodes``: ``a``, ``b``: lines that only one has of the graphs' texts, ``more``: how many are left out of each;
      ``graph``, ``path``, ``phase``: where; ``count``: modules with this difference; ``node``: the first node in ``a``.
    - ``left_out``: forms of such a difference that are not listed.
    """
    forms = [form for name in {g["name"]: None for g in (*a["graphs"], *b["graphs"])} for form in _graphs(a, b, name)]
    forms.sort(key=lambda form: -form["count"] * (len(form["a"]) + len(form["b"])))
    x, y = _figures(a), _figures(b)
    options = _options(a["head"], b["head"])
    return {
        "names": _labels(a["head"], b["head"], options, (name_a, name_b)),
        "options": options,
        "figures": [[name, x.get(name), y.get(name)] for name in x | y],
        "modules": _modules(a, b),
        "passes": _passes(a["passes"], b["passes"]),
        "nodes": forms[:_MOST_FORMS],
        "left_out": max(len(forms) - _MOST_FORMS, 0),
    }


def _labels(a: Mapping[str, Any], b: Mapping[str, Any], options: list[list[Any]], names: Sequence[str]) -> list[str]:
    """Labels that say what differs: the presets, else up to three options, else ``names``, short if they differ so."""
    if a["title"] != b["title"]:
        return [a["title"], b["title"]]
    if chosen := [row for row in options if not row[0].startswith("version of ")][:3]:
        return [
            ", ".join(f"{name} {'none' if row[i] in (None, '') else row[i]}" for name, *row in chosen) for i in (0, 1)
        ]
    short = [Path(name).name for name in names]
    return short if short[0] != short[1] else list(names)


def _options(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[list[Any]]:
    def flat(head: Mapping[str, Any]) -> dict[str, Any]:
        own = {key: head[key] for key in ("mesh", "gpu", "device")}
        own |= head["options"] | {f"model.{key}": value for key, value in head["model"].items()}
        return own | {f"version of {key}": value for key, value in head["versions"].items()}

    x, y = flat(a), flat(b)
    # An option that an older page does not have is not one that differs.
    untold = a["options"].keys() ^ b["options"].keys()
    return [[key, x.get(key), y.get(key)] for key in x | y if x.get(key) != y.get(key) and key not in untold]


def _figures(account: Mapping[str, Any]) -> dict[str, float | None]:
    """What a step costs, bytes and ms."""
    head, graphs = account["head"], account["graphs"]
    fullest = max(graphs, key=lambda graph: sum(peak_of(graph).values()))
    forecast = {f"forecast: {key}": value for key, value in head["forecast"].items()}
    measured = {f"measured: {key}": value for key, value in (head["measured"] or {}).items()}
    sums = {
        "nodes": sum(len(g["nodes"]["name"]) for g in graphs),
        "FLOPs": sum(g["calls"] * sum(g["nodes"]["flops"]) for g in graphs),
        "bytes moved by kernels": sum(g["calls"] * sum(g["nodes"]["moved"]) for g in graphs),
        "bytes in collectives": sum(g["calls"] * sum(c["bytes"] for c in g["collectives"]) for g in graphs),
        "collectives": sum(g["calls"] * len(g["collectives"]) for g in graphs),
    }
    return measured | forecast | sums | {f"peak bytes: {kind}": size for kind, size in peak_of(fullest).items()}


def _modules(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[list[Any]]:
    """Forecast ns per step of modules and phases where they differ, the largest difference first."""
    sums: list[dict[tuple[str, int], int]] = []
    for account in (a, b):
        found: dict[tuple[str, int], int] = defaultdict(int)
        for graph in account["graphs"]:
            paths = [_folded(path, set(graph["blocks"])) for path in graph["paths"]]
            columns = (graph["nodes"][key] for key in ("path", "phase", "ns"))
            for path, phase, ns in zip(*columns, strict=True):
                found[paths[path], phase] += ns * graph["calls"]
        sums.append(found)
    x, y = sums
    rows = [[*key, x.get(key, 0), y.get(key, 0)] for key in x | y]
    return sorted((row for row in rows if row[2] != row[3]), key=lambda row: -abs(row[2] - row[3]))


def _passes(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Passes that did something else, whatever the number of nodes and the seconds."""

    def lines(reports: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        return {
            " ".join(filter(None, [r["graph"], r["name"]])): re.sub(r"^\S+ \[\w+\]: |; nodes \d+ \(.*", "", r["line"])
            for r in reports
        }

    x, y = lines(a), lines(b)
    return [
        [name, x.get(name, "does not run"), y.get(name, "does not run")] for name in x | y if x.get(name) != y.get(name)
    ]


def _graphs(a: Mapping[str, Any], b: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The differences between the graphs ``name`` of two accounts; equal differences of repeated blocks are one."""
    sides = [next((graph for graph in account["graphs"] if graph["name"] == name), None) for account in (a, b)]
    blocks = {block for graph in sides if graph for block in graph["blocks"]}
    x, y = (_by_module(graph) if graph else {} for graph in sides)
    found: dict[tuple, dict[str, Any]] = {}
    for path, phase in x | y:
        old, new = x.get((path, phase), []), y.get((path, phase), [])
        only_a, only_b, first = _unmatched(old, new)
        if not only_a and not only_b:
            continue
        key = (_folded(path, blocks), phase, tuple(only_a), tuple(only_b))
        form = found.setdefault(key, {
            "graph": name, "path": key[0], "phase": phase, "count": 0, "a": only_a[:_MOST_LINES],
            "b": only_b[:_MOST_LINES], "more": [max(len(s) - _MOST_LINES, 0) for s in (only_a, only_b)], "node": first,
        })  # fmt: skip
        form["count"] += 1
    return list(found.values())


def _by_module(graph: Mapping[str, Any]) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """(module path, phase) -> (text without names, number) of its nodes, in order."""
    nodes, modules = graph["nodes"], defaultdict(list)
    for i, (call, kind) in enumerate(zip(nodes["call"], nodes["type"], strict=True)):
        text = f"{graph['types'][kind]} = {graph['calls_text'][call]}"
        modules[graph["paths"][nodes["path"][i]], nodes["phase"][i]].append((text, i))
    return modules


def _unmatched(old: list[tuple[str, int]], new: list[tuple[str, int]]) -> tuple[list[str], list[str], int | None]:
    """(texts that only ``old`` has, texts that only ``new`` has, the first such node of ``old``)."""
    x, y = [text for text, _ in old], [text for text, _ in new]
    if x == y:
        return [], [], None
    only_a, only_b, first = [], [], None
    for kind, i, j, k, m in difflib.SequenceMatcher(None, x, y, autojunk=False).get_opcodes():
        if kind != "equal":
            only_a, only_b = only_a + x[i:j], only_b + y[k:m]
            first = old[i][1] if first is None and i < j else first
    return only_a, only_b, first


def _folded(path: str, blocks: set[str]) -> str:
    """``path`` with ``*`` for the number of a repeated block."""
    block = next((b for b in blocks if path == b or path.startswith(b + ".")), None)
    return path if block is None else f"{block.rpartition('.')[0]}.*{path[len(block) :]}"
