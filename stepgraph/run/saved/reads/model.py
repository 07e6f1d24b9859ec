"""What a capture reads of a model, as text: `stepgraph.run.saved.reads.describe` of its modules, tensors and hooks."""

import hashlib

import torch
from torch import nn

from stepgraph import compat
from stepgraph.run.saved.reads.describe import Describer, form_of

#: What of a module is described apart, or is torch's own.
_APART = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}


def _place(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(storage, offset) of a tensor that has memory of its own or shares another's."""
    inner = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if compat.is_traceable_wrapper_subclass(inner) or inner.is_meta or inner.layout is not torch.strided:
        return None
    return compat.storage_key(inner), inner.storage_offset()


def module_names(model: nn.Module) -> dict[int, str]:
    """What each module of ``model`` is called, by its id."""
    return {id(module): f"module {path or 'model'}" for path, module in model.named_modules()}


def describe_hooks(describe: Describer) -> str:
    """The hooks that run with every module of the process. ``describe``: with the names of a model's modules."""
    return describe([list(found.values()) for found in compat.hooks_of_every_module()], "a hook of every module")


def describe_model(model: nn.Module, describe: Describer) -> dict[str, str]:
    """``path.name`` -> text, for every module, parameter, buffer and attribute of ``model``."""
    names = describe.names
    names |= module_names(model)
    for path, module in model.named_modules(remove_duplicate=True):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                names.setdefault(id(tensor), f"tensor {path}.{key}")
    found, storages = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        at = path or "model"
        if names[id(module)] != f"module {at}":
            found[at] = names[id(module)]
            continue
        kind = type(module)
        found[at] = (
            f"{kind.__module__}.{kind.__qualname__} {describe.of_class(kind, at)}{' training' * module.training}"
        )
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            where = f"tensor {path}.{key}"
            same = tensor is None or names[id(tensor)] == where
            found[f"{at}.{key}"] = names[id(tensor)] if not same else "None" if tensor is None else form_of(tensor)
            if tensor is not None and same and (place := _place(tensor)):
                first = storages.setdefault(place[0], where)
                found[f"{at}.{key}"] += f" in {first} at {place[1]}" if first != where else ""
        found[f"{at} holds"] = str(list(module._modules))
        for key, value in vars(module).items():
            if key not in _APART:
                if "hooks" in key and isinstance(value, dict):
                    value = list(value.values())  # the keys count hooks of the whole process
                found[f"{at}.{key}"] = describe(value, f"{at}.{key}")
    return {
        key: text if len(text) < 80 else f"#{hashlib.sha256(text.encode()).hexdigest()}" for key, text in found.items()
    }
