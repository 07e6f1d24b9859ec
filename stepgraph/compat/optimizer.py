"""Private state of torch's optimizers, which its learning rate schedulers read too."""

import torch


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user hooked code to ``optimizer.step``."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's learning rate schedulers that the optimizer has stepped; they warn otherwise."""
    optimizer._opt_called = True
