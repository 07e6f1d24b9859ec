"""`parallelize`: makes a plain model parallel, in place."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stepgraph import compat
from stepgraph.errors import require_type, unknown_name
from stepgraph.models.moe import MoEDecoder, Router
from stepgraph.parallel.context import ContextForm, share_sequences
from stepgraph.parallel.expert_symmetric import SymmetricExchange
from stepgraph.parallel.experts import (
    ExpertExchange,
    chunk_experts,
    exchange_over,
    exchanged,
    expert_paths,
    expert_splits,
    is_routed,
)
from stepgraph.parallel.fsdp import layouts, parametrize
from stepgraph.parallel.layout import Layout, fsdp_dim, split_sizes
from stepgraph.parallel.mesh import Mesh
from stepgraph.parallel.pipeline.layout import Pipeline
from stepgraph.parallel.tensor import check_plan, register_place, style_of

#: How tokens are sent to experts, by the name that options use.
EXCHANGES = {"collectives": ExpertExchange, "symmetric": SymmetricExchange}


@torch.no_grad()
def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: Mapping[str, str] | None = None,
    *,
    device: torch.device | str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    expert_capacity: float = 2.0,
    expert_chunks: int = 1,
    expert_exchange: str = "collectives",
    context: ContextForm = "auto",
    pipeline: Pipeline | None = None,
) -> nn.Module:
    """Shard the parameters of ``model`` over ``mesh``, in place, and return it.

    Afterwards each parameter is a DTensor that holds this rank's shard and keeps its dtype; optimizers work on shards.
    A model on the meta device gets uninitialized shards on ``device`` and never exists whole; its buffers are
    allocated there too (see `stepgraph.parallel.fsdp` for the weights). A model with values keeps them: every rank
    must hold the same ones.

    Args:
        plan: patterns of module paths (``layers.*.mlp.up_proj``) and the style of each, one of ``STYLES``: how tensor
            parallelism splits the model. Needed where the mesh has ``tp``, and without effect elsewhere.
        device: where the shards live; None: where the parameters are.
        param_dtype: dtype that parameters are gathered and used in; None: their own.
        reduce_dtype: dtype that gradients are reduced in.
        expert_capacity: with ``ep``, the rows that a rank has room to send to another at first, as a multiple of those
            under balanced load. A step that needs more is repeated with more (see `stepgraph.parallel.experts`).
        expert_chunks: with ``ep``, split an expert layer's tokens into this many chunks: one
            is sent while another is computed (see `stepgraph.parallel.experts`).
        expert_exchange: with ``ep``, how tokens are sent: by torch's ``collectives``, or within a machine over
            ``symmetric`` memory (see `stepgraph.parallel.expert_symmetric`).
        context: with ``cp``, how attention sees the tokens of all ranks: ``ulysses`` (ranks exchange tokens for heads),
            ``gather`` (keys and values of all ranks); auto: ``ulysses`` if the ranks divide the heads.
        pipeline: the model's stages, from `plan_pipeline`. Needed where the mesh has ``pp``. Parameters of other ranks'
            stages then stay, or move, to the meta device; pass an optimizer the ones that `held_parameters` names.

    Raises ``ValueError`` for a plan that does not cover the model or that ``tp`` does not divide, and for a model that
    is already parallel.
    """
    require_type("mesh", mesh, Mesh, "use Mesh(MeshSpec.parse('fsdp=2'), 'cuda')")
    if layouts(model):
        raise ValueError("the model is parallel already; build a new one to parallelize it differently")
    if (mesh.axis("pp") is None) != (pipeline is None):
        raise ValueError(
            f"mesh {mesh.spec} and pipeline={pipeline} do not agree; pass parallelize what plan_pipeline made for a "
            "mesh with pp, and nothing for another"
        )
    tp = mesh.axis("tp")
    if tp is not None:
        if plan is None:
            raise ValueError(f"mesh {mesh.spec} splits tensors and the model has no plan; pass plan= or drop tp")
        check_plan(model, plan, tp.size())
        at = device or next(model.parameters()).device
        place = torch.full((), mesh.place("tp"), dtype=torch.int64, device=at)
        register_place(model, place)  # for the loss
    if mesh.spec.cp > 1:
        share_sequences(model, mesh, device or next(model.parameters()).device, context)
    experts = expert_paths(model, mesh.spec) if mesh.experts is not None else set()
    if experts:
        if expert_exchange not in EXCHANGES:
            raise unknown_name("expert_exchange", expert_exchange, tuple(EXCHANGES))
        exchange_over(model, partial(EXCHANGES[expert_exchange], mesh.experts), expert_capacity)
    elsewhere = _elsewhere(model, pipeline)
    fsdp = mesh.axis("dp_shard") is not None
    stored: dict[int, tuple[nn.Parameter, Layout]] = {}
    for path, module in list(model.named_modules()):
        style = style_of(path, module, plan) if tp is not None else None
        found: dict[str, Layout] = {}
        for name, param in module._parameters.items():
            if param is None:
                continue
            if path in experts:
                axes, splits = mesh.experts, expert_splits(param.shape, mesh.experts)
            else:
                axes, splits = mesh, [("tp", style.split[name])] if style and name in style.split else []
                if fsdp and param.ndim:
                    left = split_sizes(param.shape, splits, mesh.sizes)[-1]
                    splits += [("dp_shard", fsdp_dim(left, mesh.sizes["dp_shard"]))]
            dtype = param_dtype if param_dtype and param.is_floating_point() else param.dtype
            layout = Layout(param.shape, axes, tuple(splits), dtype, reduce_dtype, pipeline)
            shard, first = stored.setdefault(
                id(param), (_shard(param, layout, "meta" if id(param) in elsewhere else device), layout)
            )
            if layout.splits != first.splits:  # a tied parameter
                full = f"{path}.{name}"
                raise ValueError(f"the plan splits {full}, which is tied, in two ways; make its styles agree")
            module._parameters[name], found[name] = shard, layout
        forward = partial(_with_mesh, style.forward, tp) if style and style.forward else None
        if path in experts and is_routed(module):
            forward = exchanged
        if found or forward:
            parametrize(module, found, forward)
        if style and style.placed:
            register_place(module, place)
        if isinstance(module, MoEDecoder):
            module.sum_over_ranks = _sum_over_ranks
        if isinstance(module, Router) and (tp is not None or mesh.spec.cp > 1):
            module.sum_over_sequence = partial(_sum_over_sequence, mesh)
        for name, buffer in module._buffers.items():
            if buffer is not None and device is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    if experts:
        chunk_experts(model, expert_chunks)
    return model


def held_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that this rank holds, by name: all except other stages' of a pipeline."""
    return {name: param for name, param in model.named_parameters() if not param.is_meta}


