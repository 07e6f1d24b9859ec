"""Training step -> `StepGraph`: one `make_fx` trace over fake tensors of forward, loss, backward, clip and update."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture.graph import InputSpec, OutputSpec, StepGraph
from stepgraph.capture.optimizer import AdamWUpdate
from stepgraph.capture.provenance import Provenance, Recorder, provenance, set_provenance
from stepgraph.capture.state import Slot, Wrapping, model_slots, repeated_blocks, swapped, unwrap, wrap
from stepgraph.errors import CaptureError

LossFn = Callable[[nn.Module, Any], torch.Tensor]


def flatten_batch(batch: Any) -> tuple[list[Any], Any]:
    """The batch's leaves and how to put them together again; tensors, numbers, strings, bools and None may appear."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    leaves, spec = compat.pytree.tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, int, float, str, type(None))):
            raise CaptureError(
                f"the batch holds a {type(leaf).__name__}; allowed: tensors and plain values in dicts, lists and tuples"
            )
    return leaves, spec


@dataclass
class Traced:
    """A captured step with the live tensors behind its inputs.

    ``state``: the live local tensor of every input that is not of the batch, in input order; ``lr`` inputs are
    tensors of their own that the caller fills. ``landing``: slots whose gradients the graph returns. ``leaves``: the
    example batch's leaves.
    """

    step: StepGraph
    state: list[torch.Tensor]
    landing: list[Slot]
    slots: list[Slot]
    leaves: list[Any]


class _Inputs:
    """The graph's inputs as they are collected: specs, live tensors, and which of them rebuild which tensor."""

    def __init__(self) -> None:
        self.specs: list[InputSpec] = []
        self.live: list[torch.Tensor] = []

    def add(self, kind: str, name: str, tensor: torch.Tensor) -> tuple[slice, Wrapping | None]:
        inner, wrapping = unwrap(tensor.detach())
        start = len(self.live)
        for i, t in enumerate(inner):
            self.specs.append(InputSpec(kind, name if len(inner) == 1 else f"{name}#{i}"))
            self.live.append(t)
        return slice(start, len(self.live)), wrapping


def trace_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
) -> Traced:
    """Capture one training step of ``model``.

    The model's tensors may be real, fake, or on the meta device (these are traced as CPU tensors). Nothing is
    computed and the model is unchanged afterwards; only missing optimizer state is created, as eager's first step
    would. Raises `CaptureError` with module path and source line for what cannot be captured.
    """
    start = time.perf_counter()
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        raise CaptureError("autocast is on around capture, which would reach the optimizer; enter it inside loss_fn")
    slots = model_slots(model)
    leaves, spec = flatten_batch(batch)
    _check_microbatches(leaves, accumulate)
    inputs = _Inputs()
    entries = [inputs.add("parameter" if s.is_parameter else "buffer", s.name, s.tensor) for s in slots]
    update = AdamWUpdate(optimizer) if optimizer is not None else None
    groups = _optimizer_inputs(update, slots, inputs) if update else []
    n_state = len(inputs.live)
    tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    leaf_entries = {i: inputs.add("batch", f"batch.{i}", leaves[i]) for i in tensor_leaves}

    mode = _mode_of(inputs.live)
    fakes = [_fake(mode, t) for t in inputs.live]
    recorder = Recorder(model)
    outputs: list[OutputSpec] = []
    landing: list[Slot] = []

    def traced(*flat: torch.Tensor) -> list[torch.Tensor]:
        tensors = []
        for slot, (where, wrapping) in zip(slots, entries, strict=True):
            tensor = wrap(flat[where], wrapping)
            tensors.append(tensor.requires_grad_(slot.tensor.requires_grad))
        batch_leaves = list(leaves)
        for i, (where, wrapping) in leaf_entries.items():
            batch_leaves[i] = wrap(flat[where], wrapping)
        wanted = [i for i, slot in enumerate(slots) if slot.tensor.requires_grad]
        watch = recorder.watch_graph(compat.graph_of_trace())
        with watch, swapped(slots, tensors), recorder.watch_modules(), torch.enable_grad():
            microbatches = _microbatches(batch_leaves, spec, accumulate)
            params = [(slots[i].path, tensors[i]) for i in wanted]
            loss, grads = _loss_and_grads(recorder, loss_fn, model, microbatches, params)
            assigned = [(t, holder[key]) for s, t in zip(slots, tensors, strict=True) for holder, key in s.places]
            _refuse_kept_tensors(model)
        with recorder.watch_graph(compat.graph_of_trace()), recorder.in_phase("optimizer"), torch.no_grad():
            for old, new in assigned:
                if new is not old:
                    old.copy_(new)
            by_index = {i: g for i, g in zip(wanted, grads, strict=True) if g is not None}
            results = [loss]
            outputs.append(OutputSpec("loss", "loss"))
            if max_grad_norm is not None:
                by_index, norm = _clip(by_index, max_grad_norm)
                results.append(norm)
                outputs.append(OutputSpec("metric", "grad_norm"))
            by_index = {i: _local(g, tensors[i]) for i, g in by_index.items()}
            updated = _record_update(recorder, update, groups, by_index, flat) if update else set()
            for i, grad in by_index.items():
                if i not in updated:
                    landing.append(slots[i])
                    outputs.append(OutputSpec("grad", slots[i].name))
                    results.append(grad)
        return results

    with torch.no_grad(), mode, compat.trace_context(mode), compat.dispatch_flex_attention(), _explained(recorder):
        module = compat.trace(traced, fakes)
    step = StepGraph(module, inputs.specs, outputs, repeated_blocks(model), _mesh_of(slots))
    _refuse_constants_with_gradient(step)
    keep = _name_inputs(step, n_state)
    step.capture_s = time.perf_counter() - start
    return Traced(step, [inputs.live[i] for i in keep if i < n_state], landing, slots, leaves)


