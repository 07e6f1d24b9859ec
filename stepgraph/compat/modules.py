"""Private state of torch's modules and tensors: their hooks."""

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


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether the user hooked code to the gradient of ``tensor``."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
