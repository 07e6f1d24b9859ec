"""The initial weights of a parallel model, drawn where they lie: they do not depend on the mesh."""

import torch
from torch import nn

from stepgraph.models.init import Part, whole_part
from stepgraph.parallel.fsdp import layouts


def local_parts(model: nn.Module) -> dict[str, Part]:
    """What this rank holds of each parameter, by name, for ``model.init_weights(seed, local_parts(model))``: all of a
    plain model's."""
    found = layouts(model)
    if not found:
        return {name: whole_part(param.detach()) for name, param in model.named_parameters()}
    return {
        name: Part(found[name].own(param.detach().to_local()), found[name].shape, found[name].region)
        for name, param in model.named_parameters()
    }


@torch.no_grad()
def round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the stored parameters to the values that ``dtype`` has: what a model held in ``dtype`` starts from."""
    for param in model.parameters():
        local = param.to_local()
        local.copy_(local.to(dtype))