def _elsewhere(model: nn.Module, pipeline: Pipeline | None) -> set[int]:
    """Ids of the parameters that only other ranks of the pipeline hold."""
    return set() if pipeline is None else {id(p) for name, p in model.named_parameters() if not pipeline.holds(name)}


def _sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Every rank of the mesh counts its own tokens: ranks of a tp group have parts of the same sequences."""
    return compat.all_reduce(value, "sum", dist.group.WORLD)


def _sum_over_sequence(mesh: Mesh, value: torch.Tensor) -> torch.Tensor:
    tp = mesh.axis("tp")
    for group in (tp and tp.get_group(), mesh.context_group):
        if group is not None:
            value = compat.all_reduce(value, "sum", group)
    return value


def _with_mesh(forward: Callable, tp: DeviceMesh | None, module: nn.Module, base: Callable, *args: Any) -> Any:
    return forward(module, base, tp, *args)


def _shard(param: nn.Parameter, layout: Layout, device: torch.device | str | None) -> nn.Parameter:
    device = torch.device(device or param.device)
    if param.is_meta or device.type == "meta":
        local = torch.empty(layout.local_shape, dtype=param.dtype, device=device)
        stored = layout.store(local.zero_() if layout.padded else local)
    else:
        stored = layout.part(param, device)
    return nn.Parameter(stored, requires_grad=param.requires_grad)
