"""Private state of torch's optimizers, which its learning rate schedulers read too; and optimizers around them."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import _muon, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks, _to_scalar

from stepgraph.compat.replaced import replaced


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user hooked code to ``optimizer.step``, or to that of every optimizer."""
    hooks = map(vars(optimizer).get, ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
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


def accelerated_inside(optimizer: Any, accumulate: int) -> Any:
    """The optimizer inside the one that ``accelerate`` prepared; another one as it is. A list: each one's.

    Raises `ValueError` for what a captured step would leave out: if its ``step`` was replaced, a ``GradScaler`` steps
    it, or it accumulates other than over the ``accumulate`` microbatches of a step, each call of which updates.
    """
    if isinstance(optimizer, (list, tuple)):
        return type(optimizer)(accelerated_inside(one, accumulate) for one in optimizer)
    module = sys.modules.get("accelerate.optimizer")
    if module is None or not isinstance(optimizer, module.AcceleratedOptimizer):
        return optimizer
    if step_replaced(optimizer):
        raise ValueError(
            "step was replaced on the optimizer that accelerate prepared, which a captured step would not run; call "
            "what it adds between steps"
        )
    if optimizer.scaler is not None:
        raise ValueError(
            "the optimizer that accelerate prepared is stepped by a GradScaler (mixed_precision='fp16'), which a "
            "captured step does not have; use mixed_precision='bf16'"
        )
    if (steps := optimizer.gradient_state.num_steps) not in (1, accumulate):
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={steps}), but each call of a captured step updates: drop it, "
            f"pass accumulate={steps}, and join the {steps} batches of a step"
        )
    mark_stepped(optimizer)  # schedulers made after `prepare` look here, and captured steps mark the one inside
    return optimizer.optimizer


def muon_replaced(muon: Callable) -> contextlib.AbstractContextManager[None]:
    """Inside, ``torch.optim.Muon`` updates each group by ``muon(plain, params, grads, momentum buffers, **options)``;
    ``plain``: what it replaces."""
    plain = _muon.muon

    def ours(*tensors: Any, lr: Any, **options: Any) -> None:
        muon(plain, *tensors, lr=_to_scalar(lr), **options)

    return replaced(_muon, muon=ours)


def muon_rate(options: Mapping[str, Any], shape: Sequence[int]) -> Any:
    """The learning rate of ``torch.optim.Muon`` for a matrix of ``shape``. ``options``: of `muon_replaced`."""
    return _muon._adjust_lr(options["lr"], options["adjust_lr_fn"], torch.Size(shape))


def orthogonalized(matrix: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """``matrix`` (M, N) as ``torch.optim.Muon`` orthogonalizes it, bf16; one in bf16 is written to."""
    _, *names = inspect.signature(_muon._zeropower_via_newtonschulz).parameters
    return _muon._zeropower_via_newtonschulz(matrix, **{name: options[name] for name in names})
