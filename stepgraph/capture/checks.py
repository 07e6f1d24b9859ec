"""What capture refuses, before, during and after the trace: one line each, with module path and source line."""

import contextlib
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import fx, nn

from stepgraph import compat
from stepgraph.capture.batch import has_values, shared_memory
from stepgraph.capture.optimizer import Update
from stepgraph.capture.python.host_random import HostRandom, LineOfDraw
from stepgraph.capture.python.values import counts, is_under_torch
from stepgraph.capture.recorder import Recorder, is_user_file, user_frame
from stepgraph.capture.state import Slot, kept_tensors, named_modules
from stepgraph.errors import CaptureError, MovedError, UnlikeError, unknown_name
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import BatchLeaf


def check_microbatches(leaves: Sequence[Any], accumulate: int) -> None:
    """Raise unless the batch divides into ``accumulate`` microbatches."""
    if not isinstance(accumulate, Integral) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} is not allowed; it counts microbatches, a whole number from 1 on")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] % accumulate:
            raise ValueError(
                f"accumulate={accumulate} does not divide the batch's first dimension {leaf.shape[0]}; "
                f"try accumulate={max(d for d in range(1, accumulate) if leaf.shape[0] % d == 0)}"
            )


def check_alike(alike: bool, accumulate: int) -> None:
    """Raise unless Python would read the same values of every microbatch, which share a graph."""
    if not alike:
        raise UnlikeError(
            f"forward reads values of the batch, such as lengths or grids, that differ between its {accumulate} "
            "microbatches, which run one graph; capture with accumulate=1"
        )


def is_setting(buffer: torch.Tensor) -> bool:
    """Whether Python may read a buffer or frozen parameter, such as a causal mask: not one that takes long to copy."""
    return has_values(buffer) and buffer.numel() <= 1 << 22


def refuse_moving(slot: Slot, moves: bool) -> None:
    """Raise if Python reads a buffer that the step itself changes (``moves``)."""
    if moves:
        raise CaptureError(
            f"forward reads {slot.name} in Python and changes it, which a captured step cannot follow; call the "
            "model once before capture if only its first call does, as for data-dependent initialization; otherwise "
            "use tensor operations, such as torch.where, or pass what the host decides in the batch as a number"
        )


def check_no_parameters(leaves: Sequence[Any], slots: Sequence[Slot]) -> None:
    """Raise if the batch holds a trained parameter of the model: its gradient would miss what the loss does with it."""
    trained = {id(slot.tensor): slot.name for slot in slots if slot.tensor.requires_grad}
    for leaf in leaves:
        if (name := trained.get(id(leaf))) is not None:
            raise CaptureError(f"the batch holds parameter {name} of the model: take it from the model inside loss_fn")


def check_owned(update: Update | None) -> None:
    """Every parameter of the optimizer has memory for each of its elements."""
    for _, param in update.owned() if update else ():
        if _overlaps(param):
            raise CaptureError(
                f"elements of a parameter of shape {list(param.shape)} and strides {list(param.stride())} share "
                "memory, and an update in place depends on their order; register a contiguous() copy of it"
            )


def foreign(update: Update | None, slots: Sequence[Slot]) -> torch.Tensor | None:
    """A parameter of the optimizer that is none of ``slots``."""
    known = {id(slot.tensor) for slot in slots}
    return next((param for _, param in (update.owned() if update else ()) if id(param) not in known), None)


