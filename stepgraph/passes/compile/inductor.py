"""Inductor, over the whole of forward and backward or over tagged regions.

Full. Matches: every operator of the forward, loss and backward phases that Inductor can take, and parameter updates
that `expand_optimizer` wrote out or `fuse_updates` marked. Before -> after: consecutive operators -> one compiled
piece, cut where one of the model's repeated blocks follows another (see `blocks`); pieces of one structure are compiled
once.
Regional. Matches: the regions that `tag_regions` and other passes before tagged. Before -> after: a region -> one
compiled piece, shared by all regions of its structure; every other node stays, bit for bit.
Tier numerics: fused kernels round differently from eager's. Preconditions: a flat graph; only `cuda_graph` may follow.
Collectives keep their order and places: the compiled code issues them, and waits, as the passes before decided.
Random operators keep eager's generator, so the random state advances as in eager. Inductor keeps what it compiled on
disk, under a key of the graph and all options, so that a later run loads it.
"""

import contextlib
import functools
import gc
import math
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture import autocast
from stepgraph.graph import collectives
from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.edit import Builder, replace
from stepgraph.graph.facts import (
    HIDDEN_WRITES,
    argument,
    has_generator,
    is_launch,
    is_mutating,
    is_random,
    is_view,
    packet,
)
from stepgraph.graph.host_copies import RELOAD_END, is_host_copy
from stepgraph.graph.marks import COMPILE, KEEP_EAGER
from stepgraph.graph.partition import describe, needs_host
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import Parameter
from stepgraph.inductor.regional import Compilation, Piece, compile_pieces, note_pieces, region_of, untag
from stepgraph.passes.compile.ahead import Ahead, start_worker
from stepgraph.passes.compile.blocks import consecutive
from stepgraph.passes.compile.gather import gather
from stepgraph.passes.compile.helpers import Helpers, start_helpers
from stepgraph.passes.compile.integers import beyond
from stepgraph.passes.compile.plans import build_plans
from stepgraph.passes.contract import PassReport, register
from stepgraph.passes.target import Target

aten = torch.ops.aten
_INDEX_PUTS = (
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.index_put_.default,
    aten._index_put_impl.default,
)


#: Operators that take no negative positions, or values from 0 to 1 alone, which compiled code would accept.
_CHECKED = (aten.index_select, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_)
_CHECKED += (aten.binary_cross_entropy,)

#: Functions that Inductor computes on a CPU by formulas that lose digits near 0, such as ``exp(x) - 1`` for ``expm1``.
_NEAR_ZERO = (aten.expm1, aten.expm1_, aten.erf, aten.erf_, aten.atanh, aten.atanh_)
_NEAR_ZERO += (aten.elu, aten.elu_, aten.selu, aten.selu_, aten.celu, aten.celu_)

#: Operators that Inductor decomposes into others that give numbers where eager gives NaN.
_WITHOUT_NAN = (aten.softshrink, aten.smooth_l1_loss_backward, aten.logit_backward)

_SHIFTS = (aten.__lshift__, aten.__rshift__, aten.bitwise_left_shift, aten.bitwise_right_shift)
_SHIFTS += (aten.__ilshift__, aten.__irshift__, aten.bitwise_left_shift_, aten.bitwise_right_shift_)

#: Types to which Triton's casts saturate, where eager's wrap or give NaN or infinity.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CAST_TO_FP8 = (torch.float32, torch.bfloat16, torch.float16)
_SATURATING = (*_FP8, torch.int8, torch.uint8, torch.int16)

#: Libraries whose writes in place Inductor knows, or that are never in a piece.
_KNOWN_WRITERS = ("aten", "prims", "stepgraph", "_c10d_functional", autocast.NAMESPACE)


