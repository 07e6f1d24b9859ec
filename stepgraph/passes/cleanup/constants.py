"""Evaluates literals of the model once. Exact."""

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import replace
from stepgraph.graph.facts import LITERAL
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten
_FILLS = {aten.fill_.Tensor: aten.fill_.Scalar, aten.fill.Tensor: aten.fill.Scalar}


@register("fold_constants", "exact")
def fold_constants(step: StepGraph, options: object, report: PassReport) -> None:
    """Evaluate casts and device copies of literals once.

    Matches ``lift_fresh_copy`` of a constant (``torch.tensor(...)`` in the model) and casts of it; before -> after:
    ``_to_copy(lift_fresh_copy(c))`` -> ``c'``. A literal on the host would otherwise be copied to the GPU in every
    step, which a CUDA graph cannot hold. Not where the model writes into the literal. A number that fills a tensor, as
    in ``x[:, 0] = 3``, is passed as a number: ``fill_(x, c)`` -> ``fill_(x, 3)``.
    """
    aliases = Aliases(step.graph)
    folded: set[fx.Node] = set()
    for node in list(step.graph.nodes):
        # A tensor that the user holds is read live: only literals, and what was folded from them, never change.
        copied = node.target is aten.lift_fresh_copy.default and node.args[0].op == "get_attr"
        cast = node.target is aten._to_copy.default and node.args[0] in folded
        if not copied and not cast:
            continue
        report.matched += 1
        if aliases.writes.get(aliases.root(node)):
            continue
        with torch.no_grad():
            value = node.target(getattr(step.module, node.args[0].target), **node.kwargs)
        name = f"_literal_{node.name}"
        step.module.register_buffer(name, value, persistent=False)
        with step.graph.inserting_before(node):
            constant = step.graph.get_attr(name)
        constant.meta.update(node.meta)
        constant.meta[LITERAL] = True
        folded.add(constant)
        replace(node, constant)
        report.changed += 1
        for user in [user for user in constant.users if user.target in _FILLS and user.args[1] is constant]:
            user.target, user.args = _FILLS[user.target], (user.args[0], value.item())
    report.summary = f"{report.changed} literals evaluated once"
