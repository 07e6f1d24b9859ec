"""The loss of a parallel model: mean over the mesh, and cross entropy over a vocabulary that ranks share."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stepgraph import compat
from stepgraph.errors import require_type
from stepgraph.kernels.loss.tokens import token_gradient_, token_stats
from stepgraph.models.documents import PLACE
from stepgraph.models.loss import IGNORE, added_losses, logits_of, mean_cross_entropy, usual_count
from stepgraph.parallel.context import context_of
from stepgraph.parallel.mesh import Mesh
from stepgraph.parallel.tensor import place_in

#: For the operators: a column of another rank, and a label that no token has (the slopes of those left out are 0).
_ELSEWHERE, _NO_LABEL = -1, -2

LossFn = Callable[[nn.Module, Any], torch.Tensor]


def mean_over_mesh(loss: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The mean of all ranks' ``loss`` on every rank (of the ones that share a pipeline's stage), in value only.

    The gradient is that of this rank's own loss: the mean over ranks is taken when gradients are reduced.
    """
    require_type("mesh", mesh, Mesh, "use the one given to parallelize")
    if mesh.stage_group.size() == 1:
        return loss
    return _Mean.apply(loss, mesh)


def _sum_over(part: torch.Tensor, tp: DeviceMesh | None) -> torch.Tensor:
    """The sum of what the ranks of ``tp`` add, each for its part of the sequence, in value; the gradient is that of
    this rank's own part."""
    if tp is None:
        return part
    return part + (compat.all_reduce(part.detach(), "sum", tp.get_group()) - part.detach())


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        # Ranks of one tp group have the same loss, so the mean over all ranks is that over the data-parallel ones.
        group = mesh.stage_group
        return compat.all_reduce(loss, "sum", group) / group.size()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def cross_entropy(
    logits: torch.Tensor,  # (N, V / tp), this rank's part of the vocabulary
    targets: torch.Tensor,  # (N,) int64, in the whole vocabulary
    tp: DeviceMesh,
    ignore_index: int = IGNORE,
    place: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` in fp32 of logits whose vocabulary is split over ``tp``: a scalar, the same on every rank.

    ``place``: this rank's along ``tp``, a scalar int64 that is an input of a captured step (`parallelize` keeps one in
    the model); None: a constant of the graph, which then differs from rank to rank.

    ``count``: what the sum is divided by, a scalar; None: the number of targets that are not ``ignore_index``.

    The logits are never gathered: ranks exchange the logarithm of a sum of exponentials and one logit per token. For
    backward the logits and two numbers per token are kept.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """
    place = tp.get_local_rank() if place is None else place
    return _CrossEntropy.apply(logits, targets, tp, ignore_index, place, count)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        tp: DeviceMesh,
        ignore_index: int,
        place: Any,
        count: torch.Tensor | None,
    ) -> torch.Tensor:
        group, columns = tp.get_group(), logits.shape[1]
        counted = targets != ignore_index
        column = targets - place * columns
        here = counted & (column >= 0) & (column < columns)
        column = column.masked_fill(~here, 0)
        own = token_stats(logits, column, 1.0, _NO_LABEL)[1]
        highest = compat.all_reduce(own, "max", group)
        total = (own - highest).exp()
        picked = logits.gather(1, column.unsqueeze(1)).squeeze(1).float() - highest
        total, picked = compat.all_reduce(torch.stack([total, picked.masked_fill(~here, 0.0)]), "sum", group).unbind()
        log_total = total.log()
        count = counted.sum() if count is None else count
        ctx.save_for_backward(logits, highest + log_total, column.masked_fill(~here, _ELSEWHERE), counted, count)
        return (log_total - picked).masked_fill(~counted, 0.0).sum() / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, log_sum, column, counted, count = ctx.saved_tensors
        gradient = logits.clone(memory_format=torch.contiguous_format)  # `fuse_loss` overwrites the logits where it can
        slope, none = torch.where(counted, -grad / count, 0.0), torch.zeros_like(log_sum)
        token_gradient_(gradient, column, log_sum, none, slope, none, none, none, 1.0, _NO_LABEL)
        return gradient, None, None, None, None, None


def next_token_loss(mesh: Mesh) -> LossFn:
    """``loss_fn(model, batch)`` for a model parallelized over ``mesh``, as `stepgraph.models.next_token_loss`.

    Each data-parallel rank gives its own batch, ranks of one tp group the same; the loss is the mean over the mesh:
    with ``batch["targets_per_row"]``, of each rank's own rows, that over all targets. Ranks of ``cp`` give the same
    batch, and each computes the loss of its part of the tokens; the mean of their losses is that over all targets.
    """
    require_type("mesh", mesh, Mesh, "use the one given to parallelize")
    tp = mesh.axis("tp")

    def loss_fn(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with added_losses() as others:
            logits, targets = logits_of(model, batch).flatten(0, 1), batch["targets"]
        count = usual_count(batch)
        if mesh.spec.cp > 1:
            count = ((targets != IGNORE).sum() if count is None else count) / mesh.spec.cp
            targets = context_of(model).part(targets, place_in(model, PLACE))
        targets = targets.flatten()
        if "targets_per_row" in batch:
            count = mean_over_mesh(count, mesh)
        if tp is not None:
            loss = cross_entropy(logits, targets, tp, place=place_in(model), count=count)
        else:
            loss = mean_cross_entropy(logits.float(), targets, count)
        if others:
            # Parts of sequences add up over cp too, where gradients and losses are averaged.
            loss = loss + _sum_over(sum(others) * mesh.spec.cp, tp)
        return mean_over_mesh(loss, mesh)

    return loss_fn
