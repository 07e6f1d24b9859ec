"""Spreads transformers' layers of experts over ranks of ``ep``, with their modules unchanged.

A block calls ``experts(hidden_states, top_k_index, top_k_weights)``, and the module ``experts`` holds all weights
as ``gate_up_proj`` (or ``up_proj`` where nothing gates) and ``down_proj``, with one row for each of ``num_experts``.
Before -> after: its own forward, a permutation and grouped products -> an exchange over ``ep``, products of the experts
that are here, and the exchange back (see `stepgraph.parallel.experts`).
"""

import inspect
from collections.abc import Callable

import torch
from torch import nn

from stepgraph.models.moe.layer import grouped_product
from stepgraph.parallel.fsdp import gathered_once
from stepgraph.regions import region

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