def _optimizer_inputs(update: AdamWUpdate, slots: Sequence[Slot], inputs: _Inputs) -> list[dict[str, Any]]:
    """Add the optimizer's state and learning rates to the inputs; per group, what `_record_update` needs."""
    index_of = {id(slot.tensor): i for i, slot in enumerate(slots)}
    groups = [{"options": g, "members": [], "paths": {}, "lr": None} for g in update.optimizer.param_groups]
    for group_index, param in update.owned():
        if id(param) not in index_of:
            raise CaptureError(
                f"the optimizer holds a parameter of shape {list(param.shape)} that the model does not; "
                "build the optimizer from model.parameters()"
            )
        if not param.requires_grad:
            continue
        group = groups[group_index]
        state = update.init_state(param, group["options"])
        i = index_of[id(param)]
        where = {key: inputs.add("optimizer", f"{slots[i].name}.{key}", state[key])[0] for key in update.keys}
        group["members"].append((i, where, state))
        group["paths"][i] = slots[i].path
    for group_index, group in enumerate(groups):
        if group["members"]:
            first = inputs.live[group["members"][0][1]["exp_avg"]][0]
            group["lr"], _ = inputs.add("lr", f"lr.{group_index}", update.lr_input(group["options"], first.device))
    # Local tensors of each parameter: the graph's parameter inputs come first, in slot order.
    parts, start = [], 0
    for slot in slots:
        n = len(unwrap(slot.tensor)[0])
        parts.append(slice(start, start + n))
        start += n
    for group in groups:
        group["members"] = [(i, parts[i], where, state) for i, where, state in group["members"]]
    return groups


