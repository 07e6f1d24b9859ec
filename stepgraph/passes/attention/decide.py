"""Which backend runs an attention: the one asked for, or the fastest measured one that takes it."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from stepgraph.costs.attention import Backend, Case, case_of, seconds
from stepgraph.costs.hardware import ASSUMED
from stepgraph.graph.facts import argument
from stepgraph.kernels.attention import unavailable
from stepgraph.passes.attention.backends import BACKENDS, refusal, torch_order, torch_refuses, unaligned
from stepgraph.passes.attention.flex import visited
from stepgraph.passes.attention.mask import Band, Masks, Pairs
from stepgraph.passes.attention.nodes import Attention, attention_of, odd_scale

aten = torch.ops.aten

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
        return replace(stays, why="its values are padded for the CPU alone, where one width is taken")
    if options.backend == captured:
        return replace(stays, why="asked for, as torch chose it")
    if options.backend != "auto":
        why = refused(options.backend, stays, masks, options)
        if why is not None:
            return replace(stays, refused=why)
        return _by(options.backend, "asked for", stays, masks)
    if isinstance(found, str):
        return replace(stays, why=f"as torch chose it: {found}")
    refusals = {b: refused(b, stays, masks, options) for b in BACKENDS if b != captured}
    able = [b for b in BACKENDS if b not in refusals or refusals[b] is None]
    if captured in BACKENDS:
        base = captured
    else:  # torch may have taken it for a mask that is gone, or is to choose yet
        base = next((b for b in torch_order(options.capability) if b in able), captured)
    if base not in BACKENDS:
        why = f"as torch chose it: {refusals[torch_order(options.capability)[0]]}"
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
    why = why or refusal(backend, case, options.capability, options.deterministic)
    if why is None and backend == "flex" and isinstance(seen := masks.seen(node), str):
        why = seen
    if why is None and backend == "fa4" and unaligned(node):
        why = "rows of its queries, keys or values share memory, or do not begin at multiples of 16 bytes"
    if why is None and node.meta["val"][0].is_cuda and torch.cuda.is_available() and not options.simulated:
        why = torch_refuses(backend, node, bool(found.backwards))
    return why
