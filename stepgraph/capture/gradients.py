"""Gradients as ``backward()`` leaves them: their layout, their clipping, and where they land.

``torch.autograd.grad`` hands out what autograd computed: it may be expanded, laid out in another order than the
parameter, or one tensor for two parameters. ``backward()`` puts that in order when it accumulates, and the order of
memory decides the rounding of norms and what the fused optimizer kernels, which read memory linearly, make of it.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.capture.state import Slot, Wrapping, wrap
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import Accumulator


class AllStages(NamedTuple):
    """The parameters of all stages of a pipeline, in the order of the model. ``counted``: for each, the index of its
    gradient, or None where another rank counts it. ``group``: the ranks of the pipeline."""

    params: Sequence[torch.Tensor]
    counted: Sequence[int | None]
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Share:
    """A rank's share of a model whose stages other ranks have too.

    ``holders``: for each parameter, by name, the ranks of the pipeline that hold it; the first counts its norm.
    ``rank``: this one. ``group``: the ranks of the pipeline. ``tied``: the group of each set of several holders.
    """

    holders: Mapping[str, tuple[int, ...]]
    rank: int
    group: dist.ProcessGroup
    tied: Mapping[tuple[int, ...], dist.ProcessGroup]

    def holds(self, name: str) -> bool:
        """Whether this rank holds the parameter ``name``, and updates it."""
        return self.rank in self.holders[name]

    def whole(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of ``name``, of which ``grad`` is what this rank's stages give: summed over its holders."""
        holders = self.holders[name]
        return compat.all_reduce(grad, "sum", self.tied[holders]) if len(holders) > 1 else grad

    def all_stages(self, slots: Sequence[Slot], reached: Sequence[int]) -> AllStages:
        """``reached``: the model's ``slots`` that have gradients on any rank."""
        counted = [i if self.holders[slots[i].name][0] == self.rank else None for i in reached]
        return AllStages([slots[i].tensor for i in reached], counted, self.group)


