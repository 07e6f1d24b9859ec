"""The account of one graph as plain data: nodes in columns, storages, collectives, compiled pieces, the host.

Nodes are counted in the graph's order, placeholders and the output among them. Strings that many nodes share are given
once, in lists of the graph, and columns hold their places there. Seconds are in nanoseconds, as whole numbers.
"""

import linecache
import os
from collections.abc import Mapping
from typing import Any

from torch import fx

from stepgraph.costs.flops import flops, is_attention
from stepgraph.costs.hardware import LAUNCH_S, Gpu
from stepgraph.costs.links import Group
from stepgraph.costs.memory import KINDS, kinds_of, lifetimes
from stepgraph.costs.roofline import Fusion, Roofline, is_free
from stepgraph.costs.timeline import Collective, simulate
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import stage_of
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.partition import needs_host
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.step_graph import Call, StepGraph, name_of, type_of
from stepgraph.graph.values import Value
from stepgraph.inductor.regional import nodes_of, region_of

PHASES = ("forward", "loss", "backward", "optimizer", "input", "output", "unattributed")
#: What a node's time is spent on.
WORK = ("products", "attention", "norms", "elementwise", "update", "communication")
#: Letters of an argument that is longer.
_LONGEST = 160


def graph_account(
    step: StepGraph,
    call: Call,
    calls: int,
    gpu: Gpu,
    groups: Mapping[str, Group],
    *,
    fused: bool,
    ran: bool,
    routed: StepGraph | None = None,
) -> dict[str, Any]:
    """The account of ``step``, which ``call`` and its like run ``calls`` times per step, forecast for ``gpu``.

    ``groups``: see `links.groups`. ``fused``: whether a compiler makes kernels of several nodes. ``ran``: the graph is
    the one that runs here; False: it represents one on ``gpu``. ``routed``: the graph that routed a backward's tokens.

    - ``nodes``: columns, each a list as long as the graph. ``name``; ``call``: place in ``calls_text``, its text with a
      ``$`` for each of the node's ``inputs`` (numbers of nodes, in that order); ``type``, ``path``, ``source``,
      ``role``, ``region``, ``choice``: places in ``types``, ``paths``, ``sources`` (file and line, text of the line),
      ``roles``, ``regions`` (the user's names, see `stepgraph.region`) and ``choices`` (regions that Inductor gets
      choices for); ``phase`` and ``work``: in ``PHASES`` and ``WORK``; ``checkpoint``: -1 for none. ``kernel``: number
      of the node that the forecast charges this node's kernel to, -1: it runs nothing. ``ns``, ``moved``: of the whole
      kernel, at that node; ``start``: in ns; ``flops``: of the node. ``piece``: place in ``pieces``, -1 for none.
    - ``pieces``: what was compiled, in order. ``generated``: the kernels that Inductor made, [name, text]; ``made``:
      [node, places in ``generated``], all of its piece where Inductor does not say which.
    - ``storages``: columns ``node`` (that makes it), ``bytes``, ``kind`` (place in ``costs.memory.KINDS``), ``last``
      (the node that needs it last; the graph's length: held throughout).
    - ``inputs``: [node, kind, name]; ``outputs``: the same, and the stage that keeps a value for its backward.
    - ``name``: of the graph; ``kind``, ``stage``: what its calls do and for which stage, see `Call`.
    - ``collectives``: see `costs.timeline.Collective`. ``copies``: to the host or back, [node, whether it comes back,
      bytes, ns, ns that computation waits]. ``host``: [node, reason]; ``segments``: [is a CUDA graph, first
      node, last node] in order, where the step runs as CUDA graphs.
    """
    aliases = Aliases(step.graph)
    fusion = Fusion(step.graph, aliases, fused)
    roofline = Roofline(
        step.graph, aliases, fusion, gpu, whole=None if routed is None else routed.graph, launch_s=LAUNCH_S
    )
    timeline = simulate(step.graph, roofline.seconds, gpu, groups)
    order = list(step.graph.nodes)
    number = {node: i for i, node in enumerate(order)}
    named = {node.name: i for i, node in enumerate(order)}
    nodes, strings = _columns(order, number)
    kernels = {fusion.kernel(node): number[node] for node in order if node in roofline.seconds}
    runs = [not is_free(node) and fusion.kernel(node) in kernels for node in order]
    nodes["kernel"] = [kernels[fusion.kernel(n)] if there else -1 for n, there in zip(order, runs, strict=True)]
    nodes["ns"] = [round(roofline.seconds.get(node, 0.0) * 1e9) for node in order]
    nodes["moved"] = [roofline.moved.get(node, 0) for node in order]
    nodes["flops"] = [flops(node) if there else 0 for node, there in zip(order, runs, strict=True)]
    nodes["start"] = [round(timeline.starts.get(node.name, 0.0) * 1e9) for node in order]
    nodes["work"] = [WORK.index(_work(node)) for node in order]
    nodes["piece"], pieces, generated = _pieces(step, named)
    return {
        "name": call.graph,
        "kind": call.kind,
        "stage": call.stage,
        "calls": calls,
        "step_ns": round(timeline.step_seconds * 1e9),
        "compute_ns": round(timeline.compute_seconds * 1e9),
        "nodes": nodes,
        **strings,
        "blocks": step.blocks,
        "storages": _storages(step, aliases, fusion, number),
        "inputs": [
            [number[node], what.kind, what.name] for node, what in step.bound()
        ],
        "outputs": [
            [number[node], what.kind, what.name, what.stage if isinstance(what, Value) else None]
            for node, what in step.returned()
            if isinstance(node, fx.Node)
        ],
        "collectives": [_collective(c, named) for c in timeline.collectives],
        "copies": [
            [named[c.node], c.back, c.bytes, round(c.seconds * 1e9), round(c.exposed_seconds * 1e9)]
            for c in timeline.copies
        ],
        "pieces": pieces,
        **generated,
        **_host(step, named, ran),
    }  # fmt: skip


