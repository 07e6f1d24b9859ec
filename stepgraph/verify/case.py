"""The step that is verified, the plain loop that it must equal, and the result of one run of either."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.capture.batch import flatten_batch, microbatch, rebuilt
from stepgraph.capture.optimizer.host_state import on_device
from stepgraph.capture.python.end_of_step import end_of_step
from stepgraph.capture.python.metrics import collected, means
from stepgraph.graph.program import StepProgram
from stepgraph.lower import StepSpec
from stepgraph.parallel.layout import Layout
from stepgraph.parallel.ranks import Ranks
from stepgraph.run.bound import BoundStep
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
        """The tensors that the step reads and writes."""
        traced = self.bound.traced
        return State(traced.whole or self.spec.model, self.optimizers, self.leaves, traced.generators)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers in the graph."""
        return self.bound.update.optimizers if self.bound.update else ()

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the batch."""
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


def eager_step(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    microbatches: list[Any],
    optimizers: Sequence[torch.optim.Optimizer],
    max_grad_norm: float | None,
    skip_nonfinite: bool = False,
    layouts: Mapping[str, Layout] | None = None,
    whole: nn.Module | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics by name) of forward, backward, clipping, update and what modules do after it.

    ``layouts``: of a model over ranks, by the names of its parameters. ``whole``: the model with modules outside of it
    whose parameters get gradients too, which are not clipped unless an optimizer has them.

    ``skip_nonfinite``: parameters, buffers and optimizer state stay as they were where loss or norm is not finite.

    Clipping and the update use the gradients of this step only. Gradients of parameters without an optimizer are added
    to ``param.grad``; for all others, ``param.grad`` is restored.
    """
    whole = whole or model
    params = [p for p in whole.parameters() if p.requires_grad]
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    own = owned | {id(p) for p in model.parameters()}
    before = [p.grad for p in params]
    for param in params:
        param.grad = None
    n, total, metrics = len(microbatches), None, {}
    reported: dict[str, list[torch.Tensor]] = {}
    kept = [(t, t.detach().clone()) for t in (*whole.parameters(), *whole.buffers())] if skip_nonfinite else []
    with torch.enable_grad():
        for microbatch in microbatches:
            with collected() as found:
                loss = loss_fn(model, microbatch)
            for name, value in found.items():
                reported.setdefault(name, []).append(value)
            loss = loss / n if n > 1 else loss
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
    if max_grad_norm is not None:
        metrics["grad_norm"] = _clip([p for p in params if p.grad is not None and id(p) in own], max_grad_norm)
    if skip_nonfinite:
        metrics["skipped"] = ~torch.isfinite(torch.stack([total, metrics["grad_norm"]])).all()
    skipped = skip_nonfinite and bool(metrics["skipped"])
    placed = {id(p): layouts[name] for name, p in model.named_parameters() if layouts}
    for optimizer in optimizers if not skipped else ():
        with compat.muon_replaced(partial(_whole_muon, placed)):
            _step(optimizer)
    if optimizers:
        metrics |= end_of_step(model)
    with torch.no_grad():
        for tensor, value in kept if skipped else ():
            tensor.copy_(value)
        for param, old in zip(params, before, strict=True):
            if id(param) in owned or param.grad is None:
                param.grad = old
            elif old is not None:
                param.grad = old.add_(param.grad)
    return total, metrics | means(reported)


def _step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, with the parameters of each mesh in a group of their own: torch's kernels for many tensors
    take no others. Parameters of experts lie on another mesh than the rest."""
    groups, split = optimizer.param_groups, []
    for group in groups:
        by_mesh: dict[Any, list[torch.Tensor]] = {}
        for param in group["params"]:
            by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
        split += [group | {"params": params} for params in by_mesh.values()]
    optimizer.param_groups = split
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def _whole_muon(
    placed: Mapping[int, Layout],
    plain: Callable,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momenta: list[torch.Tensor],
    **options: Any,
) -> None:
    """torch's ``muon`` of whole matrices, as one process has them; every rank keeps its part."""
    for param, grad, momentum in zip(params, grads, momenta, strict=True):
        layout = placed.get(id(param))
        if layout is None:
            plain([param], [grad], [momentum], **options)
            continue
        whole = [layout.without_padding(t.detach()).full_tensor().clone() for t in (param, grad, momentum)]
        plain(*([t] for t in whole), **options)
        for stored, found in ((param, whole[0]), (momentum, whole[2])):
            layout.own(stored.to_local()).copy_(layout.cut(found))


def _clip(params: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip as ``torch.nn.utils.clip_grad_norm_`` does; over the meshes of DTensors, as a captured step does."""
    if not any(map(compat.is_traceable_wrapper_subclass, params)):
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    local = {i: gradients.local(p.grad, p) for i, p in enumerate(params)}
    with torch.no_grad():
        clipped, norm = gradients.clip(local, params, max_norm)
        for i, grad in local.items():
            grad.copy_(clipped[i])
    return norm