def clip(
    grads: dict[int, torch.Tensor], params: Sequence[torch.Tensor], max_norm: float, stages: AllStages | None = None
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Scale gradients to a total 2-norm of at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    ``grads``: local tensors, by index into ``params``. Of parameters that are DTensors, each rank has its shards: their
    norm is that over all of their own mesh, by one all-reduce for each mesh. A plain parameter's gradient counts as it
    is: ranks that clip together hold the same one.

    With ``stages`` the norm is that of all stages of a pipeline, summed in the order of one rank that has them all.
    """
    values = list(grads.values())
    if not values:
        raise CaptureError(
            f"the loss reaches no parameter of the model, and max_grad_norm={max_norm:g} has no gradient to clip; look "
            "for detach, no_grad and copies of parameters (stack_module_state, functional_call) in the loss"
        )
    on_cuda = all(g.device.type == "cuda" for g in values)
    norm = _total_norm(grads, params, on_cuda, stages)
    limit = max_norm.to(norm) if isinstance(max_norm, torch.Tensor) else max_norm
    scale = torch.clamp((norm + 1e-6).reciprocal() * limit, max=1.0)  # as a number is divided by a tensor
    if on_cuda:
        clipped = torch.ops.aten._foreach_mul.Tensor(values, scale)
    else:
        clipped = [(g * scale).to(g.dtype) for g in values]
    return dict(zip(grads, clipped, strict=True)), norm


def _total_norm(
    grads: dict[int, torch.Tensor], params: Sequence[torch.Tensor], on_cuda: bool, stages: AllStages | None
) -> torch.Tensor:
    members = [(params[i], grad) for i, grad in grads.items()]
    if stages is not None:
        members = [(p, None if i is None else grads[i]) for p, i in zip(stages.params, stages.counted, strict=True)]
    by_mesh: dict[Any, dict[int, list[torch.Tensor | None]]] = {}
    for param, grad in members:
        mesh, copies = _mesh_and_copies(param)
        by_mesh.setdefault(mesh, {}).setdefault(copies, []).append(grad)
    across = [stages.group] if stages is not None else []
    like = next(iter(grads.values()))
    if by_mesh.keys() <= {None}:
        if not across:
            return torch.nn.utils.get_total_norm(list(grads.values()), 2.0, foreach=on_cuda or None)
        (of_all,) = by_mesh[None].values()
        return torch.linalg.vector_norm(_summed(_norms(of_all, like, on_cuda), across))
    # As torch does for DTensors: the norm of every gradient over its mesh, then the norm of these. Each rank gives the
    # squares that it has; of a shard that several ranks hold, its share.
    totals = []
    for mesh, by_copies in by_mesh.items():
        total = _joined([_norms(group, like, on_cuda) ** 2 / copies for copies, group in by_copies.items()])
        totals.append(_summed(total, [*(compat.groups_of(mesh) if mesh is not None else ()), *across]))
    return torch.linalg.vector_norm(_joined(totals) ** 0.5)


def _summed(values: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    for group in groups:
        values = compat.all_reduce(values, "sum", group)
    return values


def _joined(vectors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(vectors) if len(vectors) > 1 else vectors[0]


def _norms(grads: list[torch.Tensor | None], like: torch.Tensor, on_cuda: bool) -> torch.Tensor:
    """The 2-norm of each gradient, as one vector; zero for gradients that another rank counts, which may be all: a
    stage of dense layers alone has no expert. ``like``: any gradient of this rank."""
    here = [grad for grad in grads if grad is not None]
    norms = iter(torch._foreach_norm(here, 2.0) if here and on_cuda else [torch.linalg.vector_norm(g) for g in here])
    nothing = (here[0] if here else like).new_zeros(()) if len(here) < len(grads) else None
    return torch.stack([nothing if grad is None else next(norms) for grad in grads])


def _mesh_and_copies(param: torch.Tensor) -> tuple[Any, int]:
    """(the mesh of ``param``, how many of its ranks hold each element); None and 1 for a plain tensor."""
    if not compat.is_traceable_wrapper_subclass(param):
        return None, 1
    mesh = param.device_mesh
    if mesh.size() == 1:
        return None, 1
    return mesh, math.prod(mesh.size(i) for i, placement in enumerate(param.placements) if placement.is_replicate())


def local(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The local tensor of a gradient, laid out over the mesh as its parameter is."""
    if not compat.is_traceable_wrapper_subclass(grad):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


@contextlib.contextmanager
def received(params: Sequence[torch.Tensor]) -> Iterator[list[list[torch.Tensor]]]:
    """Inside, the gradients that eager adds up in ``.grad`` of each of ``params``, in its order: one, or several where
    the formula of a ``torch.autograd.Function`` runs ``backward()`` itself."""
    parts: list[list[torch.Tensor]] = [[] for _ in params]
    hooks = [param.register_hook(of.append) for param, of in zip(params, parts, strict=True)]
    try:
        yield parts
    finally:
        for hook in hooks:
            hook.remove()


def unshared(grads: Iterable[torch.Tensor], taken: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``grads``, copied where one lies in the storage of another or of the tensors ``taken``."""
    keys = {compat.storage_key(t) for t in taken}
    result = []
    for grad in grads:
        if compat.storage_key(grad) in keys:
            grad = grad.clone()
        keys.add(compat.storage_key(grad))
        result.append(grad)
    return result


def land(landing: Sequence[tuple[Slot, Wrapping | None]], grads: Sequence[torch.Tensor]) -> None:
    """Add gradients to ``param.grad`` as ``backward()`` does: assigned where it is None, accumulated elsewhere."""
    for (slot, wrapping), grad in zip(landing, grads, strict=True):
        grad = wrap([grad], wrapping)
        if slot.tensor.grad is None:
            slot.tensor.grad = grad
        else:
            slot.tensor.grad.add_(grad)


def add_early(step: StepGraph) -> None:
    """Move each addition to an accumulator right after the node that completes the gradient, to free it early.

    A gradient that forward or the step's inputs hold (backward may hand on such a tensor) is added where it is.
    """
    sums, aliases, nodes = set(step.placeholders(Accumulator)), Aliases(step.graph), list(step.graph.nodes)
    for node in list(step.nodes("backward")):
        if node.op != "call_function" or not node.args or node.args[0] not in sums:
            continue
        grad, here = node.args[1], aliases.position[node]
        if phase_of(grad) == "backward":
            # Backward of a write into a view, such as ``x[0] = 0``, completes the gradient through a view of it.
            writes = [place for place in aliases.writes.get(aliases.root(grad), ()) if place < here]
            nodes[max(aliases.position[grad], *writes, 0)].append(node)