def refuse_foreign(param: torch.Tensor) -> NoReturn:
    """Raise for a parameter of the optimizer that neither the model nor the loss has."""
    raise CaptureError(
        f"the optimizer holds a parameter of shape {list(param.shape)} that the model does not, nor a module that the "
        "loss calls; build the optimizer from model.parameters(), or pass a model that contains the other modules"
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether some of its elements share memory."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    ends = [*itertools.accumulate((stride * (size - 1) for stride, size in dims), initial=1)]
    if tensor.numel() == 0 or all(stride >= end for (stride, _), end in zip(dims, ends, strict=False)):
        return False  # each dimension steps over what those of smaller strides reach
    if dims[0][0] == 0:
        return True
    with compat.without_modes():
        places = torch.zeros(ends[-1], dtype=torch.bool)
        places.as_strided(tensor.shape, tensor.stride()).fill_(True)
        return int(places.sum()) < tensor.numel()


def check_arguments(model: Any, loss_fn: Any, batch: Any, optimizer: Any) -> None:
    """Raise unless each argument of ``capture`` has the right type."""
    places = "capture takes (model, loss_fn, batch, optimizer)"
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is {_kind(model)}, not an nn.Module; {places}")
    if type(loss_fn).__module__ == nn.MSELoss.__module__ or not callable(loss_fn):
        raise CaptureError(
            f"loss_fn is {_kind(loss_fn)}, not a function of (model, batch); {places}, such as "
            "loss_fn=lambda model, batch: criterion(model(batch['x']), batch['y'])"
        )
    if isinstance(batch, (nn.Module, torch.optim.Optimizer)) or (callable(batch) and not isinstance(batch, Mapping)):
        raise CaptureError(f"the batch is {_kind(batch)}; {places}, and the batch holds tensors and plain values")
    for one in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        if one is not None and not isinstance(one, torch.optim.Optimizer):
            fix = f"; pass {one.__name__}(model.parameters())" if isinstance(one, type) else ""
            raise CaptureError(f"the optimizer is {_kind(one)}, not a torch.optim.Optimizer; {places}{fix}")


def check_signature(loss_fn: Any, model: nn.Module, batch: Any) -> None:
    """Raise unless ``loss_fn`` can be called with (model, batch)."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return
    try:
        signature.bind(model, batch)
    except TypeError as error:
        raise CaptureError(f"loss_fn{signature} cannot be called as loss_fn(model, batch): {error}") from None


def _kind(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"


def check_modules(model: nn.Module) -> None:
    """Raise for modules whose forward cannot be traced, and for lazy modules without shapes."""
    for path, module in named_modules(model):
        if any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            raise CaptureError(
                f"module {path or 'model'} ({type(module).__name__}) takes its shape from its first batch; run the "
                "model once before the capture"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module {path or 'model'} is a scripted or traced module ({type(module).__name__}), whose tensors and "
                "code cannot be traced; capture the module that torch.jit was given"
            )


def check_layouts(slots: Sequence[Slot]) -> None:
    """Raise for parameters and buffers that a graph cannot take: sparse, nested and quantized ones."""
    for slot in slots:
        kind = "quantized" if slot.tensor.is_quantized else "nested" if slot.tensor.is_nested else ""
        if kind or slot.tensor.layout != torch.strided:
            raise CaptureError(
                f"{slot.name} is a {kind or slot.tensor.layout} tensor, and a graph takes dense ones: keep its dense "
                "parts (values, indices, scales) as buffers and compute with these, or register it as to_dense() or "
                "dequantize() gives it"
            )


def check_batch(leaves: Sequence[Any]) -> None:
    """Raise for tensors of the batch that were computed with gradients: eager's backward would reach their makers."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            raise CaptureError(
                f"the batch holds a tensor of shape {list(leaf.shape)} computed from a tensor that requires a "
                "gradient, and backward ends at the batch; compute it inside loss_fn, or give detach() of it"
            )


def check_max_norm(max_grad_norm: float | None) -> None:
    """Raise unless ``max_grad_norm`` is None or above 0."""
    number = isinstance(max_grad_norm, Real | torch.Tensor) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (number and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm={max_grad_norm!r} must be a number above 0; pass None for no clipping")


def skips_nonfinite(on_nonfinite: str, optimizer: Any) -> bool:
    """Whether ``on_nonfinite`` leaves updates out. Raises for another value, and where no update is in the graph."""
    allowed = ("update", "skip")
    if on_nonfinite not in allowed:
        raise unknown_name("on_nonfinite", on_nonfinite, allowed)
    if on_nonfinite == "skip" and optimizer is None:
        raise ValueError("on_nonfinite='skip' skips the optimizer's update, and there is no optimizer; pass optimizer=")
    return on_nonfinite == "skip"


def check_loss(loss: Any) -> None:
    """Raise unless ``loss`` is a plain floating-point scalar that requires a gradient."""
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"loss_fn returned a {type(loss).__name__}; it must return a scalar tensor")
    if loss.ndim != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"loss_fn returned a {loss.dtype} tensor of shape {list(loss.shape)}; it must return a floating-point "
            "scalar, such as loss.mean()"
        )
    if compat.is_traceable_wrapper_subclass(loss):
        raise CaptureError(
            f"loss_fn returned a {type(loss).__name__}; return a plain tensor, such as loss.full_tensor()"
        )
    if loss.grad_fn is None and loss.requires_grad:
        raise CaptureError("the loss is itself a parameter; return a value computed from it, such as parameter * 1.0")
    if loss.grad_fn is None:
        raise CaptureError("the loss depends on no parameter that requires a gradient; check requires_grad and no_grad")


