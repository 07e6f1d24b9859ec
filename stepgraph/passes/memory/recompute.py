"""Activation recomputation: which forward results to keep for backward, and which to recompute.

Matches: forward results that backward reads. Before -> after: a backward node reads a copy of the forward node,
inserted just before it, that runs the same operator on the same values; the original then dies in forward.
Exact: the copy is bitwise the original, because random and mutating operators are never run again. Nor are collectives,
except for the all-gathers of tensor parallelism, which `full` (and a budget) repeats, because they read less than they
make. Gathers of parameters are left to `reshard_after_forward`.
Preconditions: a flat graph with phases. Calls of ``torch.utils.checkpoint`` in the model are honoured under every
policy: capture runs them plainly and marks their nodes.
Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), for the idea.
"""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import fx

from stepgraph.costs import links
from stepgraph.costs.roofline import node_seconds
from stepgraph.graph import collectives
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import EXPENSIVE, is_pure, is_view, tensor_bytes
from stepgraph.graph.provenance import phase_of, provenance, role_of, set_provenance
from stepgraph.graph.values import Buffer, Parameter
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.memory.policy import MemoryPolicy, module_actions, parse_policy

aten = torch.ops.aten

#: A chain of cheap operators longer than this is cut by keeping a result: a residual stream without declared blocks
#: would otherwise be recomputed from the embedding up.
MAX_CHAIN = 12


@register(
    "recompute",
    "exact",
    options=MemoryPolicy(),
    after=("tile_sequence",),
    from_options=lambda options: vars(parse_policy(options.memory)),
)
def recompute(step: StepGraph, options: MemoryPolicy, report: PassReport) -> None:
    """Trade memory for time: recompute forward results in backward by a memory policy."""
    plan = Plan(step)
    everything = plan.kept_bytes(set())
    report.matched = len(plan.saved)
    if options.policy in ("full", "selective") and not step.blocks:
        report.notes.append("the model declares no repeated blocks (nn.ModuleList): treated as one block")
    if options.policy == "budget":
        unit = everything if options.budget_is_fraction else 2**30
        dropped = plan.fit(options.budget * unit)
        if dropped is None:
            least = plan.kept_bytes(plan.dropped("full"))
            enough = math.ceil(least / unit * 1e4) / 1e4
            raise ValueError(
                f"memory budget of {_size(options.budget * unit)} cannot be met: with everything in the blocks "
                f"recomputed {_size(least)} of {_size(everything)} remain; ask for at least "
                f"budget={enough:g}{'' if options.budget_is_fraction else 'GiB'}"
            )
    else:
        dropped = plan.dropped("none" if options.policy == "peak" else options.policy)
    dropped = plan.by_module(dropped, options.modules)
    weights = len(plan.dequantized() & plan.saved.keys())
    kept, marked = plan.kept_bytes(dropped), len(plan.checkpointed())
    report.changed = plan.rewrite(dropped)
    report.summary = (
        f"policy {options.policy}: {report.changed} nodes recomputed; kept for backward "
        f"{_size(kept)} of {_size(everything)}"
    )
    if weights:
        report.notes.append(f"{weights} dequantized weights are not kept for backward, under any policy")
    if marked:
        report.notes.append(f"{marked} results inside torch.utils.checkpoint calls are recomputed, as they ask")


def _size(size: float) -> str:
    power = next((p for p in (3, 2) if size >= 2 ** (10 * p)), 1)
    return f"{size / 2 ** (10 * power):.2f} {('KiB', 'MiB', 'GiB')[power - 1]}"


