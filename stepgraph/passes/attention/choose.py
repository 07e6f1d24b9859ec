"""Each attention by one backend, forward and backward together: the fastest that was measured.

Matches: ``_scaled_dot_product_{cudnn,flash,efficient}_attention`` and the backwards that read its results; in a
forecast, which has a CPU's graph, ``_scaled_dot_product_flash_attention_for_cpu``. Before -> after:

    cudnn_attention(q, k, v)            flash4_attention(q, k, v)
    cudnn_attention_backward(dy, ..)    flash4_attention_backward(dy, ..)

and likewise between any two of the backends in `backends`. The graph shows which one torch took while the step was
traced.
FlexAttention (see `flex`) also takes a mask that the graph determines and that is a band, causal or a window, and one
of booleans that each step makes, as of packed documents: ``auto`` uses it where it can skip much of the mask. Otherwise
``auto`` compares measured times (`costs.attention`); if torch's choice was not measured for a case, it stays. A named
backend is used for all, or the capture fails at the first attention that it does not support.
FlashAttention 2 and cuDNN read queries, keys and values in place: a copy that only attention reads is removed.
Tier numerics: another kernel sums in another order. Preconditions: bf16 or fp16 (flex: fp32 too), no mask (flex: a band
or booleans), no dropout (another kernel would draw other numbers). The report lists what stays, with the reason.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from stepgraph.costs.attention import Backend, Case, case_of, seconds
from stepgraph.costs.hardware import ASSUMED
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread, take_place
from stepgraph.graph.facts import argument, getitem_users
from stepgraph.graph.provenance import provenance
from stepgraph.kernels.attention import installed, unavailable
from stepgraph.passes.attention import backends
from stepgraph.passes.attention.flex import FlexNodes, visited
from stepgraph.passes.attention.mask import Band, Masks, Pairs
from stepgraph.passes.attention.nodes import BACKWARD, Attention, attention_of, copied_from, odd_scale
from stepgraph.passes.contract import PassReport, StepGraph, Target, register

aten, higher_order = torch.ops.aten, torch.ops.higher_order

#: What runs an operator, as the report names it.
_CAPTURED = {
    aten._scaled_dot_product_cudnn_attention.default: "cudnn",
    aten._scaled_dot_product_flash_attention.default: "flash2",
    aten._scaled_dot_product_efficient_attention.default: "efficient",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "cpu",
}

#: Queries from which on, and the share of the scores up to which, FlexAttention is named for what it skips: a causal
#: mask leaves 56% of the blocks of 1,024 queries.
_LONG, _MOST = 1024, 0.6


@dataclass(frozen=True)
class AttentionOptions:
    """``backend``: of every attention, or ``auto``. ``lengths_vary``: compiled pieces are to serve any length of a
    batch, so that the choice may not depend on it. ``compiled``: Inductor compiles attention. The rest is completed by
    the target. ``capability``: the GPU's compute capability, None where unknown. ``deterministic``: backward must
    repeat itself bit for bit. ``installed``: flash-attn-4 is. ``simulated``: there is no GPU, and the graph is a
    CPU's."""

    backend: Literal["auto", "cudnn", "flash2", "fa4", "flex"] = "auto"
    lengths_vary: bool = False
    compiled: bool = True
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


@dataclass(frozen=True)
class Decision:
    """What becomes of the attention of ``node``, now by ``captured``. ``attention``: its nodes, or why they cannot be
    rewritten. ``seen``: the keys that each query sees, None where the backend need not know. ``refused``: why a named
    backend does not take it."""

    node: fx.Node
    case: Case
    captured: str
    attention: Attention | str
    backend: str
    why: str
    seen: Band | Pairs | None = None
    refused: str | None = None

    @property
    def changes(self) -> bool:
        return self.backend != self.captured


def decide(node: fx.Node, masks: Masks, options: AttentionOptions) -> Decision:
    """What becomes of the attention of the forward ``node``, whose mask is one of ``masks``."""
    case, captured, found = case_of(node), _CAPTURED[node.target], attention_of(node)
    stays = Decision(node, case, captured, found, captured, "")
    if captured == "cpu" and argument(node, "value").target is aten.constant_pad_nd.default:
        return replace(stays, why="its values are padded only for the CPU, which takes one width")
    if options.backend == captured:
        return replace(stays, why="asked for, torch's choice")
    if options.backend != "auto":
        why = refused(options.backend, stays, masks, options)
        if why is not None:
            return replace(stays, refused=why)
        return _by(options.backend, "asked for", stays, masks)
    if isinstance(found, str):
        return replace(stays, why=f"torch's choice: {found}")
    refusals = {b: refused(b, stays, masks, options) for b in backends.BACKENDS if b != captured}
    able = [b for b in backends.BACKENDS if b not in refusals or refusals[b] is None]
    if captured in backends.BACKENDS:
        base = captured
    else:  # torch chose it for a mask that is gone, or has not chosen yet
        base = next((b for b in backends.torch_order(options.capability) if b in able), captured)
    if base not in backends.BACKENDS:
        why = f"torch's choice: {refusals[backends.torch_order(options.capability)[0]]}"
        if case.masked and "flex" in able:
            why += _advice(case, masks, masks.seen(node), options)
        return replace(stays, why=why)
    backend, why = fastest(case, base, able, bool(found.backwards), options)
    return _by(backend, why, stays, masks)


