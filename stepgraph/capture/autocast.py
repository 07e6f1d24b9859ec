"""Operators whose kernels call other operators, run under the autocast state of their trace.

Autocast reaches inside the kernel of an operator that it has no rule for: a product inside an operator made by
``torch.library.custom_op`` runs in bf16. A graph runs without autocast; the node of such an operator calls one of ours,
with the same schema, that calls it under autocast, and is named after it.
"""

import contextlib
import functools
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stepgraph import compat
from stepgraph.errors import CaptureError

aten = torch.ops.aten
NAMESPACE = "stepgraph_autocast"
_SEPARATOR = "__of__"

#: Operators of torch whose kernels on a CPU or a GPU call others that autocast has rules for. A test looks for more.
CALL_OTHERS = {aten._trilinear.default, aten.affine_grid_generator.default}

#: Namespaces whose other operators call none.
_TORCH = ("aten", "prim", "prims", "_c10d_functional", NAMESPACE)

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def is_reached(target: torch._ops.OpOverload, device: str) -> bool:
    """Whether autocast may reach inside the kernel of ``target``. Our own kernels call nothing on a GPU."""
    known = target.namespace in _TORCH or (target.namespace == "stepgraph" and device != "cpu")
    return target in CALL_OTHERS or not (known or compat.has_autocast_rule(target, device))


def under(target: torch._ops.OpOverload, casts: Mapping[str, torch.dtype]) -> torch._ops.OpOverload:
    """The operator that calls ``target`` under ``casts``: dtypes by type of device."""
    settings = "__".join(f"{kind}_{str(dtype).removeprefix('torch.')}" for kind, dtype in sorted(casts.items()))
    return named(_SEPARATOR.join([settings, *str(target).split(".")]))


@functools.cache
def named(name: str) -> torch._ops.OpOverload:
    """The operator of a name that `under` made. Raises ``AttributeError`` if what it calls is not registered."""
    settings, namespace, packet, overload = name.split(_SEPARATOR)
    target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    pairs = [one.split("_", 1) for one in settings.split("__") if one]
    casts = [(kind, getattr(torch, dtype)) for kind, dtype in pairs]

    checked: set[tuple] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            made = target(*args, **kwargs)
            given = [x for x in compat.pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            form = tuple((x.dtype, x.shape) for x in given)
            if form not in checked and not any(map(compat.is_fake, given)):
                checked.add(form)
                _check(name, fake, made, args, kwargs)
        return made

    def fake(*args: Any, **kwargs: Any) -> Any:
        made = run(*args, **kwargs)
        # torch's fake kernel has no product inside.
        return made.to(dict(casts)[made.device.type]) if target is aten.affine_grid_generator.default else made

    schema = str(target._schema)
    _LIBRARY.define(name + schema[schema.index("(") :], tags=tuple(target.tags))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _check(name: str, fake: Callable, made: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise unless ``fake``, used in the trace, has the dtypes of the real result ``made``."""
    with compat.FakeTensorMode() as mode:
        fakes = compat.pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, dict(kwargs)))
        said = fake(*fakes[0], **fakes[1])
    for real, fake in zip(*map(compat.pytree.tree_leaves, (made, said)), strict=True):
        if isinstance(real, torch.Tensor) and real.dtype != fake.dtype:
            fix = f"end the operator by .to({fake.dtype}), or ask torch.get_autocast_dtype in the fake one"
            if name.split(_SEPARATOR)[1] == "bitsandbytes":
                fix = f"set bnb_4bit_compute_dtype={real.dtype}"
            raise CaptureError(
                f"{'.'.join(name.split(_SEPARATOR)[1:])} gives {real.dtype} under autocast, and its fake "
                f"implementation gives {fake.dtype}; make both give one dtype: {fix}"
            )


class Kept(compat.DispatchMode):
    """Inside, operators that autocast reaches are called by `under`. ``casts``: the autocasts that are on, which
    change; operators that are being dispatched cannot ask."""

    supports_higher_order_operators = True

    def __init__(self, casts: dict[str, torch.dtype]):
        super().__init__()
        self.casts = casts

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        if keyword.iskeyword(func._overloadname):  # random_.from, which no generated code can call
            return under(func, {})(*args, **(kwargs or {}))
        if not self.casts:
            return func(*args, **(kwargs or {}))
        given = [x for x in compat.pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = given[0].device.type if given else "cpu"
        if self.casts.keys() & {device, "cpu"} and is_reached(func, device):
            func = under(func, self.casts)
        here = dict(self.casts)
        try:
            return func(*args, **(kwargs or {}))
        finally:  # the operator may have switched autocast itself, from where it is off
            self.casts.clear()
            self.casts.update(here)