#: Columns whose strings many nodes share, and the list of each one's strings.
_TABLES = {"call": "calls_text", "type": "types", "path": "paths", "source": "sources", "role": "roles"}
_TABLES |= {"region": "regions", "choice": "choices"}


def _columns(order: list[fx.Node], number: Mapping[fx.Node, int]) -> tuple[dict[str, list], dict[str, list]]:
    """(the columns that need no forecast, the strings that some of them refer to by number)."""
    rows = []
    for node in order:
        found, choice = provenance(node), region_of(node)
        text, inputs = _call(node)
        rows.append({
            "name": node.name,
            "call": text,
            "inputs": [number[n] for n in inputs],
            "type": type_of(node).replace("float32", "f32").replace("bfloat16", "bf16"),
            "path": found.path if found else "",
            "source": _source(found.source if found else ""),
            "role": str(found.role) if found and found.role else "",
            "region": found.region if found else "",
            "choice": f"{choice.kind} {choice.id}" if choice else "",
            "phase": PHASES.index(phase_of(node)),
            "checkpoint": -1 if found is None or found.checkpoint is None else found.checkpoint,
        })  # fmt: skip
    columns: dict[str, list] = {key: [row[key] for row in rows] for key in rows[0]}
    strings = {table: list(dict.fromkeys(columns[key])) for key, table in _TABLES.items()}
    for key, table in _TABLES.items():
        places = {text: place for place, text in enumerate(strings[table])}
        columns[key] = [places[text] for text in columns[key]]
    return columns, strings


def _call(node: fx.Node) -> tuple[str, list[fx.Node]]:
    """(the call with ``$`` for each node among its arguments, these nodes)."""
    if node.op in ("placeholder", "get_attr", "output"):
        inputs = node.all_input_nodes
        return {"placeholder": "input", "get_attr": "constant", "output": "output"}[node.op], inputs
    inputs: list[fx.Node] = []

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            inputs.append(value)
            return "$"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return str(value).removeprefix("torch.").replace("$", "").replace("\n", " ")[:_LONGEST]

    given = [*map(text, node.args), *(f"{key}={text(value)}" for key, value in node.kwargs.items())]
    return f"{name_of(node.target)}({', '.join(given)})", inputs


