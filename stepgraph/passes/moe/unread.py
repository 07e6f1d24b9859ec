"""Unused rows of expert buffers are not zeroed if nothing reads them.

Matches: rows of experts with the offsets that they end at, where all readers stop at the same offsets. Readers that do:
a grouped product or SwiGLU of these offsets, and an exchange that sends the rows that `expert_places` filled. Before ->
after, where rows past the last offset were zero and now hold anything:

    grouped_mm(rows, weight, offsets)              -> grouped_mm(rows, weight, offsets, zero_rest=False)
    swiglu_rows, swiglu_rows_backward              -> likewise
    rows_end(token, x, back, ..)                   -> rows_end(token, x, back, .., zero_rest=False)

With `--expert-capacity 2` half of a buffer's rows are such zeros, written by each of the eight.
Tier exact: no value that anything reads is another one. Preconditions: the same node gives the offsets of both, or one
`expert_places` the offsets and where rows go to and come from; no other reader.
Source: own.
"""

import operator

import torch
from torch import fx

from stepgraph.graph.collectives import ROWS_BEGIN, ROWS_END
from stepgraph.graph.facts import argument, getitem_users
from stepgraph.passes.contract import PassReport, StepGraph, register

ours = torch.ops.stepgraph

#: What works on expert rows up to the last of ``offsets``: which of its arguments are rows.
_ROWS = {
    ours.grouped_mm.default: ("rows",),
    ours.grouped_mm_weight.default: ("rows", "dy"),
    ours.swiglu_rows.default: ("gate_up",),
    ours.swiglu_rows_backward.default: ("dy", "gate_up"),
}
_WRITERS = (*(target for target in _ROWS if target is not ours.grouped_mm_weight.default), ROWS_END)
#: Results of `expert_places`: where each of the expert rows comes from, and where each expert's rows end.
_BACK, _ENDS = 1, 2


@register("unread_rows", "exact", after=("expert_swiglu",))
def unread_rows(step: StepGraph, options: object, report: PassReport) -> None:
    """Leave rows of experts' buffers that no token fills unwritten, where nothing reads them."""
    for target in _WRITERS:
        for node in step.calling(target):
            offsets = _offsets(node)
            if offsets is None:
                continue
            report.matched += 1
            if all(_stops(reader, node, offsets) for reader in node.users):
                node.kwargs = {**node.kwargs, "zero_rest": False}
                report.changed += 1
    report.summary = (
        f"{report.changed} of {report.matched} buffers of expert rows left unzeroed where nothing reads them"
    )


def _offsets(node: fx.Node) -> fx.Node | None:
    """Where the rows end that ``node`` gives; None where they are a token's, all of which are in use."""
    if node.target is not ROWS_END:
        return argument(node, "offsets")
    came = argument(node, "came")
    return getitem_users(came.args[0]).get(_ENDS) if _is_result(came, _BACK) else None


def _stops(reader: fx.Node, rows: fx.Node, offsets: fx.Node) -> bool:
    """Whether ``reader`` reads nothing of ``rows`` past the last of ``offsets``."""
    given = {parameter.name for parameter in _parameters(reader) if argument(reader, parameter.name) is rows}
    if reader.target in _ROWS:
        return argument(reader, "offsets") is offsets and given <= set(_ROWS[reader.target])
    if reader.target is ROWS_END:
        return given == {"x"}  # only the form of the received rows, no value
    if reader.target is not ROWS_BEGIN or given != {"x"} or argument(reader, "order") is not None:
        return False
    to = argument(reader, "to")
    return _is_result(to, _BACK) and _is_result(offsets, _ENDS) and to.args[0] is offsets.args[0]


def _parameters(node: fx.Node) -> list:
    return node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else []


def _is_result(node: fx.Node, index: int) -> bool:
    """Whether ``node`` is that result of `expert_places`."""
    return (
        node.target is operator.getitem and node.args[1] == index and node.args[0].target is ours.expert_places.default
    )
