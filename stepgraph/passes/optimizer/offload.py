"""Keep the optimizer's state in page-locked host memory, and update the parameters in parts.

Matches: state of the shape of its parameter (see `movable`), and what computes with it. Before -> after, for parts of
parameters whose state takes at most a GiB, of one repeated block:

    _fused_adamw_(params, grads, ms, vs, ...)  ->  m = reload_end(reload_begin(m of the host, device)); ...
                                                   _fused_adamw_(params of the part, grads, ms, vs, ...)
                                                   store_end(store_begin(m of the host, m), m); ...

A part's copy to the device begins one part ahead, and its memory is free one part later: three parts are on the device
at a time. Each direction of copies is one queue, so an update takes as long as the slower of them.
Exact: every element is computed by the same operators from the same values. On a CPU the same nodes copy at once.
Preconditions: after `inplace_update`; the update of a part reads no state of another, and draws no random numbers.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from stepgraph.costs.hardware import host_text
from stepgraph.costs.timeline import assumed_timeline
from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.edit import Builder
from stepgraph.graph.facts import getitem_users, is_mutating, is_overload, is_pure, is_random, tensor_bytes
from stepgraph.graph.host_copies import RELOAD_BEGIN, RELOAD_END, STORE_BEGIN, STORE_END, may_stay_on_host
from stepgraph.graph.partition import describe
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.values import OptimizerState, Parameter
from stepgraph.options import StepOptions
from stepgraph.passes.contract import PassReport, StepGraph, Target, register

#: Bytes of the state of a part, unless one parameter has more.
_PART = 2**30
#: Parts at least, of as much state as a peak of memory needs: three of them are on the device in the update.
_FEWEST = 16


@dataclass(frozen=True)
class OffloadOptions:
    """``part_bytes``: of the state of a part. ``state``: bytes of state that go to the host at least, by whole
    parameters, the last ones first; with ``memory="peak=..."``, `stepgraph.lower` finds it. ``host``: bytes of host
    memory for this rank of a forecast machine."""

    part_bytes: int = _PART
    state: float = math.inf
    host: float | None = None


def _from_options(options: StepOptions) -> dict[str, object] | None:
    if not options.may_offload_optimizer:
        return None
    return {} if options.offload_optimizer else {"state": 0.0}


def _for_target(options: OffloadOptions, target: Target) -> OffloadOptions:
    # A real one holds the state already: the capture has looked whether there is room.
    return replace(options, host=target.host_memory if target.simulated else None)


@register(
    "offload_optimizer",
    "exact",
    options=OffloadOptions(),
    after=("inplace_update",),
    from_options=_from_options,
    for_target=_for_target,
)
def offload_optimizer(step: StepGraph, options: OffloadOptions, report: PassReport) -> None:
    """Keep the optimizer's state on the host, and update parameters in parts."""
    everything = movable(step)
    if not everything or not options.state:
        report.skipped = "the peak is met without it" if everything else "the graph has no optimizer state"
        return
    state = _last(everything, options.state)
    need, whole = (sum(map(tensor_bytes, nodes)) for nodes in (state, everything))
    if options.host is not None and need > options.host:
        raise ValueError(
            f"offload_optimizer needs {need / 2**30:.1f} GiB of host memory for each rank and a machine has "
            f"{options.host / 2**30:.1f} GiB: shard the model over more ranks (fsdp), or leave it out"
        )
    most = options.part_bytes if options.state == math.inf else min(options.part_bytes, need // _FEWEST)
    parts = _parts(step, state, most)
    walk = _Walk(step, parts)
    walk.split_lists()
    walk.sink()
    walk.reorder()
    used = _copy(step, state, walk)
    sizes: dict[int, int] = defaultdict(int)
    for node in used:
        sizes[parts[node]] += tensor_bytes(node)
    report.matched, report.changed = len(everything), len(used)
    report.added_s = sum(copy.exposed_seconds for copy in assumed_timeline(step.graph).copies)
    of_all = f" of {len(everything)}" * (len(state) < len(everything)), f" of {whole / 2**20:.1f}" * (need < whole)
    report.summary = (
        f"{len(state)}{of_all[0]} tensors of optimizer state ({need / 2**20:.1f}{of_all[1]} MiB) stay in host memory; "
        f"updates in {len(sizes)} parts of at most {max(sizes.values(), default=0) / 2**20:.1f} MiB, "
        f"{report.added_s * 1e3:.2f} ms more per step"
    )
    parameter = step.placeholders(Parameter)[0]  # the state may already be on the host
    if options.host is None and (line := host_text(parameter.meta["val"].device)):
        report.notes.append(line)


def movable(step: StepGraph) -> dict[fx.Node, OptimizerState]:
    """The inputs of ``step`` that are such state, in the order of their parameters."""
    parameters = {what.path: node.meta["val"] for node, what in step.bound() if isinstance(what, Parameter)}
    order = {path: i for i, path in enumerate(parameters)}
    found = {
        node: what
        for node, what in step.bound()
        if isinstance(what, OptimizerState)
        and what.part is None
        and may_stay_on_host(node.meta["val"], parameters[what.parameter])
    }
    return dict(sorted(found.items(), key=lambda item: order[item[1].parameter]))


def state_sizes(step: StepGraph) -> list[int]:
    """Bytes of the state of each parameter, in the order in which they go to the host."""
    sizes: dict[str, int] = defaultdict(int)
    for node, what in movable(step).items():
        sizes[what.parameter] += tensor_bytes(node)
    return list(sizes.values())[::-1]


def _last(state: dict[fx.Node, OptimizerState], nbytes: float) -> dict[fx.Node, OptimizerState]:
    """That of the last parameters, of ``nbytes`` at least."""
    taken: dict[str, int] = defaultdict(int)
    for node, what in reversed(state.items()):
        if what.parameter in taken or sum(taken.values()) < nbytes:
            taken[what.parameter] += tensor_bytes(node)
    return {node: what for node, what in state.items() if what.parameter in taken}


def _parts(step: StepGraph, state: dict[fx.Node, OptimizerState], most: int) -> dict[fx.Node, int]:
    """The number of the part that each state belongs to: all of a parameter to one."""
    by_parameter: dict[str, list[fx.Node]] = defaultdict(list)
    for node, what in state.items():
        by_parameter[what.parameter].append(node)
    found, number, size, block = {}, -1, 0, None
    for path, nodes in by_parameter.items():
        own, here = sum(map(tensor_bytes, nodes)), step.block_at(path.rpartition(".")[0])
        if number < 0 or here != block or size + own > most:
            number, size, block = number + 1, 0, here
        size += own
        found |= dict.fromkeys(nodes, number)
    return found


class _Walk:
    """``of``: the part of each node that computes with state, or whose result only such nodes read."""

    def __init__(self, step: StepGraph, parts: dict[fx.Node, int]):
        self.step, self.aliases = step, Aliases(step.graph)
        self.position = dict(self.aliases.position)
        self.of: dict[fx.Node, int] = {}
        self.lists: dict[fx.Node, list[int | None]] = {}
        """Of operators on lists of tensors, the part of each place."""
        self._held: dict[fx.Node, int] = dict(parts)
        """By the owner of a memory, the part whose nodes wrote it."""
        self._read: dict[fx.Node, set[int]] = defaultdict(set)
        self._parts_at: dict[int, set[int | None]] = {}
        for node in step.graph.nodes:
            if node.op == "call_function":
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        columns, source = _columns(node), node.args[0] if node.args else None
        if columns:
            single = [n for n in node.all_input_nodes if not any(n in column for column in columns)]
            rows = [[column[i] for column in columns] + single for i in range(len(columns[0]))]
            self.lists[node] = [self._take(node, row) for row in rows]
            self._parts_at[self.position[node]] = set(self.lists[node])
            return
        if node.target is getitem and source in self.lists:
            part = self.lists[source][node.args[1]]
            if part is not None:
                self._held[self.aliases.root(node)] = part
        else:
            part = self._take(node, node.all_input_nodes)
        self._parts_at[self.position[node]] = {part}
        if part is not None:
            self.of[node] = part

    def _take(self, node: fx.Node, read: Iterable[fx.Node]) -> int | None:
        """The part of ``node``, or of one of its places, that reads and writes what is ``read``."""
        roots = [self.aliases.root(source) for source in read]
        written = {self.aliases.root(w) for w in written_arguments(node)} if is_mutating(node) else set()
        written &= set(roots)
        found = {self._held[root] for root in roots if root in self._held}
        found |= {part for root in written for part in self._read[root]}
        if not found:
            return None
        if len(found) > 1 or is_random(node):
            why = "draws random numbers" if is_random(node) else "computes with the state of several parameters"
            raise ValueError(
                f"offload_optimizer updates parameters in parts, and {describe(node)} {why}; leave it out, or use an "
                "optimizer that works element by element, such as AdamW"
            )
        (part,) = found
        self._held |= dict.fromkeys(written, part)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._held[self.aliases.root(node)] = part
        for root in roots:
            self._read[root].add(part)
        return part

    def split_lists(self) -> None:
        """One node for each part instead of a node on lists of several."""
        for node, places in self.lists.items():
            if not any(part is not None for part in places):
                continue
            columns, items = _columns(node), getitem_users(node)
            for part in dict.fromkeys(places):
                chosen = [i for i, other in enumerate(places) if other == part]
                args = [[arg[i] for i in chosen] if arg in columns else arg for arg in node.args]
                new = Builder(node, before=node)(node.target, *args, **node.kwargs)
                self.position[new] = self.position[node]
                if part is not None:
                    self.of[new] = part
                for place, i in enumerate(chosen):
                    if i in items:
                        items[i].args = (new, place)
            self.step.graph.erase_node(node)

    def sink(self) -> None:
        """Compute next to a part what nothing else reads, such as its gradients in fp32."""
        for node in reversed(list(self.step.nodes("optimizer"))):
            parts = {self.of.get(user) for user in node.users}
            if node in self.of or not is_pure(node) or len(parts) != 1 or parts == {None}:
                continue
            writes = (at for n in node.all_input_nodes for at in self.aliases.writes.get(self.aliases.root(n), ()))
            if all(at < self.position[node] or self._parts_at[at] == parts for at in writes):
                (self.of[node],) = parts

    def reorder(self) -> None:
        """Part by part, after all else."""
        output = next(iter(self.step.graph.find_nodes(op="output")))
        for node in sorted(self.of, key=lambda node: (self.of[node], self.position[node])):
            output.prepend(node)

    def by_part(self) -> Iterator[tuple[int, list[fx.Node]]]:
        """(part, its nodes in order)."""
        nodes: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.step.graph.nodes:
            if node in self.of:
                nodes[self.of[node]].append(node)
        yield from nodes.items()


def _columns(node: fx.Node) -> list[list[fx.Node]]:
    """The lists of tensors of an operator that computes each place of them apart; none for other nodes."""
    if not is_overload(node) or not node.target._schema.name.startswith(("aten::_foreach_", "aten::_fused_ada")):
        return []
    found = [arg for arg in node.args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], fx.Node)]
    return found if len({len(column) for column in found}) == 1 else []


