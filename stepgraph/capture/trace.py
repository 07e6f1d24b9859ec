"""Training step -> `StepGraph`: one `make_fx` trace over fake tensors of forward, loss, backward, clip and update."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture import checks, gradients
from stepgraph.capture.fake import fake_mode
from stepgraph.capture.known import KnownValues
from stepgraph.capture.optimizer import AdamWUpdate
from stepgraph.capture.recorder import Recorder
from stepgraph.capture.roles import record_roles
from stepgraph.capture.state import Slot, Wrapping, kept_tensors, model_slots, repeated_blocks, swapped, unwrap, wrap
from stepgraph.errors import CaptureError
from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec, OutputSpec, StepGraph

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
    tensors of their own that the caller fills. ``landing``: the slots whose gradients the graph returns, and how to
    wrap them. ``tensor_leaves``: which leaves of the batch are tensors.
    """

    step: StepGraph
    state: list[torch.Tensor]
    landing: list[tuple[Slot, Wrapping | None]]
    slots: list[Slot]
    tensor_leaves: list[int]


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
    checks.check_microbatches(leaves, accumulate)
    checks.check_max_norm(max_grad_norm)
    inputs = _Inputs()
    entries = [inputs.add("parameter" if s.is_parameter else "buffer", s.name, s.tensor) for s in slots]
    update = AdamWUpdate(optimizer) if optimizer is not None else None
    stateless = update.without_state() if update else []
    groups = _optimizer_inputs(update, slots, inputs) if update else []
    n_state = len(inputs.live)
    tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    leaf_entries = {i: inputs.add("batch", f"batch.{i}", leaves[i]) for i in tensor_leaves}

    mode = _mode_of(inputs.live)
    fakes = [_fake(mode, t) for t in inputs.live]
    recorder = Recorder(model)
    outputs: list[OutputSpec] = []
    landing: list[tuple[Slot, Wrapping | None]] = []
    updated: set[int] = set()

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
        kept_before = kept_tensors(model)
        with (
            watch,
            swapped(model, slots, tensors),
            recorder.watch_modules(),
            torch.enable_grad(),
            KnownValues() as known,
            compat.transformers_sees_values(known.knows),
        ):
            microbatches = _microbatches(batch_leaves, spec, accumulate)
            params = [(slots[i].path, tensors[i]) for i in wanted]
            loss, grads = _loss_and_grads(recorder, loss_fn, model, microbatches, params)
            held = [(s, t, holder[key]) for s, t in zip(slots, tensors, strict=True) for holder, key in s.places]
            checks.refuse_kept(model, {*kept_before, *(id(new) for _, _, new in held)})
        with recorder.watch_graph(compat.graph_of_trace()), recorder.in_phase("optimizer"), torch.no_grad():
            _write_assigned(recorder, held, flat)
            by_index = {i: g for i, g in zip(wanted, grads, strict=True) if g is not None}
            results = [loss]
            outputs.append(OutputSpec("loss", "loss"))
            if max_grad_norm is not None:
                by_index, norm = gradients.clip(by_index, tensors, max_grad_norm)
                results.append(norm)
                outputs.append(OutputSpec("metric", "grad_norm"))
            if update:
                updated.update(_record_update(recorder, update, groups, by_index, flat))
            landed = {i: grad for i, grad in by_index.items() if i not in updated}
            landing.extend((slots[i], entries[i][1]) for i in landed)
            outputs.extend(OutputSpec("grad", slots[i].name) for i in landed)
            results.extend(gradients.unshared(landed.values(), taken=flat))
        return results

    try:
        with (
            torch.no_grad(),
            mode,
            compat.trace_context(mode),
            compat.dispatch_flex_attention(),
            checks.explained(recorder),
        ):
            module = compat.trace(traced, fakes)
    finally:  # eager gives no state to parameters that the loss does not reach
        reached = {id(slots[i].tensor) for i in updated}
        if update:
            update.drop_state(p for p in stateless if id(p) not in reached)
    step = StepGraph(module, inputs.specs, outputs, repeated_blocks(model), _mesh_of(slots))
    checks.refuse_fake_constants(step)
    keep = _name_inputs(step, n_state)
    record_roles(step, recorder.reducing, [slot.tensor for slot in slots])
    step.capture_s = time.perf_counter() - start
    return Traced(step, [inputs.live[i] for i in keep if i < n_state], landing, slots, tensor_leaves)


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
        # The unfused step count lives on the host, and parameters may differ in it.
        count = 0.0 if group["options"]["fused"] else float(state["step"])
        group["members"].append((i, where, count))
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
        group["members"] = [(i, parts[i], where, count) for i, where, count in group["members"]]
    return groups


def _loss_and_grads(
    recorder: Recorder,
    loss_fn: LossFn,
    model: nn.Module,
    microbatches: Iterator[Any],
    params: Sequence[tuple[str, torch.Tensor]],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Mean loss and summed gradients over the microbatches, as ``(loss_fn(model, mb) / n).backward()`` gives them.

    Gradients of DTensors come as their local tensors.

    ``params``: (module path, tensor). A parameter that the loss does not reach has the gradient None.
    """
    total: torch.Tensor | None = None
    sums: list[torch.Tensor | None] = [None] * len(params)
    microbatches = list(microbatches)
    for microbatch in microbatches:
        loss = loss_fn(model, microbatch)
        checks.check_loss(loss)
        if len(microbatches) > 1:
            loss = loss / len(microbatches)
        seed = torch.ones_like(loss)
        recorder.watch_backward(loss, [p for _, p in params])
        with recorder.in_phase("backward"), torch.no_grad():
            grads = torch.autograd.grad(loss, [p for _, p in params], seed, allow_unused=True)
            for i, (grad, (path, param)) in enumerate(zip(grads, params, strict=True)):
                recorder.attribute(path, param)
                if grad is not None:
                    grad = gradients.local(grad, param)
                    sums[i] = gradients.as_accumulated(grad, unwrap(param)[0][0]) if sums[i] is None else sums[i] + grad
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


def _write_assigned(
    recorder: Recorder, held: Sequence[tuple[Slot, torch.Tensor, torch.Tensor]], flat: Sequence[torch.Tensor]
) -> None:
    """Write tensors that forward assigned to buffers into the buffers. ``held``: (slot, its stand-in, what is held)."""
    assigned = [(slot, old, new) for slot, old, new in held if new is not old]
    for slot, old, new in assigned:
        if new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            form = "None" if new is None else _form(new)
            raise CaptureError(
                f"forward replaces {slot.name}, {_form(old)}, by {form}; a captured step cannot change the form of its "
                "state, keep shape, dtype and device"
            )
    values = gradients.unshared([new for _, _, new in assigned], taken=flat)  # one buffer may hold another's old value
    for (slot, old, _), value in zip(assigned, values, strict=True):
        recorder.attribute(slot.path)
        old.copy_(value)


def _form(tensor: torch.Tensor) -> str:
    return f"a {tensor.dtype} tensor of shape {list(tensor.shape)} on {tensor.device}"


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
            live_steps=[count for _, _, _, count in members],
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
    return modes.pop() if modes else fake_mode()


def _fake(mode: compat.FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, compat.FakeTensor):
        return tensor.detach()
    if tensor.device.type == "meta":
        with mode:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor, static_shapes=True)


def _mesh_of(slots: Sequence[Slot]) -> Any:
    return next((slot.tensor.device_mesh for slot in slots if hasattr(slot.tensor, "device_mesh")), None)


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
