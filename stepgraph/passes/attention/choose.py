"""Each attention by one backend, forward and backward together: the fastest of those that were measured.

Matches: ``_scaled_dot_product_{cudnn,flash,efficient}_attention`` and the backwards that read its results; in a
forecast, which has a CPU's graph, ``_scaled_dot_product_flash_attention_for_cpu``. Before -> after:

    cudnn_attention(q, k, v)            flash4_attention(q, k, v)
    cudnn_attention_backward(dy, ..)    flash4_attention_backward(dy, ..)

and so from any to any of the backends in `backends`. Which one torch took while the step was traced is in the graph.
``auto`` compares figures (`costs.attention`); where what torch took was not measured for the case, it stays. A named
backend is taken for all, or the capture fails with the first attention that it does not take.
Tier numerics: another kernel sums in another order. Preconditions: bf16 or fp16, no mask, no dropout (another kernel
would draw other numbers). What stays is listed with its reason.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from stepgraph.costs.attention import Backend, Case, case_of, seconds
from stepgraph.costs.hardware import ASSUMED
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import argument, getitem_users
from stepgraph.graph.provenance import provenance
from stepgraph.graph.step_graph import StepGraph
from stepgraph.kernels.attention import installed, unavailable
from stepgraph.passes.attention.backends import (
    BACKENDS,
    REPEATS,
    backward_nodes,
    forward_nodes,
    refusal,
    torch_order,
    torch_refuses,
    unaligned,
)
from stepgraph.passes.attention.nodes import BACKWARD, Attention, attention_of, take_place
from stepgraph.passes.contract import PassReport, register
from stepgraph.passes.target import Target

aten, higher_order = torch.ops.aten, torch.ops.higher_order

#: What runs an operator, as the report names it.
_CAPTURED = {
    aten._scaled_dot_product_cudnn_attention.default: "cudnn",
    aten._scaled_dot_product_flash_attention.default: "flash2",
    aten._scaled_dot_product_efficient_attention.default: "efficient",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "cpu",
}

#: Attention that is no choice of this pass: who chose it.
_OTHERS = {
    aten._flash_attention_forward.default: "flash2, as a window",
    higher_order.flex_attention: "flex, which the model calls itself",
}

#: Modules that a note names.
_NAMES = 4


@dataclass(frozen=True)
class AttentionOptions:
    """``backend``: of every attention, or ``auto``. ``lengths_vary``: compiled pieces are to serve any length of a
    batch, so that the choice may not depend on it. The rest is completed by the target. ``capability``: the GPU's
    compute capability, None where unknown. ``deterministic``: backward must repeat itself bit for bit. ``installed``:
    flash-attn-4 is. ``simulated``: there is no GPU, and the graph is a CPU's."""

    backend: Literal["auto", "cudnn", "flash2", "fa4"] = "auto"
    lengths_vary: bool = False
    capability: tuple[int, int] | None = None
    deterministic: bool = False
    installed: bool = False
    simulated: bool = False

    @property
    def missing(self) -> str | None:
        """Why ``fa4`` cannot be used, or None. A forecast need not have what the cluster has."""
        if self.simulated:
            return None if self.installed or self.backend == "fa4" else "flash-attn-4 is not installed"
        return unavailable()


def _for_target(options: AttentionOptions, target: Target) -> AttentionOptions:
    if target.device != "cuda":
        return options
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return replace(
        options,
        capability=target.capability,
        deterministic=strict,
        installed=installed(),
        simulated=target.simulated,
    )


