"""Private state of torch's modules and tensors: their hooks, and how modules convert what they hold."""

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules import module
from torch.utils.hooks import RemovableHandle

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


def tracks_modules() -> bool:
    """Whether a `ModuleTracker` of torch, such as that of ``FlopCounterMode``, is open."""
    hooked = [getattr(hook, "__self__", None) for hook in module._global_forward_pre_hooks.values()]
    return any(type(one).__module__ == "torch.utils.module_tracker" for one in hooked)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether the user hooked code to the gradient of ``tensor``, or to autograd's node that adds to it."""
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        return True
    if is_fake(tensor) or not (tensor.is_leaf and tensor.requires_grad):
        return False
    node, first = torch.autograd.graph.get_gradient_edge(tensor).node, RemovableHandle.next_id
    handles = [node.register_hook(lambda *_: None), node.register_prehook(lambda *_: None)]
    hooks = sum(len(handle.hooks_dict_ref() or ()) for handle in handles)
    for handle in handles:
        handle.remove()
    RemovableHandle.next_id = first  # captured steps look at it to see that nothing was hooked
    return hooks > len(handles)
