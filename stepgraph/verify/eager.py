"""One training step as a plain loop runs it, which is what a captured step must equal."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.capture.python.end_of_step import end_of_step
from stepgraph.capture.python.metrics import collected, means
from stepgraph.parallel.layout import Layout


def eager_step(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    microbatches: list[Any],
    optimizers: Sequence[torch.optim.Optimizer],
    max_grad_norm: float | None,
    skip_nonfinite: bool = False,
    layouts: Mapping[str, Layout] | None = None,
    whole: nn.Module | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics by name) of forward, backward, clipping, update and what modules do after it.

    ``layouts``: of a model over ranks, by the names of its parameters. ``whole``: the model with modules outside of it
    whose parameters get gradients too, which are not clipped.

    ``skip_nonfinite``: parameters, buffers and optimizer state are left as they were where the loss or the norm is not
    finite.

    Gradients of this step alone are clipped and updated with. Those that no optimizer takes are added to the
    ``param.grad`` of before; the others leave it as it was.
    """
    whole = whole or model
    params = [p for p in whole.parameters() if p.requires_grad]
    own = {id(p) for p in model.parameters()}
    before = [p.grad for p in params]
    for param in params:
        param.grad = None
    n, total, metrics = len(microbatches), None, {}
    reported: dict[str, list[torch.Tensor]] = {}
    kept = [(t, t.detach().clone()) for t in (*whole.parameters(), *whole.buffers())] if skip_nonfinite else []
    with torch.enable_grad():
        for microbatch in microbatches:
            with collected() as found:
                loss = loss_fn(model, microbatch)
            for name, value in found.items():
                reported.setdefault(name, []).append(value)
            loss = loss / n if n > 1 else loss
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
    if max_grad_norm is not None:
        metrics["grad_norm"] = _clip([p for p in params if p.grad is not None and id(p) in own], max_grad_norm)
    if skip_nonfinite:
        metrics["skipped"] = ~torch.isfinite(torch.stack([total, metrics["grad_norm"]])).all()
    skipped = skip_nonfinite and bool(metrics["skipped"])
    owned, placed = set(), {id(p): layouts[name] for name, p in model.named_parameters() if layouts}
    for optimizer in optimizers:
        if not skipped:
            with compat.muon_replaced(partial(_whole_muon, placed)):
                _step(optimizer)
        owned |= {id(p) for group in optimizer.param_groups for p in group["params"]}
    if optimizers:
        metrics |= end_of_step(model)
    with torch.no_grad():
        for tensor, value in kept if skipped else ():
            tensor.copy_(value)
        for param, old in zip(params, before, strict=True):
            if id(param) in owned or param.grad is None:
                param.grad = old
            elif old is not None:
                param.grad = old.add_(param.grad)
    return total, metrics | means(reported)


def _step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, with the parameters of each mesh in a group of their own: torch's kernels for many tensors
    take no others. Parameters of experts lie on another mesh than the rest."""
    groups, split = optimizer.param_groups, []
    for group in groups:
        by_mesh: dict[Any, list[torch.Tensor]] = {}
        for param in group["params"]:
            by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
        split += [group | {"params": params} for params in by_mesh.values()]
    optimizer.param_groups = split
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def _whole_muon(
    placed: Mapping[int, Layout],
    plain: Callable,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momenta: list[torch.Tensor],
    **options: Any,
) -> None:
    """torch's ``muon`` of whole matrices, as one process has them; every rank keeps its part."""
    for param, grad, momentum in zip(params, grads, momenta, strict=True):
        layout = placed.get(id(param))
        if layout is None:
            plain([param], [grad], [momentum], **options)
            continue
        whole = [layout.without_padding(t.detach()).full_tensor().clone() for t in (param, grad, momentum)]
        plain(*([t] for t in whole), **options)
        for stored, found in ((param, whole[0]), (momentum, whole[2])):
            layout.own(stored.to_local()).copy_(layout.cut(found))


def _clip(params: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip as ``torch.nn.utils.clip_grad_norm_`` does; over the meshes of DTensors, as a captured step does."""
    if not any(map(compat.is_traceable_wrapper_subclass, params)):
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    local = {i: gradients.local(p.grad, p) for i, p in enumerate(params)}
    with torch.no_grad():
        clipped, norm = gradients.clip(local, params, max_norm)
        for i, grad in local.items():
            grad.copy_(clipped[i])
    return norm
