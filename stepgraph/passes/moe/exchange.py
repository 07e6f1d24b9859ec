"""Tokens, and gradients of expert results, are sent to experts as packed fp8 rows.

Matches: casts of expert rows to packed ones (`fp8_experts`), where nothing else reads the rows, and what brought them
there. Before -> after, in forward, and in backward for the gradient that `combine` brings:

    cast_packed_rows(gather_rows(x, places, ..))       -> gather_rows(cast_packed_rows(x), places, ..)
    cast_packed_rows(wait_tensor(all_to_all_single(x)))-> wait_tensor(all_to_all_single(cast_packed_rows(x)))
    cast_packed_rows(rows_end(rows_begin(x, ..), ..))  -> rows_end(rows_begin(cast_packed_rows(x), ..), ..)

and so on to where the tokens are, each of which is then cast once and not once for each of its experts. Half the bytes
of an exchange travel, and of what copies rows on a rank. A row's cast reads this row alone, so the experts get the same
bits; only rows that no token fills, which nothing reads, have a scale of zero. Results that `combine` brings back, and
gradients that `dispatch` does, are left unchanged: these are sums' terms.
Tier numerics, as `fp8_experts`, without which it has nothing to do. Preconditions: no other reader of the rows.
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.3, for tokens that are dispatched in fp8.
"""

from collections import Counter

import torch
from torch import fx

from stepgraph.graph.collectives import ALL_TO_ALL, ROWS_END, WAIT, stage_of
from stepgraph.graph.edit import Builder, fake_value, replace
from stepgraph.graph.facts import argument, packet
from stepgraph.graph.provenance import role_of
from stepgraph.passes.contract import PassReport, StepGraph, register

ours = torch.ops.stepgraph
_CAST = ours.cast_packed_rows.default


@register(
    "exchange_fp8", "numerics", after=("fp8_experts",), from_options=lambda options: {} if options.fp8_experts else None
)
def exchange_fp8(step: StepGraph, options: object, report: PassReport) -> None:
    """Cast tokens to fp8 before they are sent to experts."""
    travels: Counter[str] = Counter()
    stays: Counter[str] = Counter()
    for cast in step.calling(_CAST):
        rows, movers, readers = cast.args[0], [], [cast]
        report.matched += bool(_brought(rows))
        while (found := _brought(rows)) and set(rows.users) <= set(readers):
            movers, readers, rows = movers + found, found, found[-1].args[0]
        if movers:
            _move(cast, rows, movers)
            report.changed += 1
            travels.update(role.kind for n in movers if stage_of(n) == "begin" and (role := role_of(n)))
        elif _brought(rows):
            stays.update([", ".join(sorted({str(packet(n)) for n in rows.users if n is not cast}))])
    report.summary = f"{report.changed} of {report.matched} casts of expert rows moved before the exchange"
    if travels:
        kinds = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(travels.items()))
        report.summary += f"; exchanges in fp8: {kinds}"
    report.notes += [f"{count} stay after the exchange: {why} reads the rows too" for why, count in stays.items()]


def _brought(rows: fx.Node) -> list[fx.Node]:
    """The nodes, last first, that bring ``rows`` unchanged from the first argument of the last of them; or none."""
    if rows.target is ours.gather_rows.default or _is_gradient_of_gather(rows):
        return [rows]
    if rows.target is WAIT and rows.args[0].target is ALL_TO_ALL:
        return [rows, rows.args[0]]
    return [rows, rows.args[0]] if rows.target is ROWS_END else []


def _is_gradient_of_gather(node: fx.Node) -> bool:
    """Whether the node adds up one row for each of its own, which copies it: the gradient of `gather_rows`."""
    if node.target is not ours.combine_rows.default:
        return False
    places, weights, order = (argument(node, name) for name in ("places", "weights", "order"))
    return weights is None and order is not None and places.meta["val"].shape[1] == 1


def _move(cast: fx.Node, source: fx.Node, movers: list[fx.Node]) -> None:
    """``movers``, last first, bring ``source`` to ``cast``: they bring its cast instead."""
    packed = Builder(cast, before=movers[-1])(_CAST, source)
    for node in reversed(movers):
        node.replace_input_with(source, packed)
        if _is_gradient_of_gather(node):  # which sums in fp32: a copy in the other direction does not
            build, (rows, places, _, order) = Builder(node, before=node), node.args
            R, N = (n.meta["val"].shape[0] for n in (order, places))
            replace(node, build(ours.gather_rows.default, rows, build.view(order, (R, 1)), build.view(places, (N,)), N))
        else:
            node.meta["val"] = fake_value(node)
    replace(cast, cast.args[0])