class Plan:
    """The forward results that backward reads, and what it takes to compute each again.

    A result is known by its root: the node that owns its storage. ``saved``: roots backward reads, in order.
    ``forward``: the phases that count as forward; the rest up to the optimizer counts as backward.
    """

    def __init__(self, step: StepGraph, forward: tuple[str, ...] = ("forward", "loss")):
        self.step = step
        self.forward = forward
        self.nodes = list(step.graph.nodes)
        self.aliases = Aliases(step.graph)
        self.phase = {node: phase_of(node) for node in self.nodes}
        self.block = self._blocks()
        gathers = {node for node in self.nodes if node.target is collectives.ALL_GATHER}
        self.gathers = {n for n in gathers if (role := role_of(n)) and role.kind == "activation"}
        self.saved: dict[fx.Node, None] = {}
        for node in self.nodes:
            if self._is_forward(node) and any(self.is_backward(user) for user in node.users):
                root = self.aliases.root(node)
                if root.op == "call_function":
                    self.saved[root] = None

    @cached_property
    def _repeatable(self) -> dict[fx.Node, bool]:
        return {n: self._can_repeat(n) for n in self.nodes if self._is_forward(n)}

    def _blocks(self) -> dict[fx.Node, str | None]:
        """The repeated block of every node; looked up once per module path, which many nodes share."""
        blocks, by_path = {}, {}
        for node in self.nodes:
            found = provenance(node)
            path = found.path if found else None
            if path not in by_path:
                by_path[path] = self.step.block_of(node)
            blocks[node] = by_path[path]
        return blocks

    def _is_forward(self, node: fx.Node) -> bool:
        return self.phase[node] in self.forward

    def is_backward(self, node: fx.Node) -> bool:
        """Whether the node runs after forward and before the optimizer."""
        return self.phase[node] in ("loss", "backward") and not self._is_forward(node)

    def _can_repeat(self, node: fx.Node) -> bool:
        """Whether running ``node`` again in backward gives the same bits."""
        operator_node = self.operator(node)
        if node not in self.gathers and not (is_pure(node) and is_pure(operator_node)):
            return False
        root = self.aliases.root(node)
        if self.aliases.writes.get(root):
            return False  # written in place after it was made
        here = self.aliases.position[node]
        for source in operator_node.all_input_nodes:
            writes = self.aliases.writes.get(self.aliases.root(source), ())
            # The optimizer writes parameters after all of backward; any other write may fall in between.
            if any(p > here and self.phase[self.nodes[p]] != "optimizer" for p in writes):
                return False
        return True

    # Policies: each returns the roots that need not be kept.

    def dropped(self, policy: str) -> set[fx.Node]:
        """What ``policy`` (not ``budget``) and the model's checkpoint calls recompute.

        Recomputing a small result may need a large one that was not kept before: a stronger policy that would keep
        more gives way to the weaker one.
        """
        choices = [marked := self.checkpointed() | self.dequantized()]
        if policy in ("selective", "full"):
            again = marked | self.selective()
            # Dropping a sum of several products, as of LoRA, may keep more than it frees.
            choices.append(again if self.kept_bytes(again) <= self.kept_bytes(marked) else marked | self.cut(again))
        if policy == "full":
            choices.append(marked | self.full())
        return min(choices, key=self.kept_bytes)

    def candidates(self) -> Iterable[fx.Node]:
        """Every forward root that can be recomputed, whether or not backward reads it now."""
        return (n for n, ok in self._repeatable.items() if ok and self.aliases.root(n) is n)

    def leaves_block(self, root: fx.Node) -> bool:
        """Whether a repeated block made the result and forward reads it outside."""
        return self.block[root] is not None and self.crosses(root, self.block)

    def crosses(self, root: fx.Node, region: dict[fx.Node, object]) -> bool:
        """Whether forward nodes of another region read the result."""
        return any(
            self._is_forward(user) and region[user] != region[root]
            for alias in self.alias_nodes(root)
            for user in alias.users
            if not is_view(user)
        )

    def alias_nodes(self, root: fx.Node) -> list[fx.Node]:
        nodes, queue = [], [root]
        while queue:
            node = queue.pop()
            nodes.append(node)
            queue += [u for u in node.users if is_view(u) and u.args[0] is node]
        return nodes

    def checkpointed(self) -> set[fx.Node]:
        """What the model's own ``torch.utils.checkpoint`` calls ask to recompute."""
        region = {n: (provenance(n).checkpoint if provenance(n) else None) for n in self.nodes}
        return {n for n in self.candidates() if region[n] is not None and not self.crosses(n, region)}

    def by_module(self, dropped: set[fx.Node], modules: Sequence[tuple[str, str]]) -> set[fx.Node]:
        """``dropped`` with the exceptions of ``modules`` (see `MemoryPolicy`): a module that recomputes keeps what
        leaves it."""
        find = module_actions(modules)
        found = {n: find(p.path) if (p := provenance(n)) else None for n in self.nodes} if modules else {}
        again = {n for n in self.candidates() if (a := found.get(n)) and a[0] == "recompute"}
        inside = {n for n in again if not self.crosses(n, found)}
        return {n for n in dropped if not (a := found.get(n)) or a[0] != "keep"} | inside

    def full(self) -> set[fx.Node]:
        """Everything inside repeated blocks except what leaves them."""
        end = self._end_of_forward()
        inside = (n for n in self.candidates() if self.block[n] is not None or not (self.step.blocks or n in end))
        return {n for n in inside if not self.crosses(n, self.block)}

    def dequantized(self) -> set[fx.Node]:
        """Weights made of bits that forward and backward read, and what is made of these and other weights alone: of
        these the bits are kept, whatever the policy."""
        held = {node for node, what in self.step.bound() if isinstance(what, (Parameter, Buffer))}
        found: set[fx.Node] = set()
        for root in self.nodes:
            if root.op != "call_function" or self.aliases.root(root) is not root:
                continue
            sources = [self.aliases.root(source) for source in root.all_input_nodes]
            if sources and held.issuperset(sources):
                held.add(root)
                packed = (s in found or getattr(s.meta["val"], "dtype", None) == torch.uint8 for s in sources)
                value = root.meta.get("val")
                if isinstance(value, torch.Tensor) and value.is_floating_point() and any(packed):
                    found.add(root)
        return {root for root in found if self._repeatable.get(root)}

    def selective(self) -> set[fx.Node]:
        """Cheap operators, in chains of at most ``MAX_CHAIN``, that do not cross blocks."""
        dropped: set[fx.Node] = set()
        depth: dict[fx.Node, int] = {}
        end = self._end_of_forward()
        for node in self.candidates():
            if node in end or self.is_expensive(node) or self.crosses(node, self.block):
                continue
            length = 1 + max((depth.get(s, 0) for s in self.sources(node)), default=0)
            if length <= MAX_CHAIN:
                depth[node] = length
                dropped.add(node)
        return dropped

    def _end_of_forward(self) -> set[fx.Node]:
        """What is outside the blocks and leads to no expensive operator of forward, such as a cross entropy: backward
        begins there, so to compute it again frees nothing, and hides the loss from `fuse_loss`."""
        before: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if any(user in before or self.is_expensive(user) for user in node.users if self._is_forward(user)):
                before.add(node)
        return {n for n in self.nodes if n not in before and self.block[n] is None} if before else set()

    def fit(self, limit: float) -> set[fx.Node] | None:
        """The least recomputation found that keeps at most ``limit`` bytes: cheapest seconds per byte first.

        None: even ``full`` keeps more.
        """
        marked, full = self.dropped("none"), self.dropped("full")
        if self.kept_bytes(full) > limit:
            return None
        order = sorted(full - marked, key=self._cost)
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            if self.kept_bytes(marked | set(order[:middle])) <= limit:
                high = middle
            else:
                low = middle + 1
        return marked | set(order[:low])

    @staticmethod
    def operator(node: fx.Node) -> fx.Node:
        return node.args[0] if node.target is operator.getitem else node

    def is_expensive(self, node: fx.Node) -> bool:
        if node in self.gathers:
            return True
        target = self.operator(node).target
        packet = getattr(target, "overloadpacket", None)
        return packet in EXPENSIVE or isinstance(target, torch._ops.HigherOrderOperator)

    def _cost(self, node: fx.Node) -> tuple[float, int, int]:
        """The order in which results are given up: seconds per byte, in three digits; of equal ones the largest, and
        then the first, so that every rank chooses the same."""
        size = tensor_bytes(node)
        return float(f"{self.seconds(node) / max(size, 1):.3g}"), -size, self.aliases.position[node]

    def seconds(self, node: fx.Node) -> float:
        """Seconds to compute ``node`` again, as a kernel of its own."""
        return links.seconds(node) if node in self.gathers else node_seconds(self.operator(node))

    def kept(self, dropped: set[fx.Node]) -> set[fx.Node]:
        """The roots kept for backward when ``dropped`` are recomputed: a dropped one needs its sources."""
        kept: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        queue = list(self.saved)
        while queue:
            root = queue.pop()
            if root in seen or root.op != "call_function":
                continue
            seen.add(root)
            if root not in dropped:
                kept.add(root)
                continue
            queue += self.sources(root)
        return kept

    def cut(self, repeatable: Collection[fx.Node]) -> set[fx.Node]:
        """The roots among ``repeatable`` to compute again so that the fewest bytes are kept: a minimum cut of forward
        between what cannot be recomputed and what backward reads."""
        import networkx as nx  # slow to load

        network = nx.DiGraph()
        latest = len(self.nodes)
        seen: set[fx.Node] = set()
        queue = list(self.saved)
        for root in queue:
            network.add_edge((root, "out"), "backward")
        while queue:
            root = queue.pop()
            if root in seen:
                continue
            seen.add(root)
            # Between equal choices the later result is the better one: less is left to compute.
            cost = tensor_bytes(root) * (2 - self.aliases.position[root] / latest * 1e-3)
            several = isinstance(root.meta.get("val"), (list, tuple))
            network.add_edge((root, "in"), (root, "out"), **({} if several else {"capacity": cost}))
            if root not in repeatable:
                network.add_edge("forward", (root, "in"))
                continue
            for source in self.sources(root):
                if source.op == "call_function":  # inputs of the graph are there anyway
                    network.add_edge((source, "out"), (root, "in"))
                    queue.append(source)
        if "forward" not in network or "backward" not in network:
            return set()
        _, (kept_side, _) = nx.minimum_cut(network, "forward", "backward")
        # What lies beyond the cut is recomputed.
        return {root for root in seen if (root, "in") not in kept_side}

    def sources(self, root: fx.Node) -> list[fx.Node]:
        """The roots that the operator behind ``root`` reads."""
        return [self.aliases.root(source) for source in self.operator(root).all_input_nodes]

    def kept_bytes(self, dropped: set[fx.Node]) -> int:
        """Bytes of `kept`."""
        return sum(tensor_bytes(root) for root in self.kept(dropped))

    def rewrite(self, dropped: set[fx.Node], made: Mapping[fx.Node, fx.Node] | None = None) -> int:
        """Make backward read copies of dropped results; ``made``: such copies that are there already. The number of
        nodes added."""
        if not dropped:
            return 0
        graph, copies, added = self.step.graph, dict(made or {}), 0
        for user in self.nodes:
            if not self.is_backward(user):
                continue
            for source in user.all_input_nodes:
                if not self._is_forward(source) or self.aliases.root(source) not in dropped:
                    continue
                with graph.inserting_before(user):
                    replacement, new = self._copy(source, dropped, copies)
                added += new
                user.replace_input_with(source, replacement)
        for node in reversed(self.nodes):
            if node in copies and node not in (made or ()) and not node.users:  # forward made it only for backward
                graph.erase_node(node)
        return added

    def _copy(self, node: fx.Node, dropped: set, copies: dict[fx.Node, fx.Node]) -> tuple[fx.Node, int]:
        """A copy of ``node`` at the insertion point, its dropped sources copied first. Iterative: chains are long."""
        added, stack = 0, [node]
        while stack:
            current = stack[-1]
            if current in copies:
                stack.pop()
                continue
            needed = [s for s in current.all_input_nodes if self._is_dropped(s, dropped) and s not in copies]
            if needed:
                stack += needed
                continue
            copy = self.step.graph.node_copy(current, lambda n: copies.get(n, n))
            found = provenance(current)
            set_provenance(copy, found._replace(phase="backward"))
            copy.meta["recomputes"] = current.name
            copies[current] = copy
            added += 1
            stack.pop()
        return copies[node], added

    def _is_dropped(self, node: fx.Node, dropped: set[fx.Node]) -> bool:
        """Whether ``node`` must be copied: its result, or the operator behind a getitem, is not kept."""
        if not self._is_forward(node):
            return False
        if isinstance(node.meta.get("val"), (list, tuple)):
            return True  # a multi-output operator whose getitem is dropped
        return self.aliases.root(node) in dropped
