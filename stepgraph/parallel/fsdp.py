"""FSDP as a parametrization: a parameter is stored as this rank's shard and gathered where the model reads it.

``module.weight`` becomes a property. Reading it redistributes the stored DTensor: one all-gather over ``dp_shard`` in
``param_dtype`` forward, one reduce-scatter of the mean gradient in ``reduce_dtype`` backward. Where ranks hold the same
shard (``dp_replicate``, and ``tp`` for parameters that it does not split) the shard's gradient is then all-reduced.
A trace records these as plain collectives, and passes bucket and move them.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stage 3).
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from stepgraph.models.init import Part, whole_part
from stepgraph.parallel.layout import Layout

_LAYOUTS = "_stepgraph_layouts"
_HELD = "_stepgraph_held"  # gathered parameters by name, inside `gathered_once`
#: Optimizers whose ``state_dict`` has no padding.
_TRUE_SHAPES: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_AWAY = "_stepgraph_away"  # stored parameters by name, while `torch.nn.utils.parametrize` has their place


def unshard(stored: DTensor, layout: Layout) -> torch.Tensor:
    """The parameter as the model reads it: a plain tensor, whole except for tensor parallelism's split."""
    mesh, reduced = layout.mesh, layout.at_rest()
    dtypes = {"forward_dtype": layout.param_dtype, "backward_dtype": layout.reduce_dtype}
    if layout.unreduced() != reduced:
        # Redistributing to where it lies is nothing forward; backward it reduces what comes back partial.
        casts = {} if layout.sharded else dtypes
        local = stored.redistribute(placements=reduced, **casts).to_local(grad_placements=layout.unreduced())
    else:
        local = stored.to_local()
    if mesh.divisor > 1:
        local = _DividedGradient.apply(local, mesh.divisor)
    if not layout.sharded:
        return local if local.dtype == layout.param_dtype else local.to(layout.param_dtype)
    dim, op = layout.shard_dim, "avg" if mesh.shard in mesh.averaged else "sum"
    # Gathered along dimension 0 and then put in place: DTensor's gather of columns has a node for each rank.
    shard = DTensor.from_local(local, mesh.axis(mesh.shard), [Shard(0)], run_check=False)
    whole = shard.redistribute(placements=[Replicate()], **dtypes).to_local(grad_placements=[Partial(op)])
    if dim:
        whole = whole.unflatten(0, (-1, len(local))).movedim(0, dim).flatten(dim, dim + 1)
    return whole.narrow(dim, 0, layout.rows) if layout.padded else whole


class _DividedGradient(torch.autograd.Function):
    """The tensor as it is, its gradient divided by ``divisor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.divisor, None


def parametrize(module: nn.Module, layouts: dict[str, Layout], forward: Callable | None) -> None:
    """Give ``module`` gathering properties for its own parameters in ``layouts``, and ``forward(module, base, *args)``
    around the forward of its class, ``base``.

    The module gets a class of its own, derived from the one it has, under the same name.
    """
    base = type(module)
    members: dict[str, Any] = {name: property(_getter(name)) for name in layouts}
    if forward is not None:
        members["forward"] = lambda self, *args: forward(self, partial(base.forward, self), *args)
    if layouts:
        members |= {"__delattr__": partialmethod(_take_away, base), "register_buffer": partialmethod(_put_back, base)}
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    module.__class__ = type(base.__name__, (base,), members)
    first = not own_layouts(module)
    setattr(module, _LAYOUTS, layouts)
    if layouts and first:
        module.register_state_dict_post_hook(_leave_padding_out)
        module.register_load_state_dict_pre_hook(_take_own_part)


def _take_away(module: nn.Module, base: type, name: str) -> None:
    """``torch.nn.utils.parametrize`` removes a parameter that it has read, as peft does with experts' weights."""
    if name in module._parameters and name in own_layouts(module):
        vars(module).setdefault(_AWAY, {})[name] = module._parameters[name]
    base.__delattr__(module, name)


def _put_back(module: nn.Module, base: type, name: str, tensor: Any, persistent: bool = True) -> None:
    """When it ends it registers what it had read, a gathered one: the shard takes its place again."""
    away = vars(module).get(_AWAY, {})
    if name in away:
        module._parameters[name] = away.pop(name)
    else:
        base.register_buffer(module, name, tensor, persistent)


def _leave_padding_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """``state_dict`` gives parameters in their true shapes, as views, and leaves out those of other stages of a
    pipeline; with ``keep_vars`` it gives all as they are."""
    for name, layout in own_layouts(module).items():
        value = state.get(prefix + name)
        if value is None or isinstance(value, nn.Parameter):
            continue
        if layout.pipeline is not None and value.is_meta:
            del state[prefix + name]
        elif layout.padded:
            state[prefix + name] = layout.without_padding(value)


