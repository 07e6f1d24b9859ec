"""Expert parallelism: each rank of ``ep`` has some of the experts whole, and tokens travel to them and back.

    dispatch: x (N, D) -> a part for each rank, (P, room, D) -> all_to_all -> rows sorted by the experts that are here
    combine:  their results -> the parts they came in -> all_to_all -> each token's weighted sum, (N, D)

All parts have one size, `Capacity`, so that shapes are static and counts stay on the device. A step whose routing needs
larger parts is left out and repeated with them (see `stepgraph.capture.guard`): no token is dropped. Rows of an expert
are in the order of ranks, then of tokens: the order of one rank that has the whole batch.

A layer of experts is a module with the submodule ``experts``, whose parameters have one row for each of ``n_experts``
in dimension 0, and an attribute ``exchange`` (see `stepgraph.models.moe.layer`), which is replaced; or the experts
of a model of transformers (see `stepgraph.parallel.routed_experts`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from stepgraph.capture import guard as conditions
from stepgraph.kernels.moe import combine_rows, gather_rows, sort_by_expert
from stepgraph.models.moe.layer import Exchange
from stepgraph.parallel.all_to_all import AllToAll, swap
from stepgraph.parallel.mesh import Axes, MeshSpec
from stepgraph.parallel.routed_experts import check_routed, is_routed


class Capacity:
    """How many rows a rank can send to another, as a multiple of the balanced load. One for all layers
    of a model; the same on all ranks."""

    def __init__(self, multiple: float):
        if not 0 < multiple < math.inf:
            raise ValueError(f"expert_capacity={multiple} must be above 0: 2.0 makes room for twice the balanced load")
        self.multiple = multiple

    def grow(self, multiple: float, ratio: float) -> None:
        """Double until ``ratio`` times ``multiple`` is reached: that of a capture's time, which may be smaller than the
        present one."""
        while self.multiple < multiple * ratio:
            self.multiple *= 2

    def rows(self, tokens: int, slots: int, here: int, ranks: int) -> int:
        """For ``tokens`` of ``slots`` experts each, over ``ranks`` that have ``here`` experts each; at most what can
        ever be needed, as a token chooses an expert once."""
        return math.ceil(min(self._balanced(tokens, slots, ranks), tokens * min(slots, here)))

    def ratio(self, needed: torch.Tensor, tokens: int, slots: int, here: int, ranks: int) -> torch.Tensor:
        """How many times the present multiple ``needed`` rows take, an fp64 scalar; above 1 only if they do not fit."""
        fits = needed <= self.rows(tokens, slots, here, ranks)
        return (needed.double() / self._balanced(tokens, slots, ranks)).masked_fill(fits, 0.0)

    def _balanced(self, tokens: int, slots: int, ranks: int) -> float:
        return self.multiple * tokens * slots / ranks


class ExpertExchange(Exchange):
    """The exchange over ``ep``, by torch's collectives (gloo, NCCL). Its gradients travel back the same ways.

    In a captured step the room is static. Run eagerly, ranks agree on the room for what there is, which waits for the
    GPU in every layer.
    """

    def __init__(self, axes: Axes, capacity: Capacity):
        self.axes, self.ranks, self.capacity = axes, axes.sizes["ep"], capacity

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the experts."""
        return self.axes.axis("ep").get_group()

    def dispatch(
        self, x: torch.Tensor, chosen: torch.Tensor, n_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """As `Exchange.dispatch`. Rows after the last end are zeros."""
        here = n_experts // self.ranks
        order, places, counts = sort_by_expert(chosen, n_experts)
        counts = counts.view(self.ranks, here)  # of rows for each expert of each rank
        sent = counts.sum(1)  # (P,)
        room = self._room(*chosen.shape, here, sent.amax())
        first = sent.cumsum(0) - sent  # of each rank's rows among all, which are sorted
        # Where each slot's row is in the parts, and which slot is at each place.
        rank = (chosen // here).long()
        place = places - first[rank]
        places = torch.where((places >= 0) & (place < room), rank * room + place, -1).int()  # (N, K)
        along = torch.arange(room, device=x.device)  # (room,)
        source = order[(first.unsqueeze(1) + along).clamp(max=order.numel() - 1)]  # (P, room)
        order = torch.where(along < sent.unsqueeze(1), source, -1).flatten()  # (P * room,)
        received = swap(counts, self.group, "dispatch", "ep")  # from each rank, for each expert here
        rows = AllToAll.apply(gather_rows(x, order, places), self.group, "dispatch", "ep")
        # What came from each rank is sorted by expert already: the expert of each place, `here` where it is empty.
        ends = received.cumsum(1)
        expert = torch.searchsorted(ends, along.to(ends.dtype).expand(self.ranks, -1).contiguous(), right=True)
        by_expert, at, counts = sort_by_expert(expert.view(-1, 1), here)
        offsets = counts.cumsum(0, dtype=torch.int32)
        return gather_rows(rows, by_expert, at), offsets, (order, places, by_expert, at)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """As `Exchange.combine`."""
        order, places, by_expert, at = state
        rows = gather_rows(rows, at.flatten(), by_expert.unsqueeze(1))  # back in the parts that they came in
        return combine_rows(AllToAll.apply(rows, self.group, "combine", "ep"), places, weights, order)

    def _room(self, tokens: int, slots: int, here: int, needed: torch.Tensor) -> int:
        room = self.capacity.rows(tokens, slots, here, self.ranks)
        if conditions.collecting():
            ratio = self.capacity.ratio(needed, tokens, slots, here, self.ranks)
            conditions.require("expert_capacity", ratio, partial(self.capacity.grow, self.capacity.multiple))
            return room
        needed = needed.clone()
        dist.all_reduce(needed, dist.ReduceOp.MAX, group=self.group)
        return max(room, int(needed))


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts. ``path``: of the module ``experts``, which holds their parameters. ``owner``: the module
    whose attribute ``exchange`` brings tokens to them."""

    path: str
    n_experts: int
    owner: nn.Module
    experts: nn.Module

    @property
    def routed(self) -> bool:
        """Whether it has the form of transformers' experts."""
        return self.owner is self.experts


def expert_layers(model: nn.Module) -> Iterator[ExpertLayer]:
    """Every layer of experts."""
    for path, module in model.named_modules():
        if hasattr(module, "exchange") and isinstance(getattr(module, "experts", None), nn.Module):
            yield ExpertLayer(f"{path}.experts", module.n_experts, module, module.experts)
        elif is_routed(module):
            yield ExpertLayer(path, module.num_experts, module, module)


def expert_paths(model: nn.Module, spec: MeshSpec) -> set[str]:
    """Paths of the modules that hold experts' parameters. ``ValueError`` if ``ep`` does not fit the model."""
    found: set[str] = set()
    for layer in expert_layers(model):
        spec.check_divides({f"{layer.path.removesuffix('.experts')}.n_experts": layer.n_experts}, "ep")
        if layer.routed:
            check_routed(layer.path, layer.experts)
        for name, module in layer.experts.named_modules(prefix=layer.path):
            found.add(name)
            for key, param in module._parameters.items():
                if param is not None and (not param.ndim or param.shape[0] != layer.n_experts):
                    raise ValueError(
                        f"{name}.{key} has shape {list(param.shape)}; an expert layer's parameters need "
                        f"{layer.n_experts} rows, one for each expert, in dimension 0"
                    )
    if not found:
        raise ValueError(f"mesh {spec} spreads experts and the model has no layer of experts; drop ep={spec.ep}")
    return found


def expert_splits(shape: torch.Size, axes: Axes) -> list[tuple[str, int]]:
    """How an expert parameter is split: experts over ``ep``, then over FSDP's ranks experts again or, where these do
    not divide, the next dimension."""
    shards = axes.sizes["ep_shard"]
    splits = [("ep", 0)]
    if shards > 1:
        even = len(shape) < 2 or shape[0] // axes.sizes["ep"] % shards == 0
        splits.append(("ep_shard", 0 if even else 1))
    return splits


def capacity_of(model: nn.Module) -> Capacity:
    """The capacity that all layers of experts of ``model`` share, which is parallel with ``ep``."""
    return next(layer.owner.exchange.capacity for layer in expert_layers(model))


def exchange_over(model: nn.Module, exchange: Callable[[Capacity], ExpertExchange], multiple: float) -> None:
    """The layers of experts of ``model`` exchange tokens by ``exchange``, with room for ``multiple`` of balanced
    load."""
    capacity = Capacity(multiple)
    for layer in expert_layers(model):
        layer.owner.exchange = exchange(capacity)
