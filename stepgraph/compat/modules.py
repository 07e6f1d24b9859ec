"""Private state of torch's modules and tensors: their hooks, and how modules convert what they hold."""

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules import module

from stepgraph.compat.replaced import replaced


def conversions_of_modules(call: Callable) -> contextlib.AbstractContextManager[None]:
    """Inside, ``module.to(...)`` and the like are ``call(plain, module, convert, recurse)``: ``plain`` is torch's own
    method, and ``convert`` takes each tensor."""
    plain = nn.Module._apply

    def convert_all(module: nn.Module, convert: Callable, recurse: bool = True) -> nn.Module:
        return call(plain, module, convert, recurse)

    return replaced(nn.Module, _apply=convert_all)


def hooks_of_every_module() -> list[dict]:
    """The dictionaries of hooks that run with every module (``register_module_forward_hook`` and its like)."""
    return [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    ]


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether the user hooked code to the gradient of ``tensor``."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