def _source(source: str) -> tuple[str, str]:
    """(``folder/file.py:line``, the text of that line)."""
    file, _, line = source.rpartition(":")
    if not file:
        return "", ""
    folder, base = os.path.split(file)
    return f"{os.path.basename(folder)}/{base}:{line}", linecache.getline(file, int(line)).strip()[:_LONGEST]


def _work(node: fx.Node) -> str:
    if node.op == "call_function" and stage_of(node):
        return "communication"
    if phase_of(node) == "optimizer":
        return "update"
    if node.op == "call_function" and is_attention(node):
        return "attention"
    if node.op == "call_function" and flops(node):
        return "products"
    return "norms" if "norm" in name_of(node.target) else "elementwise"


def _storages(step: StepGraph, aliases: Aliases, fusion: Fusion, number: Mapping[fx.Node, int]) -> dict[str, list]:
    """What takes memory, from the node that makes it to the one that needs it last; the same as the forecast counts."""
    kinds, last = kinds_of(step, aliases), aliases.last_use()
    rows = [
        (number[n], tensor_bytes(n), KINDS.index(kinds[n]), len(number))
        for n in step.graph.nodes
        if n.op in ("placeholder", "get_attr")
    ]
    for node, made, _ in lifetimes(step.graph, aliases, fusion):
        if made and tensor_bytes(node):
            rows.append((number[node], tensor_bytes(node), KINDS.index(kinds[node]), last[node]))
    return {key: [row[i] for row in rows] for i, key in enumerate(("node", "bytes", "kind", "last"))}


def _collective(c: Collective, named: Mapping[str, int]) -> dict[str, Any]:
    same = {key: getattr(c, key) for key in ("kind", "axis", "ranks", "dtype", "bytes")}
    seconds = {"ns": c.seconds, "exposed": c.exposed_seconds, "ready": c.ready_s}
    seconds |= {"launched": c.launched_s, "started": c.started_s, "waited": c.waited_s}
    times = {key: None if s is None else round(s * 1e9) for key, s in seconds.items()}
    return {"node": named[c.node], "wait": named[c.wait] if c.wait else None} | same | times


def _pieces(step: StepGraph, named: Mapping[str, int]) -> tuple[list[int], list[dict[str, Any]], dict[str, Any]]:
    """(for each node the piece that it was compiled in, -1 for none; the pieces, in order; the kernels of theirs)."""
    column, pieces = [-1] * len(named), []
    generated: dict[tuple[str, str], int] = {}
    made: dict[int, list[int]] = {}
    executable = step.executable
    if executable is step.module or not isinstance(executable, fx.GraphModule):
        return column, pieces, {"generated": [], "made": []}
    for call in executable.graph.find_nodes(op="call_module"):
        inside = [named[name] for name in nodes_of(call)]
        for node in inside:
            column[node] = len(pieces)
        pieces.append({"name": call.target, "first": inside[0], "last": inside[-1], "nodes": len(inside)})
        piece = executable.get_submodule(call.target)
        node_of = dict(zip(piece.names, inside, strict=True))
        for kernel in piece.kernels():
            place = generated.setdefault((kernel.name, kernel.text), len(generated))
            for node in [node_of[name] for name in kernel.nodes if name in node_of] if kernel.nodes else inside:
                made.setdefault(node, []).append(place)
    return column, pieces, {"generated": list(generated), "made": [[node, places] for node, places in made.items()]}


def _host(step: StepGraph, named: Mapping[str, int], ran: bool) -> dict[str, Any]:
    """Nodes that CUDA graphs leave to the host, and where the graphs begin and end."""
    if ran and step.recording is None:
        return {"host": [], "segments": []}
    calls = [n for n in step.graph.nodes if n.op == "call_function"]
    reasons = step.on_host if ran else {n.name: why for n in calls if (why := needs_host(n, "cpu"))}
    segments: list[list[Any]] = []
    for node in calls:
        device = node.name not in reasons
        if not segments or segments[-1][0] != device:
            segments.append([device, named[node.name], named[node.name]])
        segments[-1][2] = named[node.name]
    return {"host": [[named[name], why] for name, why in reasons.items() if name in named], "segments": segments}
