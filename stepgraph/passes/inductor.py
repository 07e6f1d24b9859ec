"""Inductor over the whole of forward and backward.

Matches: every operator of the forward, loss and backward phases that Inductor can take. Before -> after: a run of
consecutive operators -> one compiled piece. The optimizer phase stays as it is: its fused kernel is already one
launch, and in place. Tier numerics: fused kernels round differently from eager's. Preconditions: a flat graph; run
last but for CUDA graphs. Random operators keep eager's generator, so the random state advances as in eager.
"""

import time
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture import StepGraph, phase_of
from stepgraph.passes.analysis import is_mutating
from stepgraph.passes.contract import PassReport, register
from stepgraph.passes.expand_optimizer import COMPILE
from stepgraph.passes.fuse_norm import KEEP_EAGER
from stepgraph.passes.partition import Program, describe, needs_host, split
from stepgraph.passes.rematerialize import rematerialize


@dataclass(frozen=True)
class InductorOptions:
    """``max_autotune``: let Inductor time its choices while it compiles (minutes, on a GPU). ``rematerialize``: on a
    GPU, carry the fewest bytes from forward to backward (see `rematerialize`); a CPU would pay for computing again."""

    max_autotune: bool = False
    rematerialize: bool = True


@register("inductor", "numerics", options=InductorOptions(), provides=("compiled",), terminal=True)
def inductor(step: StepGraph, options: InductorOptions, report: PassReport) -> None:
    """Compile forward and backward with Inductor."""
    on_cuda = any(n.meta["val"].is_cuda for n in step.placeholders("parameter"))
    rematerialized = options.rematerialize and on_cuda
    if rematerialized:
        again, before, after = rematerialize(step)
        report.notes.append(
            f"{again} cheap nodes computed again inside backward's kernels; carried from forward to backward "
            f"{after / 2**20:.0f} of {before / 2**20:.0f} MiB"
        )
    left: dict[fx.Node, str] = {}

    def group(node: fx.Node) -> str:
        if phase_of(node) == "optimizer":
            return "compiled optimizer" if node.meta.get(COMPILE) else "optimizer"
        if getattr(node.target, "namespace", "") == "stepgraph" and is_mutating(node):
            return "kernel"
        if node.meta.get(KEEP_EAGER):
            return "eager"
        reason = needs_host(node) if on_cuda else _needs_gpu(node)
        if reason:
            left[node] = reason
            return "eager"
        # Forward is a piece of its own, so that what backward reads is written once and not rebuilt by each reader.
        apart = rematerialized and phase_of(node) == "forward"
        return "compiled forward" if apart else "compiled"

    module = split(step.module, group)
    for node, reason in left.items():
        report.notes.append(f"left to eager: {describe(node)}: {reason}")
    # Inductor takes a graph without autograd for inference and moves each node next to its first reader. Here that
    # would put every weight gradient at the end: activations live longer, and reductions over the same rows part.
    config = {"fallback_random": True, "reorder_for_locality": False}
    if options.max_autotune:
        config |= {"max_autotune": True, "coordinate_descent_tuning": True}
    start = time.perf_counter()
    for name, piece in list(module.named_children()):
        report.matched += len(piece.graph.nodes)
        if not piece.group.startswith("compiled"):
            continue
        compiled = Compiled(piece, config)
        setattr(module, name, compiled)
        report.changed += compiled.size
    module.recompile()
    step.executable = module
    step.runner = Program(module)
    report.compile_s = time.perf_counter() - start
    pieces = sum(isinstance(m, Compiled) for m in module.children())
    report.summary = f"{report.changed} operators in {pieces} compiled piece{'s' * (pieces != 1)}"


def _needs_gpu(node: fx.Node) -> str | None:
    """Why Inductor cannot compile ``node`` for a CPU, or None."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):  # FlexAttention
        return "Inductor compiles its backward for GPUs only"
    return None


class Compiled(torch.nn.Module):
    """One compiled piece. ``size``: operators in it."""

    def __init__(self, piece: fx.GraphModule, config: dict[str, object]):
        super().__init__()
        self.group = piece.group
        self.size = sum(n.op not in ("placeholder", "get_attr", "output") for n in piece.graph.nodes)
        output = piece.graph.output_node()
        self.single = isinstance(output.args[0], fx.Node)
        if self.single:
            output.args = ((output.args[0],),)
            piece.recompile()
        examples = [n.meta["val"] for n in piece.graph.find_nodes(op="placeholder")]
        self.function = compat.inductor_compile(piece, examples, config)

    def forward(self, *args: torch.Tensor) -> object:
        return self.boxed(list(args))

    def boxed(self, args: list[torch.Tensor]) -> object:
        """Run on ``args`` and empty the list: each tensor is let go after its last use."""
        results = self.function(args)
        return results[0] if self.single else results
