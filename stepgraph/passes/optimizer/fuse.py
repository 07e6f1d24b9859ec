"""Marks what optimizers compute element by element, for Inductor to fuse: Muon's, Lion's, people's own.

Matches, in the optimizer phase, pointwise operators on large tensors, in place or not, with the views, concatenations
and sums between them. Before -> after:

    lerp_(m, g, w); g' = lerp_(g, m, w); x = cast(g')  ->  n = lerp(m, g, w); copy_(m, n); x = cast(lerp(g, n, w))

and each is marked; a gradient that these alone read is clipped among them. What is written twice is stored once.
Tier numerics: what a fused kernel computes is rounded once. Preconditions: after `expand_optimizer`, which writes AdamW
out; worth it only where `inductor` compiles the result.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import is_mutating, is_overload, is_pointwise, is_random, is_view, of_target, packet
from stepgraph.graph.marks import COMPILE, KEEP_EAGER
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.optimizer.expand import leave_unscaled

aten, ours = torch.ops.aten, torch.ops.stepgraph
#: Elements from which on an operator is worth compiling; what fewer are is fused where it follows another.
_LARGE = 1 << 10
_FOLLOWING = {aten.linalg_vector_norm, aten.sum, aten.mean, aten.amax, aten.cat, aten.stack}
#: Operators of ours that are written out for it.
_WRITTEN_OUT = {ours.add_scaled.default, ours.add_scaled_.default}


@of_target
def _out_of_place(target: Any) -> Callable | None:
    """The pointwise operator that ``target`` is the in-place form of."""
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    if target.namespace != "aten" or not name.endswith("_") or target is aten.copy_.default:
        return None
    found = getattr(getattr(aten, name[:-1], None), overload, None)
    return found if found is not None and torch.Tag.pointwise in found.tags else None


@register(
    "fuse_updates",
    "numerics",
    after=("inplace_update", "expand_optimizer"),
    serves="inductor",
    needs_cuda=True,
    from_options=lambda options: {} if options.inductor == "full" else None,
)
def fuse_updates(step: StepGraph, options: object, report: PassReport) -> None:
    """Mark what optimizers compute element by element, for Inductor to fuse."""
    _Fusing(step, report).run()
    report.summary = f"{report.changed} of {report.matched} operators of updates marked for Inductor"


class _Fusing:
    def __init__(self, step: StepGraph, report: PassReport):
        self.step, self.report = step, report
        self.aliases = Aliases(step.graph)
        self.known = {node for node in step.nodes("optimizer") if node.meta.get(COMPILE)}
        self.marked: set[fx.Node] = set()
        self.at = dict(self.aliases.position)
        #: The memory in which a value that is computed here lies in eager.
        self.roots: dict[fx.Node, fx.Node] = {}
        #: What lies in the memory of an input of the graph, by that input, and the write that put it there.
        self.now: dict[fx.Node, fx.Node] = {}
        self.write: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in list(self.step.nodes("optimizer")):
            if node in self.known or node.meta.get(KEEP_EAGER) or not is_overload(node):
                self._leave(node)
            elif is_mutating(node):
                self._in_place(node)
            elif self._fuses(node):
                self._mark(node)
            elif not is_view(node):
                self._leave(node)
        self._clip()
        for node in reversed(list(self.step.nodes("optimizer"))):
            between = is_view(node) or node.target is operator.getitem
            if between and node not in self.known and node.users and self.marked.issuperset(node.users):
                self.marked.add(node)
        # Inductor takes inputs for tensors of their own: what is read under two names is written between its kernels.
        read = {one for node in self.marked for one in node.all_input_nodes if one in self.aliases.position}
        shared = {root for one in read if (root := self.aliases.root(one)) is not one}
        self.marked -= {n for n in self.marked if n.target is aten.copy_.default and n.args[0] in shared}
        self.marked &= set(self.step.nodes("optimizer"))
        for node in self.marked:
            node.meta[COMPILE] = True
        self.report.changed = len(self.marked)
        self.report.matched = sum(1 for node in self.step.nodes("optimizer") if node not in self.known)

    def _root(self, node: fx.Node) -> fx.Node:
        return self.roots[node] if node in self.roots else self.aliases.root(node)

    def _leave(self, node: fx.Node) -> None:
        """``node`` is left unchanged: what it reads stays written, and what it writes is only in memory."""
        for one in node.all_input_nodes:
            if one in self.aliases.position:
                self.write.pop(self.aliases.root(one), None)
        for one in written_arguments(node) if is_mutating(node) else ():
            self.now.pop(self._root(one), None)

    def _fuses(self, node: fx.Node) -> bool:
        """Whether Inductor may take the node into a kernel."""
        if not is_overload(node) or node in self.known or is_random(node):
            return False
        own = node.target in (*_WRITTEN_OUT, aten.copy_.default) or _out_of_place(node.target) is not None
        return own or is_pointwise(node) or packet(node) in (*_FOLLOWING, aten.clone)

    def _mark(self, node: fx.Node) -> None:
        value = node.meta["val"]
        alone = packet(node) not in _FOLLOWING and isinstance(value, torch.Tensor) and value.numel() > _LARGE
        if not alone and self.marked.isdisjoint(map(_behind_views, node.all_input_nodes)):
            self._leave(node)
            return
        self._take_values(node)
        if node.target in _WRITTEN_OUT:
            replace(node, self._written_out(node))
        else:
            self.marked.add(node)

    def _written_out(self, node: fx.Node) -> fx.Node:
        """``x + scale y`` of other operators."""
        build, (x, y, scale) = Builder(node, before=node), node.args
        y = build.cast(y, x.meta["val"].dtype)
        product = build(aten.mul.Tensor, y, scale)
        new = build(aten.add.Tensor, x, product)
        self.marked |= {product, new} | ({y} - {node.args[1]})
        return new

    def _take_values(self, node: fx.Node) -> None:
        """Let ``node`` read what was computed, where it reads memory into which that was written."""
        for one in node.all_input_nodes:
            root = self.aliases.root(one) if one in self.aliases.position else None
            if root in self.now and one is root:
                node.replace_input_with(one, self.now[root])
            elif root in self.now:  # a view of it
                self.write.pop(root, None)

    def _in_place(self, node: fx.Node) -> None:
        written = written_arguments(node)
        root = self._root(written[0])
        if len(written) != 1 or not self._is_whole(node, root) or (new := self._value(node)) is None:
            self._leave(node)
            return
        if root.op == "placeholder":
            if (before := self.write.get(root)) is not None:
                before.graph.erase_node(before)
                self.marked.discard(before)
            self.write[root] = Builder(node, before=node)(aten.copy_.default, root, new)
            self.marked.add(self.write[root])
            self.now[root] = new
            replace(node, root)  # whose readers here take the value, and others what is in memory
            return
        self.roots[new], self.at[new] = root, self.at[node]
        replace(node, new)

    def _is_whole(self, node: fx.Node, root: fx.Node) -> bool:
        """Whether ``node`` writes all of ``root``, and what reads that later reads it by the name of ``node``, or is an
        input's reader."""
        first, at = written_arguments(node)[0], self.at
        if root.op != "call_function":
            return first is root and root.op == "placeholder"
        if any(not (self._fuses(user) or is_view(user)) for user in node.users):
            return False  # as where fused AdamW reads a clipped gradient
        older = [one for one in at if self._root(one) is root and at[one] < at[node]]
        return not any(at.get(user, -1) > at[node] for one in older for user in one.users)

    def _value(self, node: fx.Node) -> fx.Node | None:
        """What ``node`` writes, computed apart; None where it is left as it is."""
        target, copies = _out_of_place(node.target), node.target is aten.copy_.default
        known = target is not None or copies or node.target in _WRITTEN_OUT
        if not known or is_random(node) or (old := node.meta["val"]).numel() <= _LARGE:
            return None
        if copies:  # not of an input or its clone, which Inductor reads at the end, when it may be changed
            source = self.now.get(node.args[1], node.args[1])
            if source.meta["val"].shape != old.shape or source not in self.marked or packet(source) is aten.clone:
                return None
        given = node.args, node.kwargs
        self._take_values(node)
        build = Builder(node, before=node)
        if copies:
            same = source.meta["val"].dtype == old.dtype
            new = build(aten.clone.default, source) if same else build.cast(source, old.dtype)
        else:
            new = build(target, *node.args, **node.kwargs) if target is not None else self._written_out(node)
        self.marked.add(new)
        self.marked.add(new := build.cast(new, old.dtype))
        if new.meta["val"].stride() != old.stride():
            self.marked.add(new := build(aten.clone.default, new, memory_format=torch.contiguous_format))
        if new.meta["val"].stride() == old.stride():
            return new
        node.args, node.kwargs = given  # it writes into memory, not into what was computed for it
        erase_unread(new)
        return None

    def _clip(self) -> None:
        """Clip gradients where they are read, if these nodes alone read them."""
        for clip in [n for n in self.step.nodes("optimizer") if n.target is aten._foreach_mul_.Tensor]:
            at = {node: i for i, node in enumerate(self.step.graph.nodes)}
            taken = set()
            for grad in clip.args[0]:
                later = [user for user in grad.users if at[user] > at[clip]]
                if later and self.marked.issuperset(later):
                    first = min(later, key=at.__getitem__)
                    new = Builder(clip, before=first)(aten.mul.Tensor, grad, clip.args[1])
                    self.marked.add(new)
                    for user in later:
                        user.replace_input_with(grad, new)
                    taken.add(grad)
            leave_unscaled(taken, clip)


def _behind_views(node: fx.Node) -> fx.Node:
    while is_view(node) or node.target is operator.getitem:
        node = node.args[0]
    return node