def without_host_random(recorder: Recorder, call: Callable[[], Any], before: HostRandom | None = None) -> Any:
    """What ``call`` returns. Raise if it draws random numbers on the host, which the graph would keep for ever.

    ``before``: the generators' states before the call; `Reads` adds the generators that it finds. Default: the model's.
    """
    before = before or HostRandom(recorder.model)
    result = call()
    moved = before.moved()
    if not moved:
        return result
    before.restore()
    with LineOfDraw(before, is_user_file, recorder.stack) as line, contextlib.suppress(Exception):
        call()
    before.restore()
    masks = getattr(getattr(recorder.model, "config", None), "apply_spec_augment", False)
    raise MovedError(
        f"{line.path or 'the model'}{f' ({line.source})' if line.source else ''} draws numbers from "
        f"{' and '.join(moved)}, which would be the same in every step; draw them with torch, or outside and pass them "
        f"in the batch{'; without SpecAugment: model.config.apply_spec_augment = False' if masks else ''}"
    )


def refuse_modes() -> None:
    """Raise inside ``detect_anomaly``, ``inference_mode`` or a `ModuleTracker`, which a captured step cannot serve."""
    if compat.tracks_modules():
        raise CaptureError(
            "FlopCounterMode (or another ModuleTracker of torch) is on, and a captured step does not run its hooks; "
            "capture and call the step outside of it, and count an eager step"
        )
    if torch.is_inference_mode_enabled():
        raise CaptureError(
            "torch.inference_mode is on, and tensors made in it cannot be used for training; capture and call the step "
            "outside of it"
        )
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "torch.autograd.detect_anomaly is on, and a captured step has no autograd backward to check; "
            "switch it off, or look for NaN in eager mode"
        )


def refuse_draws(before: HostRandom, what: str) -> None:
    """Raise if ``what`` has drawn random numbers on the host since ``before``."""
    if moved := before.moved():
        before.restore()
        raise MovedError(
            f"{what} draws numbers from {' and '.join(moved)}, which would be the same in every step; draw them with "
            "torch, or in the loss function"
        )


def refuse_buffers_as_numbers(read: Iterable[torch.Tensor], slots: Sequence[Slot]) -> None:
    """Raise if an optimizer's step has ``read`` a tensor of the model on the host, which forward may write before."""
    names = {compat.storage_key(slot.tensor): slot.name for slot in slots if not slot.is_parameter}
    for name in filter(None, (names.get(compat.storage_key(tensor)) for tensor in read)):
        raise CaptureError(
            f"the optimizer's step reads {name} of the model as a number, and a captured step would use its value "
            "from before forward; keep it in the state of a parameter, or set a group's option between steps"
        )


def refuse_metrics_of_stages(reported: Iterator[str], staged: bool) -> None:
    """Raise for metrics of a model that is cut into the stages of a pipeline."""
    if staged and (name := next(reported, "")):
        raise CaptureError(
            f"{name} is reported in a pipeline, where each rank has a part of the model; "
            "report it from end_of_step, or train without pp"
        )


