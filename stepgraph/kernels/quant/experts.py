"""Frozen weights of experts, (E, ., .) in one parameter, in fewer bits.

    experts.gate_up_proj    ->  experts.gate_up_proj_quantized, which a property of the old name dequantizes

So the model's own code multiplies with it, grouped by expert or one after another, and `peft` adds adapters to it. A
captured step dequantizes again in backward (pass `recompute`). In NF4 a parameter is quantized as bitsandbytes does it,
in blocks of 64 values in their order, none of which has values of two experts.
"""

import math
from collections.abc import Collection, Iterator
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn

from stepgraph.errors import unknown_name
from stepgraph.kernels.quant.formats import BLOCK
from stepgraph.kernels.quant.weight import Fp8Weight, Nf4Weight, QuantizedWeight

_KINDS: dict[str, type[QuantizedWeight]] = {"nf4": Nf4Weight, "fp8": Fp8Weight}


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """The weights of all experts of a layer: path, the module that holds it, its name there, and the parameter."""
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param.ndim == 3 and "experts" in path.split("."):
                yield f"{path}.{name}", module, name, param


def quantize_experts(
    model: nn.Module, kind: str, *, skip: Collection[str] = (), device: torch.device | None = None, back: bool = False
) -> tuple[dict[str, QuantizedWeight], str]:
    """Quantize the frozen weights of experts in ``model``, except those at the paths ``skip``.

    Weights are floating parameters of three dimensions, the first of experts, in or below a module named ``experts``;
    the other arguments are those of `quantize_linear`. Call it after `peft` has added its adapters. Returns the new
    weights by the paths of the old, and a line about weights that are left unchanged, empty without any.
    """
    if kind not in _KINDS:
        raise unknown_name("quantize", kind, _KINDS)
    made: dict[str, QuantizedWeight] = {}
    stays: list[str] = []
    for path, module, name, param in list(_weights(model)):
        if path in skip or param.requires_grad or not param.is_floating_point():
            continue
        if kind == "nf4" and math.prod(param.shape[1:]) % BLOCK:
            stays.append(f"{path} {tuple(param.shape)} in {param.dtype}")
            continue
        new = _KINDS[kind].of_weight(param.data.to(device)).train(module.training)
        made[path] = new.to(param.device) if back else new
        _replace(module, name, made[path])
    why = f"a block of {BLOCK} values would have some of two experts; fp8 takes them"
    return made, f"{len(stays)} weights of experts are not quantized, {stays[0]} first: {why}" if stays else ""


def _replace(module: nn.Module, name: str, new: QuantizedWeight) -> None:
    """Give ``module`` a class of its own, with a property ``name`` that dequantizes ``new``.

    A buffer ``name`` without a tensor stays, for ``torch.nn.utils.parametrize``, by which peft adds an adapter in every
    forward.
    """
    base, place = type(module), f"{name}_quantized"
    delattr(module, name)
    module.register_buffer(name, None)
    module.register_module(place, new)
    members = {name: property(partial(_whole, name, place))}
    members |= {"register_buffer": partialmethod(_put_back, base, name), "__module__": base.__module__}
    module.__class__ = type(base.__name__, (base,), members | {"__qualname__": base.__qualname__})


def _whole(name: str, place: str, module: nn.Module) -> Tensor:
    if name not in module._buffers:  # torch has its place
        raise AttributeError(name)
    return module._modules[place].dequantize()


def _put_back(module: nn.Module, base: type, quantized: str, name: str, tensor: Any, persistent: bool = True) -> None:
    """When ``torch.nn.utils.parametrize`` ends, it registers what it had read: the dequantized weight."""
    if name == quantized:
        module._buffers[name] = None
    else:
        base.register_buffer(module, name, tensor, persistent)
