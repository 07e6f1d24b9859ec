"""torchtitan's model with the weights that ours starts from."""

import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stepgraph.bench.train.titan.models import PEERS
from stepgraph.config.train import TrainConfig
from stepgraph.models import family_of
from stepgraph.models.init import Part

Region = tuple[tuple[int, int], ...]


@torch.no_grad()
def fill(model: nn.Module, config: TrainConfig) -> None:
    """Gives torchtitan's ``model``, or a stage of it, the weights that ours starts from, each rank its own part; norms
    are one in both."""
    family = family_of(config.model)
    peer = PEERS[family.name]
    with torch.device("meta"):
        ours = family.model(config.model)
    shapes = {name: param.shape for name, param in ours.named_parameters()}
    origins = peer.origins(config.model)
    for full_name, param in model.named_parameters():
        name = re.sub(r"\._orig_mod|\._checkpoint_wrapped_module", "", full_name)  # torch.compile, recomputation
        layer, name = re.fullmatch(r"(layers\.\d+\.)?(.+)", name).groups(default="")
        if param.ndim == 1:
            continue
        origin = origins[name]
        local, our_name = param.to_local() if isinstance(param, DTensor) else param, layer + origin.name
        region = list(held(param))
        if origin.first:
            region[1] = tuple(place + origin.first for place in region[1])
        head = config.model.head_dim if origin.heads else 1
        (start, stop), *others = region
        whole_heads = (start // head * head, -(-stop // head) * head)
        drawn = torch.empty(whole_heads[1] - whole_heads[0], *(last - first for first, last in others))
        ours.init_weights(config.seed, {our_name: Part(drawn, shapes[our_name], (whole_heads, *others))})
        if head > 1:  # RoPE rotates neighbours there, halves of a head here
            drawn = drawn.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)
        drawn = drawn[start - whole_heads[0] :][: local.shape[0]]
        local.copy_(drawn.bfloat16() if config.precision == "bf16" else drawn)
    peer.finish(model, config.model)


def held(param: torch.Tensor) -> Region:
    """(start, stop) in each dimension of the part of ``param`` that this rank holds: the last axis of its mesh, of
    tensor or expert parallelism, splits it first, and FSDP chunks what that leaves."""
    region = [(0, size) for size in param.shape]
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        splits = zip(param.placements, mesh.get_coordinate(), mesh.shape, strict=True)
        for placement, place, ranks in reversed(list(splits)):
            if placement.is_replicate():
                continue
            start, stop = region[placement.dim]
            chunk = -(-(stop - start) // ranks)
            region[placement.dim] = (min(stop, start + place * chunk), min(stop, start + (place + 1) * chunk))
    return tuple(region)