def refuse_own_backward(params: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise if loss_fn has run backward itself."""
    if any(param.grad is not None for _, param in params):
        raise CaptureError(
            "loss_fn calls backward(), whose gradients a captured step would lose; return the loss, and take gradients "
            "that the loss itself needs by torch.autograd.grad(..., create_graph=True)"
        )


def refuse_parts(parts: Sequence[torch.Tensor], path: str, exact: int) -> None:
    """Raise if eager adds up ``parts``, gradients of a parameter of module ``path``, one by one to those of earlier
    microbatches, of which all are to have its bits if ``exact`` is above 1."""
    if len(parts) > 1 and exact > 1:
        raise CaptureError(
            f"a parameter of module {path or 'model'} gets {len(parts)} gradients from calls of backward() in the "
            "backward of a torch.autograd.Function, which eager adds to those of earlier microbatches one by one; "
            "capture with accumulate=1, or passes that round differently"
        )


def refuse_replaced(before: Mapping[str, nn.Module], model: nn.Module) -> None:
    """Raise if forward has replaced, added or removed modules; ``before``: by their paths."""
    now = dict(model.named_modules())
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) is not now.get(path):
            raise CaptureError(
                f"forward replaces module {compat.uncompiled_path(path)}; a captured step keeps the original modules; "
                "run the model once before the capture"
            )


def refuse_data_assigned(slots: Sequence[Slot], tensors: Sequence[torch.Tensor], before: Sequence[int]) -> None:
    """Raise if forward gave a tensor of the model other memory. ``before``: `storages` of ``tensors`` before it ran."""
    for slot, now, was in zip(slots, storages(tensors), before, strict=True):
        if now != was:
            raise CaptureError(
                f"forward assigns {slot.name}.data, and a captured step keeps its state in the same memory; write in "
                "place with .data.copy_(...), or, if only the first call assigns it, as bitsandbytes' layers cast "
                "their bias, call the model once before the capture; instead of load_in_8bit, give load_in_4bit"
            )


def refuse_batch_in_buffers(held: Sequence[tuple], of_batch: Sequence[torch.Tensor], exact: bool) -> None:
    """Raise, or without ``exact`` warn, if forward has put memory of the batch itself into a buffer: what the caller
    writes there later is the buffer's in eager. ``held``: (slot, its stand-in, what is held)."""
    memory = set(storages(of_batch)) - {0}
    for slot, old, new in held:
        if new is not old and isinstance(new, torch.Tensor) and storages([new])[0] in memory:
            fix = "which the caller may overwrite later; assign a clone()"
            _refuse(f"forward stores a tensor of the batch in {slot.name}, {fix}", exact)


def refuse_attributes_set(slots: Sequence[Slot], tensors: Sequence[torch.Tensor], exact: bool) -> None:
    """Raise, or without ``exact`` warn, if forward has set an attribute of a tensor of the model."""
    for slot, tensor in zip(slots, tensors, strict=True):
        for name in compat.attributes_set(tensor, slot.tensor):
            fix = "keep what the next step is to read in a buffer, or set it before"
            _refuse(f"forward sets {slot.name}.{name}, which a captured step does not change; {fix}", exact)


def refusing_facts(
    recorder: Recorder,
    slots: Sequence[Slot],
    tensors: Sequence[torch.Tensor],
    flat: Sequence[torch.Tensor],
    batch: Iterable[slice],
) -> contextlib.AbstractContextManager[None]:
    """Inside, `CaptureError` is raised for what a trace does not know of eager's tensors: how often they were written,
    of what they are views, what gradient a parameter has from other steps, and what forward gives other memory.

    ``tensors``: the model's, in its ``slots``. ``flat``: the graph's inputs; ``batch``: the batch's among them.
    """
    own = {id(t): slot for t, slot in zip(tensors, slots, strict=True)}
    of_batch = set(storages([t for where in batch for t in flat[where]]))
    of_inputs = of_batch | set(storages(flat))

    def ask(tensor: Any, name: str, file: str) -> None:
        if not counts(file):
            return
        slot = own.get(id(tensor))
        if slot and name == "grad" and not slot.tensor.requires_grad and slot.tensor.grad is None:
            slot.asked = True  # a moving average that also takes gradients, where it has some
            return
        if name.startswith("grad") and slot:
            what, fix = f"uses .{name[:4]} of a parameter", "return the loss alone, or keep what it needs in a buffer"
        elif name == "data =" and id(tensor) not in own:  # of the model's own: `refuse_data_assigned`
            what, fix = "assigns .data of a tensor", "write in place, as by .copy_(...), or assign the result to a name"
        elif name in ("__dict__", "__dict__ =", "__dir__"):
            name = "dir(tensor)" if name == "__dir__" else "tensor.__dict__"
            what, fix = f"asks for {name}", "name the attributes that it needs, as by getattr"
        elif name == "storage().device":
            what, fix = "asks for the device of a tensor's storage", "ask the tensor for its device"
        elif name == "is_set_to":
            what, fix = "asks for .is_set_to", "pass the decision in the batch"
        elif name in ("_version", "_base", "_is_view") and storages([tensor])[0] in of_inputs:
            what, fix = f"asks for .{name} of an input of the step", "pass the decision in the batch"
        elif name in ("storage().nbytes", "storage().size") and tensor._cdata in of_batch:
            what, fix = "asks for the size of the memory of the batch", "ask the tensor for .nbytes, or pass it"
        elif name in ("storage_offset", "is_shared") and storages([tensor])[0] in of_batch:
            what, fix = f"asks for .{name}() of the batch", "pass a clone(), or pass the decision in the batch"
        else:
            return
        place = recorder.where(sys._getframe(2))
        raise CaptureError(f"{place} {what}, which a captured step does not follow; {fix}")

    return compat.facts_of_fake_tensors(ask, counts, is_under_torch)


def refusing_settings(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Inside, `CaptureError` is raised where forward changes a setting of torch: operators of a graph would run with
    the setting of their calls."""

    def refuse(name: str) -> None:
        raise CaptureError(
            f"{recorder.where(sys._getframe(2))} changes torch's setting of {name}, and the operators of a captured "
            "step run with the setting of its call; set it before, and give dtypes to the functions that make tensors"
        )

    return compat.kept_settings(refuse)


def storages(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each of ``tensors`` lies; 0 for wrappers."""
    return [0 if compat.is_traceable_wrapper_subclass(t) else compat.storage_key(t) for t in tensors]


def refuse_sparse(grad: torch.Tensor, path: str) -> None:
    """Raise if a parameter's gradient is sparse."""
    if grad.layout != torch.strided:
        raise CaptureError(
            f"module {path or 'model'} gives its parameter a sparse gradient ({grad.layout}); a captured step holds "
            "dense ones, use sparse=False"
        )


def refusing_scalers(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Inside, a loss that a ``GradScaler`` scales is refused: its scale changes, and nothing divides by it."""

    def refuse(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if not scaler.is_enabled():
            return outputs
        path = recorder.stack[-1] if recorder.stack else "loss_fn"
        raise CaptureError(
            f"{path} ({user_frame(sys._getframe(1))}) scales by a GradScaler, whose scale and skipped steps a "
            "captured step does not have; train in bf16, which needs none, and return the unscaled loss"
        )

    return compat.replaced(torch.amp.GradScaler, scale=refuse)


def refusing_conversions(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Inside, ``module.to(...)`` and the like are refused where they change a tensor of the model, and else do nothing:
    torch would assign each tensor's ``data``, also where it is the same."""

    def apply(plain: Callable, module: nn.Module, convert: Callable, recurse: bool) -> nn.Module:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        if not any(map(compat.is_fake, tensors)):
            return plain(module, convert, recurse)
        for tensor in tensors:
            if (new := convert(tensor)) is not tensor:
                raise CaptureError(
                    f"{recorder.where(sys._getframe(2))} turns a {tensor.dtype} tensor of {type(module).__name__} on "
                    f"{tensor.device} into {new.dtype} on {new.device} in forward, and a captured step cannot change "
                    "the form of its state; convert it before, or run the model once before the capture"
                )
        return module

    return compat.conversions_of_modules(apply)


def kept_of_step(model: nn.Module, known: set[int]) -> str:
    """Where modules keep tensors of the step in plain attributes: each call is to write them before it reads them,
    which a second trace shows. Raise for one in a new buffer, which is the state of later steps."""
    kept = [one for one in kept_tensors(model) if one.id not in known]
    for one in kept:
        if one.is_state:
            raise CaptureError(
                f"forward puts a tensor of the step into {one.place}, where there was none, which a captured step "
                "cannot do; register that buffer before, with a tensor of its form"
            )
    places = list(dict.fromkeys(one.place for one in kept))
    return ", ".join(places[:4]) + f" and {len(places) - 4} more places" * (len(places) > 4)


@contextlib.contextmanager
def refusing_kept(kept: str) -> Iterator[None]:
    """Raise a failure inside, in a second trace, as a refusal of what the first one ``kept``."""
    try:
        yield
    except Exception as error:
        if not kept:
            raise
        raise CaptureError(
            f"forward stores tensors of the step in {kept}, and its next call reads one, which a captured step cannot "
            "do; register it as a buffer with a first value, or run the model once before if it is made only once"
        ) from error


def warn_of_kept(kept: str) -> None:
    """Say that a captured step leaves what modules keep."""
    if kept:
        warnings.warn(
            f"forward stores tensors of the step in {kept}, and a captured step does not update these: read them "
            "in the loss, or report them by stepgraph.metric",
            stacklevel=2,
        )


def refuse_layouts(step: StepGraph) -> None:
    """Raise if the graph makes a tensor that is not dense: passes and compilers read strides."""
    for node in step.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise CaptureError(
                f"{provenance(node).place} makes a {value.layout} tensor, and a graph takes dense ones: use "
                "to_dense(), or index_add and scatter for the values of a sparse one"
            )


def refuse_batch_keys(before: Mapping[str, Any], after: Mapping[str, Any], exact: bool) -> None:
    """Raise, or without ``exact`` warn, if the loss has put something into its batch: the caller's keeps what it has.
    ``before``, ``after``: leaves by name. What it takes out, as with ``pop``, the caller's keeps."""
    put = next((name for name, leaf in after.items() if name not in before or before[name] is not leaf), None)
    if put is not None:
        fix = "begin loss_fn with batch = dict(batch), or copy.copy(batch), and report values by stepgraph.metric"
        _refuse(f"loss_fn sets {put}, and a captured step does not change the caller's batch; {fix}", exact)


def refuse_unseen(unseen: Mapping[str, str], exact: bool) -> None:
    """Raise, or without ``exact`` warn, about Python values that the step read and later calls cannot compare."""
    fix = "pass what is read of it in the batch, or hold it in a tensor"
    for path, why in unseen.items():
        _refuse(f"the step reads {path}, a {why}, and a captured step would keep its current value; {fix}", exact)


def _refuse(message: str, exact: bool) -> None:
    if exact:
        raise CaptureError(message)
    warnings.warn(message, stacklevel=3)


def refuse_hidden_writes(step: StepGraph, leaves: Sequence[Any]) -> None:
    """Raise if forward or backward writes into memory that another tensor reaches and the graph does not know: through
    NumPy or DLPack, or as a constant from outside that is a view of an input. ``leaves``: the batch's."""
    live: dict[fx.Node, tuple[str, Any]] = {}
    for (node, what), spec in zip(step.bound(), step.inputs, strict=True):
        if isinstance(what, BatchLeaf):
            live[node] = "a tensor of the batch", leaves[what.leaf] if what.leaf < len(leaves) else None
        else:
            live[node] = f"{what.kind} {what.name}", spec.tensor
    for node in step.graph.find_nodes(op="get_attr"):
        live[node] = "one from outside the model's state", getattr(step.module, node.target)
    pairs = shared_memory([tensor for _, tensor in live.values()])
    aliases, nodes = Aliases(step.graph) if pairs else None, list(live)
    for pair in pairs:
        roots = {aliases.root(nodes[i]): nodes[i] for i in pair[:2]}
        for root, node in roots.items() if len(roots) > 1 else ():
            if any(
                phase_of(n) != "optimizer" for n, at in aliases.position.items() if at in aliases.writes.get(root, ())
            ):
                other = next(live[one] for one in roots.values() if one is not node)
                raise CaptureError(
                    f"the step writes into {live[node][0]}, whose memory {other[0]}, of shape {list(other[1].shape)}, "
                    "shares as a view or through NumPy or DLPack, which a graph does not see; clone() one of them, or "
                    "register both as buffers that are views of one tensor"
                )


def refuse_fake_constants(step: StepGraph) -> None:
    """Raise if the graph reads a fake tensor that the trace did not record: it would never have a value."""
    for node in step.graph.find_nodes(op="get_attr"):
        value = getattr(step.module, node.target)
        inside = list(value.modules()) if isinstance(value, nn.Module) else []
        held = [
            value,
            *(t for m in inside for t in vars(m).values()),
            *(t for m in inside for t in (*m._parameters.values(), *m._buffers.values())),
        ]
        if any(map(compat.is_fake, held)):
            place = provenance(next(iter(node.users))).place
            raise CaptureError(
                f"{place} reads a tensor of the step that the trace did not see: one that another thread computes, "
                "whose modules must be called one after the other, or one that FlexAttention's score_mod or mask_mod "
                "takes from outside; pass that as an argument"
            )