def _by(backend: Backend, why: str, stays: Decision, masks: Masks) -> Decision:
    seen = masks.seen(stays.node) if backend == "flex" else None
    return replace(stays, backend=backend, why=why, seen=seen)


def _advice(case: Case, masks: Masks, seen: Band | Pairs, options: AttentionOptions) -> str:
    """What FlexAttention would skip of a mask that other kernels get as numbers, of which they compute every score.

    It should be the faster one then, and is named, not taken: it was not measured. Not in fp32, where its products run
    without tensor cores.
    """
    share = visited(seen if isinstance(seen, Band) else masks.within(seen), case.queries, case.keys)
    if options.lengths_vary or case.dtype is torch.float32 or case.queries < _LONG or share > _MOST:
        return ""
    return f"; attention=flex would visit at most {share:.0%} of the scores"


def fastest(
    case: Case, base: Backend, able: list[Backend], backward: bool, options: AttentionOptions
) -> tuple[Backend, str]:
    """(the fastest of ``able`` by figures, why); ``base``, which torch takes, where that has none."""
    if options.deterministic:
        return base, "torch's order: no backend was measured under deterministic algorithms"
    if options.lengths_vary:
        return base, "torch's order, which is the same for every length of a batch"
    costs = {}
    if options.capability == ASSUMED.capability:
        known = {b: seconds(b, case, ASSUMED, backward=backward) for b in backends.BACKENDS}
        costs = {
            b: s for b, s in known.items() if s is not None and backends.refusal(b, case, options.capability) is None
        }
    if base not in costs:
        return base, f"torch's order: {base} was not measured for the like of it"
    backend = min((b for b in able if b in costs), key=lambda b: (costs[b], b != base))
    others = [f"{b} {1e3 * costs[b]:.2f}" for b in costs if b != backend and b in able]
    why = f"{1e3 * costs[backend]:.2f} ms by figures of an {ASSUMED.name}" + "".join(f", {other}" for other in others)
    if "fa4" not in able and options.missing and costs.get("fa4", costs[backend]) < costs[backend]:
        why += f"; fa4 would take {1e3 * costs['fa4']:.2f}, but {options.missing}"
    return backend, why


def refused(backend: Backend, decision: Decision, masks: Masks, options: AttentionOptions) -> str | None:
    """Why the attention of ``decision``, captured by another backend, cannot be run by ``backend``; or None."""
    node, case, found = decision.node, decision.case, decision.attention
    if backend == "fa4" and options.missing:
        return options.missing
    if backend == "flex" and not options.compiled:
        return "FlexAttention's kernels are Inductor's, which does not compile this step"
    if isinstance(found, str):
        return found
    why = None if backend == "flex" else odd_scale(node)
    why = why or backends.refusal(backend, case, options.capability, options.deterministic)
    if why is None and backend == "flex" and isinstance(seen := masks.seen(node), str):
        why = seen
    if why is None and backend == "fa4" and backends.unaligned(node):
        why = "rows of its queries, keys or values share memory, or do not begin at multiples of 16 bytes"
    if why is None and node.meta["val"][0].is_cuda and torch.cuda.is_available() and not options.simulated:
        why = backends.torch_refuses(backend, node, bool(found.backwards))
    return why


#: Attention that this pass does not choose, and who did.
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
        report.notes.append("nothing to replace: torch decomposes attention that none of its kernels supports")


def _refuse(decisions: list[Decision], others: list[fx.Node], masks: Masks, options: AttentionOptions) -> None:
    """``ValueError`` where the backend that was asked for does not take an attention."""
    asked, fix = options.backend, "use one of these"
    left = [(d.node, f"{d.case}: {d.refused}") for d in decisions if d.refused is not None]
    left += [(n, f"it runs by {_OTHERS[n.target]}") for n in others if not _OTHERS[n.target].startswith(asked)]
    if not left:
        return

    def takes(backend: Backend, d: Decision) -> bool:
        return d.captured == backend or refused(backend, d, masks, options) is None

    able = [b for b in backends.BACKENDS if not others and all(takes(b, d) for d in decisions)]
    if asked == "fa4" and options.missing:
        fix += ", or pip install flash-attn-4"
    first, why = left[0]
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    raise ValueError(
        f"attention={asked} does not support {_path(first)}{more}, {why}; allowed for all of this step: "
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
        if held and not written and not backends.odd_rows(value):
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
        out, *saved = backends.forward_nodes(backend, build, inputs, causal, scale, bool(found.backwards))
    for backward in found.backwards:
        build = Builder(backward, before=backward)
        mine = [instead.get(n, n) for n in (argument(backward, name) for name in ("query", "key", "value"))]
        grad, kept = backward.args[0], (out, *saved)
        if backend == "flex":
            grads = flex.backward(build, grad, mine, kept, seen, scale)
        else:
            grads = backends.backward_nodes(backend, build, grad, mine, kept, causal, scale, options.deterministic)
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
    used = dict.fromkeys(d.backend for d in decisions if d.backend in backends.REPEATS)
    return notes + [backends.REPEATS[backend] for backend in used]


def _paths(nodes: Iterable[fx.Node]) -> str:
    paths = list(dict.fromkeys(map(_path, nodes)))
    return ", ".join(paths[:_NAMES]) + (f" and {len(paths) - _NAMES} more" if len(paths) > _NAMES else "")


def _path(node: fx.Node) -> str:
    """The module that attends, the node's name where there is none."""
    found = provenance(node)
    return (found and found.path) or node.name
