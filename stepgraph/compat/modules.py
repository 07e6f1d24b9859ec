"""Private state of torch's modules and tensors: their hooks."""

from typing import Any

import torch
from torch.nn.modules import module


def hooks_of_every_module() -> list[dict]:
    """The dictionaries of hooks that run with every module (``register_module_forward_hook`` and its like)."""
    return [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    ]


def active_modes() -> list[str]:
    """The classes of modes that see the calls of operators and of torch's functions here, but the default device's, and
    of hooks that see what autograd keeps."""
    functions = torch.overrides._get_current_function_mode_stack()
    found = [*functions, *torch.utils._python_dispatch._get_current_dispatch_mode_stack()]
    names = [f"{type(mode).__module__}.{type(mode).__qualname__}" for mode in found]
    hooks = ["torch.autograd.graph.saved_tensors_hooks"] * (_saved_tensors_hooks() is not None)
    return [name for name in names if name != "torch.utils._device.DeviceContext"] + hooks


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether the user hooked code to the gradient of ``tensor``."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
