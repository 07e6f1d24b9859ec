"""The cross entropy and its gradient as one operator that writes the gradient over the logits.

Matches: ``_log_softmax`` of a (M, V) tensor read only by ``nll_loss_forward`` and by the backward of that same loss,
where the gradient that comes in does not depend on the loss's value. Before -> after: cast, log softmax, loss, loss
backward, softmax backward, cast back -> ``stepgraph::cross_entropy_(logits)``.
Tier numerics: the kernel sums in another order, and its result is rounded once. Preconditions: a CUDA GPU, class
indices as targets, no class weights, mean or sum.
"""

from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.capture import StepGraph, provenance, set_provenance
from stepgraph.kernels.cross_entropy import cross_entropy_
from stepgraph.passes.analysis import Aliases, is_pure, is_view, tensor_bytes
from stepgraph.passes.cleanup import getitem_users
from stepgraph.passes.contract import PassReport, register

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's numbers for the reductions
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@register("fuse_loss", "numerics", needs_cuda=True)
def fuse_loss(step: StepGraph, options: object, report: PassReport) -> None:
    """Compute the cross entropy and its gradient in one kernel, over the logits."""
    saved = 0
    for node in list(step.graph.nodes):
        if node.target is not aten._log_softmax.default:
            continue
        report.matched += 1
        aliases = Aliases(step.graph)
        found = _match(node, aliases)
        if isinstance(found, str):
            report.notes.append(f"{node.name} stays as it is: {found}")
            continue
        found.rewrite(step.graph, aliases)
        report.changed += 1
        saved += tensor_bytes(found.logits) if found.private else 0
    what = f"{report.changed} of {report.matched} cross entropies" if report.matched else "no cross entropy found to be"
    report.summary = f"{what} computed with the gradient, {saved / 2**20:.0f} MiB of gradients written over logits"


@dataclass
class _Loss:
    """The nodes of one loss. ``logits``: before the cast to fp32. ``slopes``: their gradient, after the cast back.
    ``private``: nothing else reads the logits."""

    logits: fx.Node
    softmax: fx.Node
    forward: fx.Node
    backward: fx.Node
    slopes: fx.Node
    private: bool

    def rewrite(self, graph: fx.Graph, aliases: Aliases) -> None:
        """Put the operator in their place."""
        _, targets, _, reduction, ignore = self.forward.args
        with graph.inserting_before(self.forward):
            logits = self.logits if self.private else self._call(aten.clone.default, self.logits)
            grad = self._early(self.backward.args[0], aliases.position)
            loss = self._call(cross_entropy_._opoverload, logits, targets, grad, reduction == _MEAN, ignore)
        getitem_users(self.forward)[0].replace_all_uses_with(loss)
        self.slopes.replace_all_uses_with(logits)
        _erase_unread(graph, [self.slopes, *getitem_users(self.forward).values(), self.forward])

    def _early(self, grad: fx.Node, position: dict[fx.Node, int]) -> fx.Node:
        """``grad``, computed before the loss is."""
        if position[grad] < position[self.forward]:
            return grad
        if grad.target is aten.ones_like.default:
            value = grad.meta["val"]
            return self._call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
        args, kwargs = fx.map_arg((grad.args, grad.kwargs), lambda n: self._early(n, position))
        return self._call(grad.target, *args, **kwargs)

    def _call(self, target: torch._ops.OpOverload, *args: object, **kwargs: object) -> fx.Node:
        node = self.forward.graph.call_function(target, args, kwargs)
        values, options = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.logits.meta["val"].fake_mode, torch.no_grad():
            node.meta["val"] = target(*values, **options)
        set_provenance(node, provenance(self.forward))
        return node


def _match(softmax: fx.Node, aliases: Aliases) -> _Loss | str:
    """The loss around ``softmax``, or why it cannot be rewritten."""
    by_target = {user.target: user for user in softmax.users}
    forward, backward = by_target.get(aten.nll_loss_forward.default), by_target.get(aten.nll_loss_backward.default)
    last = by_target.get(aten._log_softmax_backward_data.default)
    if not (forward and backward and last) or len(softmax.users) != 3:
        return "not a class loss with its backward alone"
    weight, reduction = forward.args[2:4]
    if weight is not None or reduction == _NONE:
        return "class weights, or a loss for each row"
    total = getitem_users(forward).get(1)
    if forward.args[1:] != backward.args[2:6] or last.args[0] is not backward or len(backward.users) != 1:
        return "its backward belongs to another loss"
    if total is not None and set(total.users) != {backward}:
        return "the number of rows is read elsewhere"
    wide = softmax.args[0]
    cast = wide.target is aten._to_copy.default and len(wide.users) == 1
    logits = wide.args[0] if cast else wide
    dtype, (slopes, *others) = logits.meta["val"].dtype, last.users or (last,)
    if not cast or last.meta["val"].dtype == dtype:
        slopes = last
    elif others or slopes.target is not aten._to_copy.default or slopes.meta["val"].dtype != dtype:
        return "its gradient is read in another dtype than the logits'"
    if softmax.args[1] not in (1, -1) or logits.meta["val"].ndim != 2 or dtype not in _DTYPES:
        return f"logits of {logits.meta['val'].ndim} dimensions in {dtype}"
    if not _known_before(backward.args[0], forward, aliases):
        return "the gradient that comes in depends on the loss"
    root = aliases.root(logits)
    members = [root, *(n for n in aliases.position if is_view(n) and aliases.root(n) is root)]
    readers = {user for member in members for user in member.users if not is_view(user)}
    dense = logits.meta["val"].is_contiguous()
    private = root.op == "call_function" and dense and readers == {wide if cast else softmax}
    return _Loss(logits, softmax, forward, backward, slopes, private)


def _known_before(node: fx.Node, loss: fx.Node, aliases: Aliases) -> bool:
    """Whether ``node`` can be computed before ``loss``: of a tensor of ones, only the shape matters."""
    at = aliases.position
    if node.target is aten.ones_like.default or at[node] < at[loss]:
        return True
    if not is_pure(node) or isinstance(node.meta["val"], (list, tuple)):
        return False
    sources = node.all_input_nodes
    return all(_known_before(s, loss, aliases) and not aliases.written_between(s, at[loss], at[node]) for s in sources)


def _erase_unread(graph: fx.Graph, ends: list[fx.Node]) -> None:
    """Take out ``ends`` and what only they read."""
    erased: set[fx.Node] = set()
    while ends:
        node = ends.pop(0)
        if node not in erased and not node.users and is_pure(node):
            ends += node.all_input_nodes
            graph.erase_node(node)
            erased.add(node)
