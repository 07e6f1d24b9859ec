"""Expert parallelism: each rank of ``ep`` has some of the experts whole, and tokens are sent to them and back.

    dispatch: x (N, D) -> a part for each rank, (P, room, D) -> all_to_all -> rows sorted by the experts that are here
    combine:  their results -> the parts they came in -> all_to_all -> each token's weighted sum, (N, D)

All parts have one size, `Capacity`, so that shapes are static and counts stay on the device. A step whose routing needs
larger parts is left out and repeated with them (see `stepgraph.capture.guard`): no token is dropped. Rows of an expert
are in the order of ranks, then of tokens: the order of one rank that has the whole batch.

A layer of experts is a module with the submodule ``experts``, whose parameters have one row for each of ``n_experts``
in dimension 0, and an attribute ``exchange`` (see `stepgraph.models.moe`), which is replaced; or the experts of a
model of transformers, whose modules are left unchanged: a block calls ``experts(hidden_states, top_k_index,
top_k_weights)``, and ``experts`` holds all weights as ``gate_up_proj`` (or ``up_proj`` where nothing gates) and
``down_proj``, with one row for each of ``num_experts``. Its own forward, a permutation and grouped products, becomes
an exchange over ``ep``, products of the experts that are here, and the exchange back.

Tokens may travel in chunks: while one is in flight, the experts compute another. As the program is written nothing
overlaps, and the pass `overlap_experts` moves it so. A token's result does not depend on the chunk that it is in,
except for the rounding of products of fewer rows; gradients of the experts' weights are sums over the chunks. Weights
are gathered once.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepgraph.capture import guard as conditions
from stepgraph.kernels.moe import combine_rows, gather_rows, sort_by_expert
from stepgraph.models.moe import Exchange, grouped_product
from stepgraph.parallel.all_to_all import AllToAll, swap
from stepgraph.parallel.fsdp import gathered_once, own_layouts, parametrize
from stepgraph.parallel.mesh import Axes, MeshSpec
from stepgraph.regions import region


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
        """By what factor the multiple must grow for ``needed`` rows, an fp64 scalar; 0 if they fit."""
        fits = needed <= self.rows(tokens, slots, here, ranks)
        return (needed.double() / self._balanced(tokens, slots, ranks)).masked_fill(fits, 0.0)

    def _balanced(self, tokens: int, slots: int, ranks: int) -> float:
        return self.multiple * tokens * slots / ranks


class ExpertExchange(Exchange):
    """The exchange over ``ep``, by torch's collectives (gloo, NCCL). Its gradients travel back the same ways.

    In a captured step the room is static. Run eagerly, ranks agree on the room for the actual rows, which waits for the
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
        rows, offsets, (by_expert, at) = super().dispatch(rows, expert.view(-1, 1), here)
        return rows, offsets, (order, places, by_expert, at)

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
        raise ValueError(f"mesh {spec} has ep and the model has no layer of experts; drop ep={spec.ep}")
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


_CALLED_WITH = ["self", "hidden_states", "top_k_index", "top_k_weights"]


def is_routed(module: nn.Module) -> bool:
    """Whether ``module`` holds experts and is called with tokens and their choice of experts."""
    if not hasattr(module, "num_experts") or "down_proj" not in module._parameters:
        return False
    return "exchange" in vars(module) or list(inspect.signature(type(module).forward).parameters) == _CALLED_WITH


def check_routed(path: str, module: nn.Module) -> None:
    """``ValueError`` for experts whose forward is more than gated products."""
    for name in ("has_bias", "has_post_expert_norm"):
        if getattr(module, name, False):
            raise ValueError(
                f"{path} ({type(module).__name__}) has {name[4:]} for each expert, which ep does not compute; drop ep"
            )


def exchanged(
    module: nn.Module, base: Callable, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """``x`` (N, D), ``chosen`` (N, K) int64, ``weights`` (N, K) -> (N, D): what ``base`` gives where all experts are
    here."""
    with region("dispatch"):
        rows, offsets, state = module.exchange.dispatch(x, chosen, module.num_experts)
    with region("compute"):
        if isinstance(rows, tuple):  # in chunks
            with gathered_once(module):
                rows = tuple(_products(module, *part) for part in zip(rows, offsets, strict=True))
        else:
            rows = _products(module, rows, offsets)
    with region("combine"):
        return module.exchange.combine(rows, weights.float(), state).to(x.dtype)


def _products(module: nn.Module, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # (R, D) -> (R, D)
    gated = "gate_up_proj" in module._parameters
    rows = _linear(module, rows, module.gate_up_proj if gated else module.up_proj, offsets)
    rows = module._apply_gate(rows) if gated else module.act_fn(rows)
    return _linear(module, rows, module.down_proj, offsets)


def _linear(module: nn.Module, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return grouped_product(rows, weight if module.is_transposed else weight.mT, offsets)


Parts = tuple[torch.Tensor, ...]


class ChunkedExchange:
    """``whole`` for each of ``chunks`` parts of the tokens. What the experts get and give is a tuple of parts."""

    def __init__(self, whole: ExpertExchange, chunks: int):
        self.whole, self.chunks, self.capacity = whole, chunks, whole.capacity

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, n_experts: int) -> tuple[Parts, Parts, tuple[Any, ...]]:
        """`ExpertExchange.dispatch` of each part of ``x`` (N, D) and ``chosen`` (N, K): rows, ends and states."""
        parts = zip(x.chunk(self.chunks), chosen.chunk(self.chunks), strict=True)
        rows, offsets, states = zip(*(self.whole.dispatch(*part, n_experts) for part in parts), strict=True)
        return rows, offsets, states

    def combine(self, rows: Parts, weights: torch.Tensor, state: tuple[Any, ...]) -> torch.Tensor:
        """`ExpertExchange.combine` of each part, together (N, D)."""
        parts = zip(rows, weights.chunk(self.chunks), state, strict=True)
        return torch.cat([self.whole.combine(*part) for part in parts])


def chunk_experts(model: nn.Module, chunks: int) -> None:
    """The layers of experts of ``model``, which is parallel, take their tokens in ``chunks`` parts."""
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"expert_chunks={chunks} must be 1 or more: 2 computes one half while the other travels")
    if chunks > 1:
        for layer in expert_layers(model):
            layer.owner.exchange = ChunkedExchange(layer.owner.exchange, chunks)
            if not layer.routed:
                parametrize(layer.experts, own_layouts(layer.experts), _each_part)


def _each_part(experts: nn.Module, forward: Callable, rows: Parts, offsets: Parts) -> Parts:
    with gathered_once(experts):
        return tuple(map(forward, rows, offsets))
