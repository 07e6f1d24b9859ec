"""Private state of torch's optimizers, which its learning rate schedulers read too; and optimizers around them."""

import sys
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user hooked code to ``optimizer.step``, or to that of every optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def step_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` was replaced on the object: by other than torch's schedulers, which note there that it ran."""
    step = vars(optimizer).get("step")
    while getattr(step, "__code__", None) and step.__code__.co_filename == lr_scheduler.__file__:
        step = step.__wrapped__
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's learning rate schedulers that the optimizer has stepped; they warn otherwise."""
    optimizer._opt_called = True


def accelerated_inside(optimizer: Any) -> Any:
    """The optimizer inside the one that ``accelerate`` prepared; another one as it is. A list: each one's.

    Raises `ValueError` if a ``GradScaler`` steps it: its scale and skipped steps are no part of a captured step.
    """
    if isinstance(optimizer, (list, tuple)):
        return type(optimizer)(accelerated_inside(one) for one in optimizer)
    module = sys.modules.get("accelerate.optimizer")
    if module is None or not isinstance(optimizer, module.AcceleratedOptimizer):
        return optimizer
    if optimizer.scaler is not None:
        raise ValueError(
            "the optimizer that accelerate prepared is stepped by a GradScaler (mixed_precision='fp16'), which a "
            "captured step has not; use mixed_precision='bf16'"
        )
    return optimizer.optimizer
