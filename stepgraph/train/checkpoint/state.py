"""The content of a checkpoint, in memory: model and optimizer tensors by name, JSON for the rest, the RNG streams.

Every large tensor gets one stable name (``model.layers.0.wq.weight``, ``optimizer.layers.0.wq.weight.exp_avg``) and
goes through ``torch.distributed.checkpoint``; everything else becomes JSON. torch's ``set_optimizer_state_dict`` would
run ``optimizer.step()`` and replace tensors whose addresses a captured step keeps: here a saved layout says which state
to create, and existing tensors are filled in place.
"""

import base64
import random
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgraph import compat
from stepgraph.parallel import layouts

T = TypeVar("T")

# Names that torch.compile and activation checkpointing insert; wrapped and plain models share checkpoints.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# How torch.optim computes the update, not what it computes: this run's own choice holds.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


# ---- values as JSON, exactly ----


def encode(value: object, where: str) -> object:
    """JSON form of numbers, strings, None, lists, tuples, dicts with string keys, and small tensors, exact to the bit.

    Errors: ValueError that names the place (``where``) of a value of any other type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode(list(value), where)}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
        return {"$tensor": data, "dtype": _dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    kind = "dict, with keys that are not plain strings" if isinstance(value, dict) else type(value).__name__
    raise ValueError(
        f"{where} has type {kind}: a checkpoint takes numbers, strings, None, lists, tuples, dicts with string keys "
        f"and tensors; convert it in state_dict()"
    )


def decode(value: object) -> object:
    """The inverse of :func:`encode`; tensors come back on the CPU."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tuple" in value:
        return tuple(decode(item) for item in value["$tuple"])
    if "$tensor" in value:
        data, dtype = bytearray(base64.b64decode(value["$tensor"])), getattr(torch, value["dtype"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    return {key: decode(item) for key, item in value.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- model ----


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live parameters and persistent buffers by fully qualified name; a tied tensor once, under its first name.

    Errors: ValueError for extra state that is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if not isinstance(value, Tensor):
            raise ValueError(f"model state {name!r} is a {type(value).__name__}: only tensors fit; make it a buffer")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


class Trim:
    """``trim(name, tensor)``: a parameter of ``model``, or optimizer state laid out like it, without the padding of its
    shards, so that what is saved does not depend on the mesh. A view: reading into it fills the tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._padded = {name: layout for name, layout in layouts(model).items() if layout.padded}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        layout = self._padded.get(name)
        return tensor if layout is None or not tensor.dim() else layout.without_padding(tensor.detach())


def describe_tensors(tensors: dict[str, Tensor]) -> dict[str, list]:
    """``{name: [shape, dtype]}`` in JSON form; for a DTensor the global shape, so the same on any mesh."""
    return {name: [list(tensor.shape), _dtype_name(tensor.dtype)] for name, tensor in tensors.items()}


def first_difference(saved: dict[str, list], here: dict[str, list]) -> str:
    """Describes the first tensor whose name, shape or dtype differs between a checkpoint and a model."""
    for name, (shape, dtype) in saved.items():
        if name not in here:
            return f"{name!r} with shape {tuple(shape)} is in the checkpoint and not in the model"
        if here[name] != [shape, dtype]:
            live_shape, live_dtype = here[name]
            return (
                f"{name!r} has shape {tuple(shape)} {dtype} in the checkpoint and "
                f"{tuple(live_shape)} {live_dtype} in the model"
            )
    name, (shape, _) = next((name, entry) for name, entry in here.items() if name not in saved)
    return f"{name!r} with shape {tuple(shape)} is in the model and not in the checkpoint"


# ---- optimizer ----


def describe_optimizers(
    optimizer: torch.optim.Optimizer | list, names: dict[int, str], trim: Trim
) -> tuple[dict | list, dict[str, Tensor]]:
    """`describe_optimizer` of one optimizer, or a list of the layouts of several, which share no parameter."""
    layouts, tensors = zip(*(describe_optimizer(one, names, trim) for one in _several(optimizer)), strict=True)
    whole = list(layouts) if isinstance(optimizer, list) else layouts[0]
    return whole, {name: tensor for some in tensors for name, tensor in some.items()}


def _several(given: T | list[T]) -> list[T]:
    return given if isinstance(given, list) else [given]


def plan_optimizers(
    optimizer: torch.optim.Optimizer | list, names: dict[int, str], layout: dict | list, trim: Trim
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """`plan_optimizer` of one optimizer or of several."""
    here, saved = _several(optimizer), _several(layout)
    if len(here) != len(saved):
        kinds = " and ".join(one["class"] for one in saved)
        raise ValueError(
            f"the checkpoint's optimizer is {kinds} and this run's is {' and '.join(type(o).__name__ for o in here)}; "
            f"use {kinds}"
        )
    plans = [plan_optimizer(one, names, its, trim) for one, its in zip(here, saved, strict=True)]

    def restore() -> None:
        for _, finish in plans:
            finish()

    return {name: tensor for targets, _ in plans for name, tensor in targets.items()}, restore


def absent_names(model: nn.Module) -> set[str]:
    """The parameters that other stages of a pipeline have, by name: they are on the meta device here."""
    return {name for name, tensor in model_tensors(model).items() if tensor.is_meta}


def join_optimizers(layouts: list, names: list[str]) -> dict | list:
    """The layout of the whole model's optimizer, or list of several, from the layouts of all ranks of a pipeline.
    ``names``: of the model's tensors, in its order."""
    if isinstance(layouts[0], list):
        return [join_optimizers(list(each), names) for each in zip(*layouts, strict=True)]
    joined = {"class": layouts[0]["class"], "groups": [], "state": {}}
    for groups in zip(*(layout["groups"] for layout in layouts), strict=True):
        members = {name for group in groups for name in group["params"]}
        joined["groups"].append({"params": [n for n in names if n in members], "options": groups[0]["options"]})
    for layout in layouts:
        joined["state"] |= layout["state"]
    return joined


def without(layout: dict | list, absent: set[str]) -> dict | list:
    """A saved ``layout`` of an optimizer, or several, without parameters that are not on this rank."""
    if isinstance(layout, list):
        return [without(one, absent) for one in layout]
    groups = [{**group, "params": [n for n in group["params"] if n not in absent]} for group in layout["groups"]]
    return {**layout, "groups": groups}


def describe_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[int, str], trim: Trim
) -> tuple[dict, dict[str, Tensor]]:
    """The optimizer's JSON layout (class, groups, one entry per state value) and its live state tensors by name.

    ``names`` maps ``id(parameter)`` to its name. Errors: ValueError for a parameter that the model does not have.
    """
    layout: dict = {"class": type(optimizer).__name__, "groups": [], "state": {}}
    tensors: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        members = _group_names(group, index, names)
        options = {key: value for key, value in group.items() if key != "params"}
        layout["groups"].append({"params": members, "options": encode(options, f"optimizer group {index}")})
        for name, param in zip(members, group["params"], strict=True):
            slots: dict[str, dict] = {}
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    value = trim(name, value)
                    # `host`: kept on the CPU although the parameter is not, as torch.optim does with `step`.
                    host = value.device.type == "cpu" and param.device.type != "cpu"
                    slots[key] = {"shape": list(value.shape), "dtype": _dtype_name(value.dtype), "host": host}
                    tensors[_slot_name(name, key)] = value
                else:
                    slots[key] = {"value": encode(value, f"optimizer state {key!r} of {name!r}")}
            if slots:
                layout["state"][name] = slots
    return layout, tensors


def plan_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[int, str], layout: dict, trim: Trim
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Tensors to read the saved state into, and a function to call once they are read, which completes the restore.

    Existing state is read in place. State that a never-stepped optimizer lacks is created, and given to the optimizer
    only by that function; nothing of the optimizer changes before.
    Errors: ValueError when class or parameter groups differ.
    """
    if layout["class"] != type(optimizer).__name__:
        raise ValueError(
            f"the checkpoint's optimizer is {layout['class']} and this run's is {type(optimizer).__name__}; "
            f"use {layout['class']}"
        )
    if len(layout["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the optimizer has {len(layout['groups'])} parameter groups in the checkpoint and "
            f"{len(optimizer.param_groups)} here; build the same groups"
        )
    targets: dict[str, Tensor] = {}
    state: dict[Tensor, dict] = {}
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, layout["groups"], strict=True)):
        members = _group_names(group, index, names)
        if members != saved["params"]:
            odd = sorted(set(members) ^ set(saved["params"])) or ["the order"]
            raise ValueError(
                f"optimizer group {index} holds other parameters in the checkpoint than here (first difference: "
                f"{odd[0]}); build the same groups"
            )
        for name, param in zip(members, group["params"], strict=True):
            live = optimizer.state.get(param, {})
            state[param] = {}
            for key, slot in layout["state"].get(name, {}).items():
                if "value" in slot:
                    state[param][key] = decode(slot["value"])
                else:
                    whole = trim(name, param).shape
                    state[param][key] = _slot_tensor(live.get(key), slot, group, param, whole)
                    targets[_slot_name(name, key)] = trim(name, state[param][key])

    def restore() -> None:
        for param, slots in state.items():
            optimizer.state.pop(param, None)
            if slots:
                optimizer.state[param] = slots
        for group, saved in zip(optimizer.param_groups, layout["groups"], strict=True):
            _restore_options(group, decode(saved["options"]))

    return targets, restore


def _slot_name(param: str, key: str) -> str:
    return f"optimizer.{param}.{key}"


def _group_names(group: dict, index: int, names: dict[int, str]) -> list[str]:
    for position, param in enumerate(group["params"]):
        if id(param) not in names:
            raise ValueError(
                f"parameter {position} of optimizer group {index}, shape {tuple(param.shape)}, is not in the model; "
                f"build the optimizer from model.parameters()"
            )
    return [names[id(param)] for param in group["params"]]


def _slot_tensor(live: object, slot: dict, group: dict, param: Tensor, whole: torch.Size) -> Tensor:
    """``whole``: the parameter's shape without padding."""
    shape, dtype = torch.Size(slot["shape"]), getattr(torch, slot["dtype"])
    expected = param.shape if shape == whole else shape
    if isinstance(live, Tensor) and live.shape == expected and live.dtype == dtype:
        return live
    if shape == whole and shape:
        # Same strides, and for a DTensor the same mesh, placements and padding (zeros), as the parameter.
        if slot["host"]:  # state that was offloaded: the capture moves it, one parameter after the other
            part = param.to_local() if isinstance(param, DTensor) else param
            there = torch.zeros_like(part, dtype=dtype, device="cpu", requires_grad=False)
            return compat.with_local(param, there) if isinstance(param, DTensor) else there
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    host = slot["host"]
    if not shape and ("fused" in group or "capturable" in group):
        # torch.optim wants `step` on the host, unless the update runs as one kernel or in a CUDA graph.
        host = not (group.get("fused") or group.get("capturable"))
    return torch.empty(shape, dtype=dtype, device="cpu" if host else param.device)


@torch.no_grad()
def _restore_options(group: dict, options: dict) -> None:
    for key, saved in options.items():
        live = group.get(key)
        if key in _IMPLEMENTATION and key in group:
            continue
        if isinstance(live, Tensor):  # a captured step reads this very tensor
            live.copy_(torch.as_tensor(saved))
        elif isinstance(saved, Tensor) and key in group:
            group[key] = saved.item()
        else:
            group[key] = saved


# ---- random numbers ----


def rng_state() -> dict:
    """The default generators of torch (CPU and every CUDA device), numpy and Python, ready for :func:`encode`."""
    numpy_state = np.random.get_state(legacy=False)
    inner = {key: item.tolist() if isinstance(item, np.ndarray) else item for key, item in numpy_state["state"].items()}
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {**numpy_state, "state": inner},
        "python": random.getstate(),
    }


def set_rng_state(state: dict) -> None:
    """Continue every stream of :func:`rng_state`. CUDA devices beyond those present, or those saved, are left out."""
    torch.set_rng_state(state["torch"])
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
