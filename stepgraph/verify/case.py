"""The step that is verified, and the result of one run of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.capture.batch import flatten_batch, microbatch, rebuilt
from stepgraph.capture.optimizer.host_state import on_device
from stepgraph.graph.program import StepProgram
from stepgraph.lower import StepSpec
from stepgraph.parallel.ranks import Ranks
from stepgraph.run.bound import BoundStep
from stepgraph.verify.eager import eager_step
from stepgraph.verify.state import Key, State, differences

#: The first call of a step that replays CUDA graphs runs node by node, the second records, the third replays.
CALLS_TO_REPLAY = 3

#: How many units of the last place the loss may be off, by the dtype that a step stores values in. Half precision: what
#: is stored is rounded, here and there at other places. fp32 and fp64: sums are taken in another order; the error of a
#: sum of n terms grows as the root of n, and a loss or a gradient's norm sums up to millions.
ROUNDINGS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 1000, torch.float64: 1000}


@dataclass
class Case:
    """A captured step. ``spec.batch``: what it is verified with. ``bound``: the step's form for that batch."""

    spec: StepSpec
    bound: BoundStep

    @property
    def state(self) -> State:
        """What the step reads and writes."""
        traced = self.bound.traced
        return State(traced.whole or self.spec.model, self.optimizers, self.leaves, traced.generators)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those in the graph."""
        return self.bound.update.optimizers if self.bound.update else ()

    @property
    def leaves(self) -> list[Any]:
        """Those of the batch."""
        return flatten_batch(self.spec.batch)[0]

    def eager(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One eager step: (loss, metrics)."""
        spec, n = self.spec, self.spec.accumulate
        leaves, structure = flatten_batch(spec.batch)
        parts = [rebuilt(spec.batch, [microbatch(leaf, k, n) for leaf in leaves], structure) for k in range(n)]
        # What torch.compile made is captured as what is inside.
        with torch.compiler.set_stance("force_eager"), on_device(self.optimizers):
            options = self.optimizers, spec.max_grad_norm, spec.skip_nonfinite
            options = (*options, spec.placement and spec.placement.layouts)
            return eager_step(spec.model, spec.loss_fn, parts, *options, whole=self.bound.traced.whole)


def calls(program: StepProgram) -> int:
    """How often a step is called until it runs as it will ever after."""
    return CALLS_TO_REPLAY if any(graph.recording is not None for graph in program.graphs.values()) else 1


def outcome(case: Case, run: Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> dict[Key, torch.Tensor]:
    """What one ``run`` of the step gives and leaves, copied to the host."""
    loss, metrics = run()
    found: dict[Key, torch.Tensor] = {("loss", "loss"): loss.detach().to("cpu", copy=True)}
    for name, value in metrics.items():
        found["metric", name] = value.detach().to("cpu", copy=True)
    state = case.state
    found |= state.read()
    random = state.random().states()
    return found | {("random state", name): value for name, value in random.items()}


def differ(eager: dict[Key, torch.Tensor], captured: dict[Key, torch.Tensor]) -> bool:
    """Whether two outcomes differ on any rank: ranks continue together, because the next run communicates."""
    return any(Ranks().gather(lambda: bool(differences(eager, captured))))


def tolerance(program: StepProgram) -> float:
    """How far the loss may be off, as a part of itself, for the coarsest dtype that the step computes in."""
    values = [node.meta.get("val") for graph in program.graphs.values() for node in graph.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)} & ROUNDINGS.keys()
    return max((ROUNDINGS[dtype] * torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