def _take_own_part(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """``load_state_dict`` takes whole plain tensors, and DTensors of the true shapes in any placements on the
    parameter's mesh. Parameters of other stages of a pipeline stay without values."""
    for name, layout in own_layouts(module).items():
        param = module._parameters[name]
        if layout.pipeline is not None and param.is_meta:
            state[prefix + name] = param
        elif prefix + name in state:
            state[prefix + name] = _own_part(layout, state[prefix + name], param.device)


def _own_part(layout: Layout, value: Any, device: torch.device) -> Any:
    """``value``, a tensor of the parameter's true shape, as `Layout.store` wraps it; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != layout.shape:
        return value
    if not isinstance(value, DTensor):
        return layout.part(value, device)
    if not layout.padded or value.device_mesh != layout.mesh.devices:
        return value
    own = value.redistribute(placements=layout.at_rest()).to_local()
    local = own.new_zeros(layout.local_shape)
    layout.own(local).copy_(own)
    return layout.store(local)


@torch.no_grad()
def leave_padding_out(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """From now on ``optimizer.state_dict()`` gives what is laid out like a parameter of ``model`` in the parameter's
    true shape, as a view, which `torch.distributed.checkpoint` loads on any mesh; ``load_state_dict`` takes that, and
    whole plain tensors. State that ``optimizer`` has in true shapes is padded."""
    found = layouts(model)
    placed = {param: found[name] for name, param in model.named_parameters() if name in found}
    for param in placed.keys() & optimizer.state.keys():
        slots = optimizer.state[param]
        slots.update({key: _own_part(placed[param], value, param.device) for key, value in slots.items()})
    if optimizer in _TRUE_SHAPES:
        return
    _TRUE_SHAPES.add(optimizer)

    def each(state: dict[str, Any], change: Callable[[nn.Parameter, Any], Any]) -> dict[str, Any]:
        groups = zip(state["param_groups"], optimizer.param_groups, strict=False)
        keys = {
            key: param for saved, group in groups for key, param in zip(saved["params"], group["params"], strict=False)
        }
        slots = {
            key: {name: change(keys[key], value) for name, value in found.items()} if keys.get(key) in placed else found
            for key, found in state["state"].items()
        }
        return state | {"state": slots}

    def trim(param: nn.Parameter, value: Any) -> Any:
        alike = isinstance(value, DTensor) and (value.shape, value.placements) == (param.shape, param.placements)
        there = alike and value.to_local().device == param.device  # else the host holds it
        return placed[param].without_padding(value) if there else value

    optimizer.register_state_dict_post_hook(lambda _, state: each(state, trim))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: each(state, lambda param, value: _own_part(placed[param], value, param.device))
    )


def _getter(name: str) -> Callable[[nn.Module], torch.Tensor]:
    def whole(module: nn.Module) -> torch.Tensor:
        held = vars(module).get(_HELD)
        if held is not None and name in held:
            return held[name]
        if name not in module._parameters:
            raise AttributeError(name)
        found = unshard(module._parameters[name], getattr(module, _LAYOUTS)[name])
        if held is not None:
            held[name] = found
        return found

    return whole


@contextlib.contextmanager
def gathered_once(root: nn.Module) -> Iterator[None]:
    """Inside, a parameter of ``root`` or of its submodules that is read twice is gathered once, and so is its gradient
    reduced once."""
    modules = [module for module in root.modules() if own_layouts(module)]
    for module in modules:
        vars(module)[_HELD] = {}
    try:
        yield
    finally:
        for module in modules:
            del vars(module)[_HELD]


def own_layouts(module: nn.Module) -> dict[str, Layout]:
    """The layouts of the parameters that are ``module``'s own, by name."""
    return vars(module).get(_LAYOUTS, {})


def layouts(model: nn.Module) -> dict[str, Layout]:
    """The layout of every parameter of a parallel model by its fully qualified name; empty for any other model."""
    return {
        f"{path}.{name}" if path else name: layout
        for path, module in model.named_modules()
        for name, layout in own_layouts(module).items()
    }


@torch.no_grad()
def whole_state(model: nn.Module, keep: bool, used: bool = False) -> dict[str, torch.Tensor]:
    """The ``state_dict`` of a model, whole tensors on the CPU; all ranks of a parallel one must call. ``used``: in the
    dtypes that parameters are used in, not those of their shards. Empty if not ``keep``."""
    placed, seen, found = layouts(model), {}, {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:  # tied parameters stay one tensor
            layout = placed.get(name)
            whole = whole_tensor(value.detach(), layout)
            whole = whole.to(layout.param_dtype) if used and layout is not None else whole
            seen[id(value)] = whole.cpu() if keep else None
        found[name] = seen[id(value)]
    return found if keep else {}


def whole_tensor(value: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """The whole ``value`` of a parameter sharded by ``layout``, on every rank of its mesh, all of which must call."""
    if not isinstance(value, DTensor):
        return value
    laid_out = layout is not None and value.placements == layout.at_rest()
    return (layout.without_padding(value) if laid_out else value).full_tensor()


def local_parts(model: nn.Module) -> dict[str, Part]:
    """What this rank holds of each parameter, by name, for ``model.init_weights(seed, local_parts(model))``: all of a
    plain model's."""
    found = layouts(model)
    if not found:
        return {name: whole_part(param.detach()) for name, param in model.named_parameters()}
    return {
        name: Part(found[name].own(param.detach().to_local()), found[name].shape, found[name].region)
        for name, param in model.named_parameters()
    }


@torch.no_grad()
def round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the stored parameters to ``dtype``, the initial values of a model held in ``dtype``."""
    for param in model.parameters():
        local = param.to_local()
        local.copy_(local.to(dtype))