def _loss_and_grads(
    recorder: Recorder,
    loss_fn: LossFn,
    model: nn.Module,
    microbatches: Iterator[Any],
    params: Sequence[tuple[str, torch.Tensor]],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Mean loss and summed gradients over the microbatches, as ``(loss_fn(model, mb) / n).backward()`` gives them.

    ``params``: (module path, tensor). A parameter that the loss does not reach has the gradient None.
    """
    total: torch.Tensor | None = None
    sums: list[torch.Tensor | None] = [None] * len(params)
    microbatches = list(microbatches)
    for microbatch in microbatches:
        loss = loss_fn(model, microbatch)
        _check_loss(loss)
        if len(microbatches) > 1:
            loss = loss / len(microbatches)
        seed = torch.ones_like(loss)
        recorder.watch_backward(loss)
        with recorder.in_phase("backward"), torch.no_grad():
            grads = torch.autograd.grad(loss, [p for _, p in params], seed, allow_unused=True)
            for i, (grad, (path, _)) in enumerate(zip(grads, params, strict=True)):
                recorder.attribute(path)
                if grad is not None:
                    sums[i] = grad if sums[i] is None else sums[i] + grad
        loss = loss.detach()
        total = loss if total is None else total + loss
    return total, sums


def _microbatches(leaves: Sequence[Any], spec: Any, n: int) -> Iterator[Any]:
    """The batch in ``n`` equal parts along the first dimension of every tensor; other values go to each part."""
    for k in range(n):
        part = []
        for leaf in leaves:
            if n > 1 and isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
                size = leaf.shape[0] // n
                leaf = leaf.narrow(0, k * size, size)
            part.append(leaf)
        yield compat.pytree.tree_unflatten(part, spec)


def _check_microbatches(leaves: Sequence[Any], accumulate: int) -> None:
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} is not allowed; it counts microbatches, 1 or more")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] % accumulate:
            raise ValueError(
                f"accumulate={accumulate} does not divide the batch's first dimension {leaf.shape[0]}; "
                f"try accumulate={max(d for d in range(1, accumulate) if leaf.shape[0] % d == 0)}"
            )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"loss_fn returned a {type(loss).__name__}; it must return a scalar tensor")
    if loss.ndim != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"loss_fn returned a {loss.dtype} tensor of shape {list(loss.shape)}; it must return a floating-point "
            "scalar, such as loss.mean()"
        )
    if loss.grad_fn is None:
        raise CaptureError("the loss depends on no parameter that requires a gradient; check requires_grad and no_grad")


def _clip(grads: dict[int, torch.Tensor], max_norm: float) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Scale gradients to a total 2-norm of at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    values = list(grads.values())
    on_cuda = all(g.device.type == "cuda" for g in values)
    norm = torch.nn.utils.get_total_norm(values, 2.0, foreach=on_cuda or None)
    if hasattr(norm, "full_tensor"):  # DTensor: a partial norm on each rank
        norm = norm.full_tensor()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if on_cuda and not any(compat.is_traceable_wrapper_subclass(g) for g in values):
        clipped = torch.ops.aten._foreach_mul.Tensor(values, scale)
    else:
        clipped = [g * scale for g in values]
    return dict(zip(grads, clipped, strict=True)), norm


def _local(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The local tensor of a gradient, laid out over the mesh as its parameter is."""
    if not compat.is_traceable_wrapper_subclass(grad):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


def _record_update(
    recorder: Recorder,
    update: AdamWUpdate,
    groups: Sequence[dict[str, Any]],
    grads: dict[int, torch.Tensor],
    flat: Sequence[torch.Tensor],
) -> set[int]:
    """Record the optimizer's update of every parameter that has a gradient; the slots updated."""
    paths = {i: path for group in groups for i, path in group["paths"].items()}
    updated: set[int] = set()
    for group in groups:
        members = [m for m in group["members"] if m[0] in grads]
        if not members:
            continue
        update.trace(
            group["options"],
            params=[flat[part][0] for _, part, _, _ in members],
            grads=[grads[i] for i, _, _, _ in members],
            states=[{key: flat[where][0] for key, where in wheres.items()} for _, _, wheres, _ in members],
            live_states=[state for _, _, _, state in members],
            lr=flat[group["lr"]][0],
            paths=[paths[i] for i, _, _, _ in members],
            attribute=recorder.attribute,
        )
        updated |= {i for i, _, _, _ in members}
    return updated


def _mode_of(live: Sequence[torch.Tensor]) -> compat.FakeTensorMode:
    modes = {t.fake_mode for t in live if isinstance(t, compat.FakeTensor)}
    if len(modes) > 1:
        raise CaptureError("the model's fake tensors belong to several fake modes; build it under one")
    return modes.pop() if modes else compat.fake_mode()


def _fake(mode: compat.FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, compat.FakeTensor):
        return tensor.detach()
    if tensor.device.type == "meta":
        with mode:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor, static_shapes=True)


def _mesh_of(slots: Sequence[Slot]) -> Any:
    return next((slot.tensor.device_mesh for slot in slots if hasattr(slot.tensor, "device_mesh")), None)


def _refuse_kept_tensors(model: nn.Module) -> None:
    """A tensor of this step kept in a plain attribute would be stale, and fake, in the next."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, compat.FakeTensor):
                raise CaptureError(
                    f"module {path or 'model'} keeps a tensor of the step in its attribute {key!r}, which a captured "
                    "step cannot do; register it as a buffer"
                )


def _refuse_constants_with_gradient(step: StepGraph) -> None:
    for node in step.graph.find_nodes(op="get_attr"):
        value = getattr(step.module, node.target, None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            user = next(iter(node.users))
            where = provenance(user)
            raise CaptureError(
                f"a tensor of shape {list(value.shape)} that requires a gradient is used in "
                f"{where.path or 'the model'} ({where.source}) but is not one of its parameters; "
                "register it as an nn.Parameter, and use no cached copy of a parameter"
            )


def _name_inputs(step: StepGraph, n_state: int) -> list[int]:
    """Readable names for placeholders; optimizer state that nothing uses is dropped. The indices kept."""
    nodes = step.graph.find_nodes(op="placeholder")
    keep = []
    for i, (node, spec) in enumerate(zip(nodes, step.inputs, strict=True)):
        if spec.kind in ("optimizer", "lr") and not node.users:
            step.graph.erase_node(node)
            continue
        keep.append(i)
        path = spec.name.rpartition(".")[0] if spec.kind in ("parameter", "buffer") else ""
        set_provenance(node, Provenance(path, "input", ""))
        compat.rename_node(node, f"{spec.kind}_{spec.name}")
    step.inputs = [step.inputs[i] for i in keep]
    return keep


@contextlib.contextmanager
def _explained(recorder: Recorder) -> Iterator[None]:
    """Failures of the trace, told in one line with module path and source line."""
    try:
        yield
    except compat.DATA_DEPENDENT_ERRORS as error:
        path = recorder.stack[-1] if recorder.stack else ""
        operator = str(getattr(error, "func", None) or "a data-dependent operator")
        raise CaptureError(
            f"cannot capture {path or 'the model'} at {recorder.last_source}: {operator} needs a tensor's value while "
            "the step is only shapes (.item(), bool(tensor), nonzero and the like); use torch.where or masks"
        ) from error