@dataclass(frozen=True)
class InductorOptions:
    """``mode``: compile all, or only the regions that are tagged. ``cut_blocks``: cut between repeated blocks, of which
    there are four or more; without, kernels may span two of them, and the time to compile grows with their number.
    ``any_length``: compile pieces so that they serve batches of any length. ``dry_run``: compile nothing, only note for
    the capture of another length what pieces there are."""

    mode: Literal["full", "regional"] = "full"
    cut_blocks: bool = True
    any_length: bool = False
    dry_run: bool = False


def _start_workers(target: Target) -> None:
    if target.device == "cuda":
        start_helpers()
        compat.start_compile_workers()
        if not compat.triton_interprets():
            start_worker()


@register(
    "inductor",
    "numerics",
    options=InductorOptions(),
    after=("tag_regions", "rematerialize"),
    terminal=True,
    from_options=lambda options: (
        {"mode": options.inductor, "any_length": options.any_length} if options.inductor != "off" else None
    ),
    forecast=False,  # what its kernels move is what `costs.fusion` makes of the graph
    prepare=_start_workers,
)
def inductor(step: StepGraph, options: InductorOptions, report: PassReport) -> None:
    """Compile forward and backward, or regions of them, with Inductor."""
    # Inductor takes a graph without autograd for inference and moves each node next to its first reader. Here that
    # would put every weight gradient at the end: activations live longer, and reductions over the same rows part.
    config = {"fallback_random": True, "reorder_for_locality": False, "triton.autotune_pointwise": False}
    # Where an operator that needs exact strides (our norms) follows products of odd widths, torch 2.11 pads the rows of
    # a buffer for its readers, but not for the kernel that writes it: gradients were wrong.
    config["comprehensive_padding"] = False
    ours = collectives.EXCHANGES
    if any(collectives.operator_of(n) for n in step.graph.nodes):
        from stepgraph.inductor.communication import keep_order  # imports Inductor, which takes seconds

        config |= keep_order(ours, lasting=(collectives.REDUCE_BEGIN, collectives.ROWS_BEGIN))
    guard = None
    if _on_cuda(step):
        from stepgraph.inductor import fusion_guard, tuned_reductions

        guard = fusion_guard()
        config |= (guard | tuned_reductions()).options
    for node in step.calling(aten._efficientzerotensor.default):
        # Tangents of torch.func.jvp: compiled code writes products of them by `out=`, which these refuse.
        replace(node, Builder(node, before=node)(aten.zeros.default, *node.args, **node.kwargs))
    _drop_empty_operands(step.graph)
    _leave_written(step.graph)
    positions = beyond(step.graph)
    for node in [*positions, *_of_negatives(step.graph)]:
        node.meta[KEEP_EAGER] = True
        untag(node)
    (_regional if options.mode == "regional" else _full)(step, options, config, report)
    report.notes += [
        f"left to eager: {describe(n)}: its dtype bounds positions, and Inductor ignores that" for n in positions
    ]
    if guard is not None:
        made, refused = guard.report.allowed(), guard.report.refused()  # what is loaded from disk decides nothing
        if made or refused:
            report.notes.append(f"reductions along rows and columns: {len(made)} fused, {len(refused)} refused")


