"""Each attention by one backend, forward and backward together: the fastest that was measured.

Matches: ``_scaled_dot_product_{cudnn,flash,efficient}_attention`` and the backwards that read its results; in a
forecast, which has a CPU's graph, ``_scaled_dot_product_flash_attention_for_cpu``. Before -> after:

    cudnn_attention(q, k, v)            flash4_attention(q, k, v)
    cudnn_attention_backward(dy, ..)    flash4_attention_backward(dy, ..)

and so from any to any of the backends in `backends`. Which one torch took while the step was traced is in the graph.
FlexAttention (see `flex`) also takes a mask that the graph alone determines and that is a band, causal or a window, and
one of booleans that each step makes, as of packed documents: ``auto`` gives it masks of which it skips much.
Else ``auto`` compares figures (`costs.attention`); where what torch took was not measured for the case, it stays. A
named backend is taken for all, or the capture fails with the first attention that it does not take.
FlashAttention 2 and cuDNN read queries, keys and values in place: a copy that only attention reads is removed.
Tier numerics: another kernel sums in another order. Preconditions: bf16 or fp16 (flex: fp32 too), no mask (flex: a
band or booleans), no dropout (another kernel would draw other numbers). What stays is listed with its reason.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from stepgraph.costs.attention import Backend
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import argument, getitem_users
from stepgraph.graph.provenance import provenance
from stepgraph.graph.step_graph import StepGraph
from stepgraph.kernels.attention import installed
from stepgraph.passes.attention.backends import BACKENDS, REPEATS, backward_nodes, forward_nodes, odd_rows
from stepgraph.passes.attention.decide import AttentionOptions, Decision, decide, refused
from stepgraph.passes.attention.flex import FlexNodes
from stepgraph.passes.attention.mask import Masks
from stepgraph.passes.attention.nodes import BACKWARD, copied_from, take_place
from stepgraph.passes.contract import PassReport, register
from stepgraph.passes.target import Target

aten, higher_order = torch.ops.aten, torch.ops.higher_order

#: Attention that is no choice of this pass: who chose it.
_OTHERS = {
    aten._flash_attention_forward.default: "flash2, as a window",
    higher_order.flex_attention: "flex, as the model or fuse_attention calls it",
}

#: Modules that a note names.
_NAMES = 4


def _for_target(options: AttentionOptions, target: Target) -> AttentionOptions:
    if target.device != "cuda":
        return options
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return replace(
        options, capability=target.capability, deterministic=strict, installed=installed(), simulated=target.simulated
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
        else {
            "backend": options.attention,
            "lengths_vary": options.any_length and options.inductor != "off",
            "compiled": options.compiles_attention,
        }
    ),
    for_target=_for_target,
)
def attention(step: StepGraph, options: AttentionOptions, report: PassReport) -> None:
    """Run each attention by the fastest backend that was measured, or by the one that was asked for."""
    masks = Masks(step.graph)
    flex = FlexNodes(step, masks)
    decisions = [decide(node, masks, options) for node in step.graph.nodes if node.target in BACKWARD]
    others = [node for node in step.graph.nodes if node.target in _OTHERS]
    report.matched = len(decisions) + len(others)
    if options.backend != "auto":
        _refuse(decisions, others, masks, options)
    aliases = Aliases(step.graph)
    lying = {d.node: _lying(d, aliases) for d in decisions if d.backend in ("cudnn", "flash2")}
    for decision in decisions:
        instead = lying.get(decision.node, {})
        if decision.changes or instead:
            _rewrite(decision, flex, options, instead)
            report.changed += decision.changes
    by_backend = Counter([*(d.backend for d in decisions), *(_OTHERS[node.target] for node in others)])
    counts = ", ".join(f"{count} by {backend}" for backend, count in by_backend.items())
    report.summary = f"{report.matched} attentions, {report.changed} changed: {counts}" if counts else "no attention"
    report.notes += _notes(decisions, others)
    if saved := sum(map(len, lying.values())):
        report.notes.append(f"{saved} of their inputs are read in place, without a copy")
    if not report.matched and options.backend != "auto":
        report.notes.append("nothing to run by it: torch decomposes attention that none of its kernels takes")


def _refuse(decisions: list[Decision], others: list[fx.Node], masks: Masks, options: AttentionOptions) -> None:
    """``ValueError`` where the backend that was asked for does not take an attention."""
    asked, fix = options.backend, "give one of these"
    left = [(d.node, f"{d.case}: {d.refused}") for d in decisions if d.refused is not None]
    left += [(n, f"it runs by {_OTHERS[n.target]}") for n in others if not _OTHERS[n.target].startswith(asked)]
    if not left:
        return

    def takes(backend: Backend, d: Decision) -> bool:
        return d.captured == backend or refused(backend, d, masks, options) is None

    able = [b for b in BACKENDS if not others and all(takes(b, d) for d in decisions)]
    if asked == "fa4" and options.missing:
        fix += ", or pip install flash-attn-4"
    first, why = left[0]
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    raise ValueError(
        f"attention={asked} does not take {_path(first)}{more}, {why}; allowed for all of this step: "
        f"{', '.join(['auto', 'eager', *able])}: {fix}"
    )


def _lying(decision: Decision, aliases: Aliases) -> dict[fx.Node, fx.Node]:
    """Copies that only this attention reads -> what they were copied from, if a kernel takes its strides, nothing
    writes it before backward, and no more memory is kept for backward.

    Models of transformers append keys and values to an empty cache (``cat``), and many make them contiguous.
    """
    found = decision.attention
    if isinstance(found, str) or found.mask is not None:
        return {}
    readers = {found.forward, *found.backwards}
    until = max(aliases.position[reader] for reader in readers)
    inputs = dict.fromkeys(argument(found.forward, name) for name in ("query", "key", "value"))
    sources = {}
    for copy in inputs:
        source, made = copied_from(copy), copy.meta["val"]
        if source is None or not set(copy.users) <= readers or aliases.written_between(copy, 0, until):
            continue
        root, value = aliases.root(source), source.meta["val"]
        held = value.untyped_storage().nbytes() <= made.nbytes or root in {
            aliases.root(other) for other in inputs if other is not copy
        }
        written = aliases.written_between(source, aliases.position[copy], until)
        if held and not written and not odd_rows(value):
            sources[copy] = source
    return sources


def _rewrite(
    decision: Decision, flex: FlexNodes, options: AttentionOptions, instead: Mapping[fx.Node, fx.Node]
) -> None:
    """Replace the nodes by the nodes of the chosen backend, which read other inputs ``instead``."""
    found, backend, seen = decision.attention, decision.backend, decision.seen
    forward = found.forward
    causal, scale = bool(argument(forward, "is_causal")), argument(forward, "scale")
    inputs = [instead.get(n, n) for n in (argument(forward, name) for name in ("query", "key", "value"))]
    build = Builder(forward, before=forward)
    if backend == "flex":
        out, *saved = flex.forward(build, inputs, seen, scale)
    else:
        out, *saved = forward_nodes(backend, build, inputs, causal, scale, bool(found.backwards))
    for backward in found.backwards:
        build = Builder(backward, before=backward)
        mine = [instead.get(n, n) for n in (argument(backward, name) for name in ("query", "key", "value"))]
        grad, kept = backward.args[0], (out, *saved)
        if backend == "flex":
            grads = flex.backward(build, grad, mine, kept, seen, scale)
        else:
            grads = backward_nodes(backend, build, grad, mine, kept, causal, scale, options.deterministic)
        for i, old in getitem_users(backward).items():
            if i < 3:
                take_place(old, grads[i])
        erase_unread(*getitem_users(backward).values())
        erase_unread(*(grad for grad in grads if not grad.users))
    if 0 in getitem_users(forward):
        take_place(getitem_users(forward)[0], out)
    erase_unread(*getitem_users(forward).values())


def _notes(decisions: list[Decision], others: list[fx.Node]) -> list[str]:
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
