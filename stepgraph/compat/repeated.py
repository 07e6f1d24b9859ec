"""Calls of operators on tensors of forms that a trace of this process has met before, as in every further block of a
model and in every further capture.

What an operator gives for tensors without values follows from the forms of its arguments. torch looks its result up by
a key of some 15 facts per tensor, and records the call through layers that also serve values, symbols, subclasses and
decompositions: 0.8 ms per node. Here a call like an earlier one makes the same node and the same tensor at once.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, _ProxyTensor, get_proxy_mode
from torch.fx.experimental.symbolic_shapes import has_symbolic_sizes_strides
from torch.fx.traceback import has_preserved_node_meta
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.compat.fake import fake_of

aten = torch.ops.aten

#: Types of arguments that are equal in the node.
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
#: Operators whose results depend on more than the forms of their arguments, or that a trace records in another way.
_TAGS = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}  # fmt: skip
_OTHERS = {
    aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.as_strided.default,
    aten.size.default, aten.stride.default, aten.storage_offset.default,
}  # fmt: skip
#: What torch adds to the nodes of some traces.
_NOTES = {"stack_trace", "nn_module_stack"}
#: What calls gave in all traces, by their keys; it starts again where it has grown large, after captures of many forms.
_OUTCOMES: dict[tuple, "_Made | None"] = {}
_LARGE = 20_000


class _Unknown(Exception):
    """An argument that no key is made of."""


class _Made(NamedTuple):
    """What a call gave. ``name``: asked for its node. ``notes_inputs``: whether that notes its arguments' values.
    ``base``: the argument whose storage the tensor shares, counted among tensors."""

    name: str
    notes_inputs: bool
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    base: int | None
    metadata: Any


class _Call:
    """A call: its ``key``, its ``tensors``, and the arguments of its node. Raises `_Unknown`."""

    def __init__(self, func: OpOverload, tracer: PythonKeyTracer, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.func, self.tracer, self.tensors = func, tracer, []
        self._constant = True  # whether torch computes the result from literals only
        # Which kernel of a convolution or a product is chosen, and so its strides, depends on these settings.
        settings = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled(), torch.get_default_dtype()
        self._form: list[Any] = [func, settings, torch.are_deterministic_algorithms_enabled(), *kwargs]
        self.args = tuple(map(self._argument, args))
        self.kwargs = {name: self._argument(value) for name, value in kwargs.items()}
        self.key = tuple(self._form)
        if self._constant:
            raise _Unknown

    def _argument(self, value: Any) -> Any:
        kind = type(value)
        if kind is FakeTensor:
            slot = self.tracer.tensor_tracker.get(value)
            plain = value.layout is torch.strided and not value.dtype.is_complex
            if slot is None or not plain or value.is_neg():
                raise _Unknown
            self._constant &= value.constant is not None or slot.constant is not None
            if has_symbolic_sizes_strides(value):
                raise _Unknown
            self.tensors.append(value)
            self._form += value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
            return slot.proxy.node
        if kind in _PLAIN:
            self._form += kind, value
            return value
        if kind is list or kind is tuple:
            self._form += kind, len(value)
            return kind(map(self._argument, value))
        raise _Unknown

    def tensors_of(self, made: _Made) -> tuple[FakeTensor, FakeTensor]:
        """Two tensors that share what ``made`` describes: what the call gives, and what its node records."""
        mode = self.tensors[0].fake_mode
        storage = None if made.base is None else self.tensors[made.base].untyped_storage()
        with torch._C._DisableTorchDispatch():
            if storage is None:
                meta = torch.empty_strided(made.shape, made.strides, dtype=made.dtype, device="meta")
            else:
                meta = torch.empty(0, dtype=made.dtype, device="meta")
                meta.set_(storage, made.offset, made.shape, made.strides)
            return fake_of(mode, meta, made.device), fake_of(mode, meta, made.device)

    def again(self, made: _Made) -> FakeTensor:
        """Record the call, of which an earlier one gave ``made``."""
        create = self.tracer.create_node if made.notes_inputs else self.tracer.graph.create_node
        node = create("call_function", self.func, self.args, self.kwargs, made.name)
        tensor, node.meta["val"] = self.tensors_of(made)
        node.meta["tensor_meta"] = made.metadata
        self.tracer.tensor_tracker[tensor] = _ProxyTensor(self.tracer.proxy(node), None)
        return tensor

    def outcome(self, result: Any, before: fx.Node) -> _Made | None:
        """What the call gave, recorded after the node ``before``; None unless `again` does the same."""
        node, packet = before.next, self.func.overloadpacket.__name__
        alone = node.next.op == "root" and node.op == "call_function" and node.target is self.func
        if not alone or node.args != self.args or node.kwargs != self.kwargs or node.meta.keys() & _NOTES:
            return None
        if type(result) is not FakeTensor or result.layout is not torch.strided or result.is_quantized:
            return None
        if result.constant is not None or result.requires_grad:
            return None
        storages = [given.untyped_storage()._cdata for given in self.tensors]
        storage = result.untyped_storage()
        base = storages.index(storage._cdata) if storage._cdata in storages else None
        form = result.shape, result.stride(), result.storage_offset(), result.dtype, result.fake_device, base
        name = self.tracer.graph._target_to_str(packet)
        made = _Made(name, "eager_input_vals" in node.meta, *form, node.meta["tensor_meta"])
        again, _ = self.tensors_of(made)
        same = again.untyped_storage().nbytes() == storage.nbytes()
        same &= torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(result)
        return made if same and not any(result is given for given in self.tensors) else None


class RepeatedCalls:
    """The calls of one trace. ``besides``: operators that other modes of the trace replace, at some calls."""

    def __init__(self, besides: Collection[OpOverload] = ()) -> None:
        self._besides = besides
        if len(_OUTCOMES) > _LARGE:
            _OUTCOMES.clear()
        self._operators: dict[int, tuple[OpOverload, bool]] = {}  # by their ids: a hash is computed in Python

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``func`` gives."""
        found = self._operators.get(id(func))
        if found is None:
            found = self._operators[id(func)] = func, func not in self._besides and _follows_forms(func)
        mode = get_proxy_mode()
        if not found[1] or mode is None or type(mode.tracer) is not PythonKeyTracer or mode.emulate_precision_casts:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() or has_preserved_node_meta():
            return func(*args, **kwargs)
        try:
            call = _Call(func, mode.tracer, args, kwargs)
        except _Unknown:
            return func(*args, **kwargs)
        made = _OUTCOMES.get(call.key)
        if made is not None:
            return call.again(made)
        before = next(iter(reversed(mode.tracer.graph.nodes)))
        result = func(*args, **kwargs)
        if call.key not in _OUTCOMES:
            _OUTCOMES[call.key] = call.outcome(result, before)
        return result


class DispatchMode(TorchDispatchMode):
    """A dispatch mode of a trace, in which Dynamo compiles nothing: torch would switch it off at every call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Repeating(DispatchMode):
    """Inside, operators are called by `RepeatedCalls`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = RepeatedCalls()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._calls(func, args, kwargs or {})


def _follows_forms(func: OpOverload) -> bool:
    """Whether a trace records ``func`` as it is called, and the forms of its arguments say what it gives."""
    if not isinstance(func, OpOverload) or func._schema.is_mutable or func in _OTHERS:
        return False
    if func.namespace not in ("aten", "_c10d_functional"):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return not composite and _TAGS.isdisjoint(func.tags)