@register(
    "attention",
    "numerics",
    options=AttentionOptions(),
    after=("attention_windows",),
    needs_cuda=True,
    from_options=lambda options: (
        None
        if options.attention == "eager"
        else {"backend": options.attention, "lengths_vary": options.any_length and options.inductor != "off"}
    ),
    for_target=_for_target,
)
def attention(step: StepGraph, options: AttentionOptions, report: PassReport) -> None:
    """Run each attention by the fastest backend that was measured, or by the one that was asked for."""
    decisions = [_decide(node, options) for node in step.graph.nodes if node.target in BACKWARD]
    others = [node for node in step.graph.nodes if node.target in _OTHERS]
    report.matched = len(decisions) + len(others)
    if options.backend != "auto":
        _refuse(decisions, others, options)
    for decision in decisions:
        if decision.changes:
            _rewrite(decision, options)
            report.changed += 1
    by_backend = Counter([*(d.backend for d in decisions), *(_OTHERS[node.target] for node in others)])
    counts = ", ".join(f"{count} by {backend}" for backend, count in by_backend.items())
    report.summary = f"{report.matched} attentions, {report.changed} changed: {counts}" if counts else "no attention"
    report.notes += _notes(decisions, others)
    if not report.matched and options.backend != "auto":
        report.notes.append("nothing to run by it: torch takes attention apart that none of its kernels takes")


@dataclass(frozen=True)
class _Decision:
    """What becomes of the attention of ``node``, now by ``captured``. ``attention``: its nodes, or why they cannot be
    rewritten. ``refused``: why a named backend does not take it."""

    node: fx.Node
    case: Case
    captured: str
    attention: Attention | str
    backend: str
    why: str
    refused: str | None = None

    @property
    def changes(self) -> bool:
        return self.backend != self.captured


def _decide(node: fx.Node, options: AttentionOptions) -> _Decision:
    case, captured, found = case_of(node), _CAPTURED[node.target], attention_of(node)
    stays = _Decision(node, case, captured, found, captured, "")
    if captured == "cpu" and argument(node, "value").target is aten.constant_pad_nd.default:
        return replace(stays, why="its values are padded for the CPU alone, where one width is taken")
    if options.backend == captured:
        return replace(stays, why="asked for, as torch chose it")
    if options.backend != "auto":
        why = _refusal(options.backend, node, case, found, options)
        if why is not None:
            return replace(stays, refused=why)
        return replace(stays, backend=options.backend, why="asked for")
    if isinstance(found, str):
        return replace(stays, why=f"as torch chose it: {found}")
    refusals = {b: _refusal(b, node, case, found, options) for b in BACKENDS if b != captured}
    able = [b for b in BACKENDS if b not in refusals or refusals[b] is None]
    if captured in BACKENDS:
        base = captured
    else:  # torch may have taken it for a mask that is gone, or is to choose yet
        base = next((b for b in torch_order(options.capability) if b in able), captured)
    if base not in BACKENDS:
        return replace(stays, why=f"as torch chose it: {refusals[torch_order(options.capability)[0]]}")
    backend, why = _fastest(case, base, able, bool(found.backwards), options)
    return replace(stays, backend=backend, why=why)


def _fastest(
    case: Case, base: Backend, able: list[Backend], backward: bool, options: AttentionOptions
) -> tuple[Backend, str]:
    """(the fastest of ``able`` by figures, why); ``base``, which torch takes, where that has none."""
    if options.deterministic:
        return base, "torch's order: no backend was measured under deterministic algorithms"
    if options.lengths_vary:
        return base, "torch's order, which is the same for every length of a batch"
    costs = {}
    if options.capability == ASSUMED.capability:
        known = {b: seconds(b, case, ASSUMED, backward=backward) for b in BACKENDS}
        costs = {b: s for b, s in known.items() if s is not None and refusal(b, case, options.capability) is None}
    if base not in costs:
        return base, f"torch's order: {base} was not measured for the like of it"
    backend = min((b for b in able if b in costs), key=lambda b: (costs[b], b != base))
    others = [f"{b} {1e3 * costs[b]:.2f}" for b in costs if b != backend and b in able]
    why = f"{1e3 * costs[backend]:.2f} ms by figures of an {ASSUMED.name}" + "".join(f", {other}" for other in others)
    if "fa4" not in able and options.missing and costs.get("fa4", costs[backend]) < costs[backend]:
        why += f"; fa4 would take {1e3 * costs['fa4']:.2f}, but {options.missing}"
    return backend, why