def _of_negatives(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that read or make views with the negative bit (``z.conj().imag``), which Inductor does not see."""

    def is_negative(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.is_neg()

    return [n for n in graph.nodes if n.op == "call_function" and any(map(is_negative, (n, *n.all_input_nodes)))]


def _drop_empty_operands(graph: fx.Graph) -> None:
    """``cat`` without the empty tensors that it may be given, as by a key-value cache at its first use: Inductor takes
    what is left of a single operand as it is in memory, where ``cat`` writes it again."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        operands = [operand for operand in node.args[0] if operand.meta["val"].shape != (0,)]
        same = all(operand.meta["val"].dtype == node.meta["val"].dtype for operand in operands)
        if len(operands) in (0, len(node.args[0])) or not same:
            continue
        if len(operands) > 1:
            node.update_arg(0, operands)
            continue
        dense = node.meta["val"].is_contiguous()
        layout = torch.contiguous_format if dense else torch.preserve_format
        replace(node, Builder(node, before=node)(aten.clone.default, *operands, memory_format=layout))


def _leave_written(graph: fx.Graph) -> None:
    """Leave to eager what launches of the model's own kernels write, and what `writes_as_custom` does: Inductor may
    make one tensor of two that hold the same, such as two of zeros."""
    aliases = Aliases(graph)
    writers = [node for node in graph.nodes if is_launch(node) or writes_as_custom(node)]
    written = {aliases.root(w) for node in writers for w in written_arguments(node)}
    for node in graph.nodes if written else ():
        if aliases.root(node) in written:
            maker = node.args[0] if node.target is operator.getitem else node
            for one in (node, maker):
                one.meta[KEEP_EAGER] = True
                untag(one)


def _regional(step: StepGraph, options: InductorOptions, config: dict[str, Any], report: PassReport) -> None:
    report.matched = len({region for node in step.graph.nodes if (region := region_of(node))})
    pieces, report.notes = gather(step.graph)
    if not report.matched:
        report.notes.append("no region is tagged: tag_regions, listed before it, looks for them")
    report.changed = sum(len(piece.nodes) for piece in pieces)
    _compile(step, pieces, config, options, report)


def _full(step: StepGraph, options: InductorOptions, config: dict[str, Any], report: PassReport) -> None:
    on_cuda, rematerialized = _on_cuda(step), any(r.name == "rematerialize" and r.skipped is None for r in step.log)
    left: dict[fx.Node, str] = {}
    aliased = _Aliased(step.graph)
    out_of_order = {} if compat.INDUCTOR_DRAWS_IN_ORDER else drawn_out_of_order(step.graph)

    @functools.cache
    def kind(node: fx.Node) -> str | None:
        updates = phase_of(node) == "optimizer"
        if updates and not node.meta.get(COMPILE):
            return None
        namespace = getattr(node.target, "namespace", "")
        if namespace == autocast.NAMESPACE or (namespace == "stepgraph" and is_mutating(node)):
            return None
        if node.meta.get(KEEP_EAGER) or is_launch(node) or is_host_copy(node):
            return None
        reason = (needs_host(node) if on_cuda else _needs_gpu(node)) or adds_in_any_order(node)
        reason = reason or (not updates and aliased(node)) or undeclared_write(node)
        reason = reason or read_before_drawn(node) or takes_sizes_for_scales(node) or counts_past_the_end(node)
        reason = reason or averages_past_the_end(node) or writes_as_custom(node) or rounds_the_quotient(node)
        reason = reason or differs_at_the_ends(node) or differs_on_gpu(node) or out_of_order.get(node)
        if packet(node) in (aten._assert_async, aten._functional_assert_async):
            reason = "Inductor leaves it out"
        if reason:
            left[node] = reason
            return None
        if updates:
            return "optimizer"
        # Forward is a piece of its own, so that what backward reads is written once and not rebuilt by each reader.
        return "forward" if rematerialized and phase_of(node) == "forward" else "step"

    _assert_between_pieces(step, kind)
    pieces = consecutive(step, kind, cut=options.cut_blocks)
    report.notes = [f"left to eager: {describe(node)}: {reason}" for node, reason in left.items()]
    report.matched = sum(1 for _ in step.nodes())
    report.changed = sum(len(piece.nodes) for piece in pieces)
    _compile(step, pieces, config, options, report)


def _assert_between_pieces(step: StepGraph, kind_of: Callable[[fx.Node], str | None]) -> None:
    """Move assertions whose condition nothing else reads to where their piece ends anyway, which they would cut."""
    waiting, before = list[fx.Node](), None
    for node in [*step.nodes(), step.graph.output_node()]:
        if packet(node) is aten._assert_async and len(node.args[0].users) == 1:
            waiting.append(node)
        elif node.target is not operator.getitem:
            kind = None if node.op == "output" else kind_of(node)
            while waiting and (kind is None or kind != before):
                node.prepend(waiting.pop(0))
            before = kind


def _compile(
    step: StepGraph, pieces: list[Piece], config: dict[str, Any], options: InductorOptions, report: PassReport
) -> None:
    if options.dry_run:
        note_pieces(pieces, config)
        return
    ahead = Ahead([step.graph])

    def meanwhile() -> None:
        """What can be done while helpers compile."""
        ahead.start()
        if _on_cuda(step):
            compat.import_inductor()
            build_plans(step.graph)
            gc.collect()  # what tracing left

    try:
        with Helpers() as helpers, _timed(report, helpers):
            result = compile_pieces(
                step.module, pieces, config, any_length=options.any_length, on_first=meanwhile, helpers=helpers
            )
            _summarize(report, pieces, result)
            report.notes += helpers.notes + ahead.finish()
    except KeyboardInterrupt:  # it is answered at once: nothing else is waited for
        ahead.end()
        compat.end_compile_workers()
        raise
    step.executable = result.module


def _summarize(report: PassReport, pieces: list[Piece], result: Compilation) -> None:
    report.summary = (
        f"{report.changed} operators in {len(pieces)} compiled piece{'s' * (len(pieces) != 1)} of "
        f"{len(result.compiled)} structure{'s' * (len(result.compiled) != 1)}"
    )
    if reused := sum(use.reused for use in result.uses):
        report.summary += f", {reused} reused"
    if open_ := sum(use.any_length for use in result.uses):
        report.summary += f", {open_} for any length"
    report.notes += sorted({use.note for use in result.uses if use.note})


def _needs_gpu(node: fx.Node) -> str | None:
    """Why Inductor cannot compile ``node`` for a CPU, or None."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):  # FlexAttention
        return "Inductor compiles its backward for GPUs only"
    if node.target is aten._grouped_mm.default:
        return "Inductor takes grouped products only in bf16, and for a CPU knows another layout of their results"
    if packet(node) in _CHECKED:
        return "Inductor leaves out the check of its values"
    added = node.users and all(user.target is aten.add.Tensor and 1 in user.args for user in node.users)
    if packet(node) in _NEAR_ZERO and not added:  # as in 1 + erf(x) of a GELU, where these digits do not count
        return "Inductor's value of a small number has few correct digits"
    return None


def adds_in_any_order(node: fx.Node) -> str | None:
    """Why two runs of ``node`` would differ if Inductor compiled it, or None. Eager adds in order, except for
    ``index_put`` on a CPU, which adds atomically itself."""
    adds = node.target in (aten.embedding_dense_backward.default, aten.col2im.default) or (
        node.target in _INDEX_PUTS and argument(node, "accumulate") and node.meta["val"].is_cuda
    )
    if not adds or not node.meta["val"].is_floating_point():
        return None
    return "Inductor adds by atomic operations, in another order every time"


def read_before_drawn(node: fx.Node) -> str | None:
    """Why Inductor cannot compile ``node`` correctly, or None. It draws ``bernoulli`` in place, into a buffer
    that one of its kernels makes, and takes for the reader's source what was in the buffer before: where it fuses the
    two, dropout multiplies with uninitialized memory (seen on torch 2.13, on a CPU)."""
    if has_generator(node):
        return "Inductor draws only from default generators"
    if packet(node) not in (aten.bernoulli, aten.bernoulli_):
        return None
    return "Inductor may read the numbers before it draws them"


def drawn_out_of_order(graph: fx.Graph) -> dict[fx.Node, str]:
    """Why Inductor's numbers may not be eager's, for random operators that do not depend on the one before, such as the
    noise and the timesteps of a diffusion model: it may change their order. Of two, one outside of pieces is enough."""
    alone, count, previous = dict[fx.Node, str](), 0, None
    newest: dict[fx.Node, int] = {}  # the number of the last random operator that a node depends on
    for node in graph.nodes:
        newest[node] = max((newest[read] for read in node.all_input_nodes), default=0)
        if is_random(node):
            if newest[node] < count and previous not in alone:
                alone[node] = "Inductor may draw its numbers before others"
            count, previous = count + 1, node
            newest[node] = count
    return alone


def takes_sizes_for_scales(node: fx.Node) -> str | None:
    """Why Inductor's gradient of an interpolation is not eager's, or None. Eager finds the nearest element by the scale
    that it is given, 1.7 for 6 elements made of 4; Inductor by the sizes, 1.5."""
    if node.target is not aten.upsample_nearest2d_backward.default:
        return None
    scales = argument(node, "scales_h"), argument(node, "scales_w")
    sizes = zip(node.args[1][-2:], node.args[2][-2:], scales, strict=True)
    if all(large % small == 0 and scale in (None, large / small) for large, small, scale in sizes):
        return None
    return "Inductor finds the nearest elements by sizes, not by the scale"


def counts_past_the_end(node: fx.Node) -> str | None:
    """Why Inductor's value of a margin loss is not eager's, or None: it adds up what follows a row's last target (-1)
    as if that were targets of class 0."""
    if node.target is not aten.multilabel_margin_loss_forward.default:
        return None
    return "Inductor counts what follows the last target of a row"


def averages_past_the_end(node: fx.Node) -> str | None:
    """Why Inductor's gradient of an average pooling is not eager's, or None: of a window that reaches past the padding
    (``ceil_mode``) it counts other elements. It fails on a stride or padding of one number for all dimensions."""
    if packet(node) not in (aten.avg_pool2d_backward, aten.avg_pool3d_backward):
        return None
    single = any(len(argument(node, name)) == 1 for name in ("kernel_size", "stride", "padding"))
    return "Inductor pools other windows" if single or argument(node, "ceil_mode") else None


def rounds_the_quotient(node: fx.Node) -> str | None:
    """Why Inductor's floor division or remainder of floating-point numbers is not eager's, or None. Eager subtracts the
    remainder first, Inductor rounds the quotient, so that 1 // 0.1 is 10 for 9 and -1 // inf is 0 for -1. Quotients by
    powers of two are exact. On an H200 the remainder of 1e15 by 3 was not below 3."""
    if packet(node) in (aten.remainder, aten.remainder_) and node.meta["val"].is_floating_point():
        return "Inductor subtracts a rounded multiple, which is 0 or not finite where the quotient is large"
    value = node.meta.get("val")
    mode = argument(node, "rounding_mode") if packet(node) in (aten.div, aten.div_) else None
    floor = packet(node) in (aten.floor_divide, aten.floor_divide_) or mode == "floor"
    if not (floor or (mode == "trunc" and value.is_cuda)) or not value.is_floating_point():
        return None
    divisor = node.args[1]
    exact = isinstance(divisor, (int, float)) and abs(math.frexp(divisor)[0]) == 0.5
    return None if exact else "Inductor rounds the quotient, not what is left of it without the remainder"


def differs_at_the_ends(node: fx.Node) -> str | None:
    """Why Inductor's result for NaN, zeros or values of few digits is not eager's, or None."""
    kind, value = packet(node), node.meta.get("val")
    if kind in _WITHOUT_NAN:
        return "Inductor gives a number for NaN"
    if kind in (aten.sgn, aten.sgn_) and value.is_complex():
        return "Inductor gives NaN for 0"
    if kind in (aten.addmm, aten.addmm_) and argument(node, "beta") == 0:
        return "Inductor multiplies by beta=0 a tensor that eager does not read"
    return None


def differs_on_gpu(node: fx.Node) -> str | None:
    """Why Triton's result of ``node`` on a GPU would differ from eager's, or why it has no kernel for it; or None."""
    kind, value = packet(node), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return None
    if kind in _SHIFTS:
        by = node.args[1]
        defined = isinstance(by, int) and 0 <= by < torch.iinfo(value.dtype).bits
        return None if defined else "Triton's shift by as many bits as there are, or more, is not defined"
    if kind is aten.cumprod:
        return "Inductor fails to compile it with the reduction of which it is the gradient"
    if kind is aten._to_copy:
        source, made = node.args[0].meta["val"].dtype, value.dtype
        if {source, made}.intersection(_FP8) and {source, made}.isdisjoint(_CAST_TO_FP8):
            return "Triton has no such cast"
        if source.is_floating_point and made in _SATURATING and not _bounded(node):
            return "Triton saturates values out of range"
    return None


def _bounded(node: fx.Node) -> bool:
    """Whether what is cast was clamped before, to numbers that its new type has."""
    info = (torch.finfo if node.meta["val"].is_floating_point() else torch.iinfo)(node.meta["val"].dtype)
    while is_view(node) or packet(node) in (aten._to_copy, aten.round, aten.floor, aten.ceil, aten.trunc):
        node = node.args[0]
    if packet(node) not in (aten.clamp, aten.hardtanh):
        return False
    names = ("min", "max") if packet(node) is aten.clamp else ("min_val", "max_val")
    bounds = [argument(node, name) for name in names]
    return all(isinstance(bound, (int, float)) and info.min <= bound <= info.max for bound in bounds)


def undeclared_write(node: fx.Node) -> str | None:
    """Why Inductor may move a read of running statistics before what writes them, or None: the operator's schema does
    not say that it does. It writes those of other norms out itself."""
    if node.target not in HIDDEN_WRITES or packet(node) in (aten.native_batch_norm, aten.cudnn_batch_norm):
        return None
    return "its schema does not say what it writes"


def writes_as_custom(node: fx.Node) -> str | None:
    """Why an operator of another library that writes its arguments cannot be in a piece, or None: of a clone and the
    tensor that was cloned Inductor gives it one of them twice (pytorch #198031)."""
    if getattr(node.target, "namespace", "aten") in _KNOWN_WRITERS or not is_mutating(node):
        return None
    return "Inductor may give it one tensor for two that hold the same"


class _Aliased:
    """Why a node cannot be in a piece that others may share, or None: Inductor compiles a write into one input for
    whether another input is a view of it, and an offset into a storage for where its input begins."""

    def __init__(self, graph: fx.Graph):
        aliases = Aliases(graph)
        self.root = aliases.root
        # What was reloaded is read under one name alone.
        views = (n for n in graph.nodes if n.op == "placeholder" or (is_view(n) and n.target is not RELOAD_END))
        self.viewed = {aliases.root(n) for n in views if aliases.root(n) is not n}

    def __call__(self, node: fx.Node) -> str | None:
        if is_mutating(node) and any(self.root(written) in self.viewed for written in written_arguments(node)):
            return "it writes into what a view reads"
        if node.target is aten.as_strided.default and argument(node, "storage_offset") is not None:
            return "it says where in a storage its result begins"
        return None


def _on_cuda(step: StepGraph) -> bool:
    return any(n.meta["val"].is_cuda for n in step.placeholders(Parameter))


@contextlib.contextmanager
def _timed(report: PassReport, helpers: Helpers) -> Iterator[None]:
    """Note the seconds, and at the end of the summary how many pieces Inductor's cache on disk had before helpers
    put theirs there."""
    before = compat.inductor_cache_counts()
    start = time.perf_counter()
    yield
    report.compile_s = time.perf_counter() - start
    loaded, made = (now - then for now, then in zip(compat.inductor_cache_counts(), before, strict=True))
    ahead = min(loaded, helpers.compiled)
    if ahead < helpers.compiled:
        report.notes.append(
            f"{helpers.compiled - ahead} pieces compiled by helpers were not used: their cache keys differ"
        )
    if loaded or made:
        report.summary += f" ({loaded - ahead} of {loaded + made} loaded from disk"
        report.summary += f", {ahead} compiled by helpers)" if ahead else ")"