def _copy(step: StepGraph, state: dict[fx.Node, OptimizerState], walk: _Walk) -> list[fx.Node]:
    """Copy ``state`` to the device and back around each part that uses it; returns the state that some part uses."""
    output = next(iter(step.graph.find_nodes(op="output")))
    parts = list(walk.by_part())
    firsts = [*(nodes[0] for _, nodes in parts), output]
    used = [
        [s for s in state if any(user in walk.of and walk.of[user] == part for user in s.users)] for part, _ in parts
    ]
    written = {s for s in state if walk.aliases.writes.get(s)}
    arriving: dict[fx.Node, fx.Node] = {}
    leaving: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def add(before: fx.Node, like: fx.Node, s: fx.Node, target: object, *args: object) -> fx.Node:
        build = Builder(like, before=before)
        path = state[s].parameter.rpartition(".")[0]
        build.origin = provenance(like)._replace(path=path, phase="optimizer", role=None)
        return build(target, *args)

    def begin(k: int, before: fx.Node) -> None:
        for s in used[k] if k < len(parts) else ():
            arriving[s] = add(before, firsts[k], s, RELOAD_BEGIN, s, devices[s])

    def end(k: int, before: fx.Node) -> None:
        for s in used[k] if k >= 0 else ():
            if s in leaving:
                add(before, firsts[k], s, STORE_END, *leaving[s])

    devices = {s: s.meta["val"].device for s in state}
    for s in state:
        value = s.meta["val"]
        with value.fake_mode:
            s.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    begin(0, next(node for node in step.graph.nodes if phase_of(node) == "optimizer" and node.op == "call_function"))
    for k, (_, nodes) in enumerate(parts):
        first, following = firsts[k], firsts[k + 1]
        end(k - 2, first)
        begin(k + 1, first)
        here = set(nodes)
        for s in used[k]:
            there = add(first, first, s, RELOAD_END, arriving[s])
            s.replace_all_uses_with(there, delete_user_cb=here.__contains__)
            if s in written:
                leaving[s] = add(following, first, s, STORE_BEGIN, s, there), there
    end(len(parts) - 2, output)
    end(len(parts) - 1, output)
    return [s for each in used for s in each]