def _refusal(
    backend: Backend, node: fx.Node, case: Case, found: Attention | str, options: AttentionOptions
) -> str | None:
    """Why the attention of ``node`` cannot be run by ``backend``, or None."""
    if backend == "fa4" and options.missing:
        return options.missing
    if isinstance(found, str):
        return found
    why = refusal(backend, case, options.capability, options.deterministic)
    if why is None and backend == "fa4" and unaligned(node):
        why = "rows of its queries, keys or values share memory, or do not begin at multiples of 16 bytes"
    if why is None and node.meta["val"][0].is_cuda and torch.cuda.is_available() and not options.simulated:
        why = torch_refuses(backend, node, bool(found.backwards))
    return why


def _refuse(decisions: list[_Decision], others: list[fx.Node], options: AttentionOptions) -> None:
    """``ValueError`` where the backend that was asked for does not take an attention."""
    asked, fix = options.backend, "give one of these"
    refused = [(d.node, f"{d.case}: {d.refused}") for d in decisions if d.refused is not None]
    refused += [(n, f"it runs by {_OTHERS[n.target]}") for n in others if not _OTHERS[n.target].startswith(asked)]
    if not refused:
        return
    able = [
        b
        for b in BACKENDS
        if not others and all(_CAPTURED[d.node.target] == b or _able(b, d, options) for d in decisions)
    ]
    if asked == "fa4" and options.missing:
        fix += ", or pip install flash-attn-4"
    first, why = refused[0]
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    raise ValueError(
        f"attention={asked} does not take {_path(first)}{more}, {why}; allowed for all of this step: "
        f"{', '.join(['auto', 'eager', *able])}: {fix}"
    )


def _able(backend: Backend, decision: _Decision, options: AttentionOptions) -> bool:
    return _refusal(backend, decision.node, decision.case, decision.attention, options) is None


def _rewrite(decision: _Decision, options: AttentionOptions) -> None:
    """Put the nodes of the chosen backend in the place of those that are there."""
    found, backend = decision.attention, decision.backend
    forward = found.forward
    causal, scale = bool(argument(forward, "is_causal")), argument(forward, "scale")
    inputs = [argument(forward, name) for name in ("query", "key", "value")]
    build = Builder(forward, before=forward)
    out, *saved = forward_nodes(backend, build, inputs, causal, scale, bool(found.backwards))
    for backward in found.backwards:
        build = Builder(backward, before=backward)
        mine = [argument(backward, name) for name in ("query", "key", "value")]
        grads = backward_nodes(
            backend, build, backward.args[0], mine, (out, *saved), causal, scale, options.deterministic
        )
        for i, old in getitem_users(backward).items():
            if i < 3:
                take_place(old, grads[i])
        erase_unread(*getitem_users(backward).values())
        erase_unread(*(grad for grad in grads if not grad.users))
    take_place(getitem_users(forward)[0], out)
    erase_unread(*getitem_users(forward).values())


def _notes(decisions: list[_Decision], others: list[fx.Node]) -> list[str]:
    """A line for each backend, case and reason, and one for each backend about its backward."""
    alike: dict[str, list[fx.Node]] = defaultdict(list)
    for d in decisions:
        was = f" (was {d.captured})" if d.changes else ""
        alike[f"{d.backend}{was}, {d.why}: {d.case}"].append(d.node)
    for node in others:
        alike[f"{_OTHERS[node.target]}, stays"].append(node)
    notes = [f"{text}: {_paths(nodes)}" for text, nodes in alike.items()]
    backends = dict.fromkeys(d.backend for d in decisions if d.backend in REPEATS)
    return notes + [REPEATS[backend] for backend in backends]


def _paths(nodes: Iterable[fx.Node]) -> str:
    paths = list(dict.fromkeys(map(_path, nodes)))
    return ", ".join(paths[:_NAMES]) + (f" and {len(paths) - _NAMES} more" if len(paths) > _NAMES else "")


def _path(node: fx.Node) -> str:
    """The module that attends, the node's name where there is none."""
    found = provenance(node)
    return (found and found.path) or node.name
