"""Checks after every pass that the recorded value of each node still follows from its inputs.

Passes decide by the shapes, types and memory layouts in ``node.meta["val"]``. One that leaves a node with a value
that its operator would not give misleads all that come after it, up to a wrong result. Only nodes that a pass made or
changed are evaluated, on fake tensors, and equal calls once: the layers of a model cost no more than one of them.
"""

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.facts import is_mutating, is_random
from stepgraph.graph.step_graph import StepGraph


class InconsistentGraph(RuntimeError):
    """A pass left a node whose recorded value does not follow from its inputs."""


class _TensorForm(NamedTuple):
    """What must agree of two tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    conjugate: bool
    negative: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        bits = ", conjugated" * self.conjugate + ", negated" * self.negative
        return f"{name}{list(self.shape)} with strides {self.strides} on {self.device}{bits}"


class _Failure(NamedTuple):
    """Why an operator does not take its arguments."""

    reason: str

    def __str__(self) -> str:
        return f"nothing, since its operator refuses them: {self.reason}"


#: A node's target, args, kwargs and value when it was last looked at. Another object in their place shows a change.
_Call = tuple[Any, tuple, dict, Any]

#: What an operator gives that needs values, not only shapes.
_UNKNOWN = object()


class RecordedValues:
    """The recorded values of a step's nodes, to be checked after each pass.

    What capture recorded is taken as it is: a node that was wrong before counts as right while call and value stay.
    """

    def __init__(self, step: StepGraph):
        self.step = step
        self._known = {node: _call(node) for node in step.graph.nodes}
        self._values = [call[3] for call in self._known.values()]
        self._captured: set[tuple] | None = None
        self._first = dict(self._known)
        self._forms: dict[int, tuple[torch.Tensor, _TensorForm]] = {}
        self._distinct: dict[_TensorForm, _TensorForm] = {}
        self._results: dict[tuple, Any] = {}
        self._mode: compat.FakeTensorMode | None = None

    def check(self, name: str, touched: bool = True) -> None:
        """Raise `InconsistentGraph` if the pass ``name``, which ran last, left a value that does not follow.
        ``touched``: whether it may have changed what nodes there are and what they call."""
        before, self._values = self._values, [node.meta.get("val") for node in self.step.graph.nodes]
        if not touched and all(map(operator.is_, before, self._values)):
            return
        changed = self._changed()
        problem = next(self._problems(changed), None)
        if problem is not None:
            node, recorded, found = problem
            raise InconsistentGraph(
                f"pass {name} left node {node.name}, {_text(node)}, with a recorded value that does not follow from "
                f"its inputs: recorded is {_form_text(recorded)}, from its inputs follows {_form_text(found)}"
            )

    def _changed(self) -> list[fx.Node]:
        """Nodes that are new, or whose call, value or inputs' values are other objects than before; in order."""
        known, found, again = self._known, [], set()
        for node in self.step.graph.nodes:
            call = known.get(node)
            value = node.meta.get("val")
            if call is not None:
                target, args, kwargs, before = call
                if before is not value:
                    again.update(node.users)
                elif args is node.args and kwargs is node.kwargs and target is node.target and node not in again:
                    continue
            known[node] = _call(node)
            found.append(node)
        return found

    def _problems(self, nodes: Iterable[fx.Node]) -> Iterable[tuple[fx.Node, Any, Any]]:
        """(node, form recorded, form that follows) of each node where they differ, and did not at capture."""
        for node in nodes:
            if node.op == "get_attr":
                recorded, found = self._form(node.meta.get("val")), self._form(self._constant(node))
            elif node.op == "call_function":
                recorded, found = self._form(node.meta.get("val")), self._follows(node)
            else:
                continue
            if recorded != found and found is not _UNKNOWN and not self._was_recorded(node, recorded):
                yield node, recorded, found

    def _follows(self, node: fx.Node) -> Any:
        """The form of ``node``'s result for the recorded values of its inputs."""
        if node.target is operator.getitem:
            whole, index = self._value(node.args[0]), node.args[1]
            held = isinstance(whole, (list, tuple)) and -len(whole) <= index < len(whole)
            return self._form(whole[index]) if held else _Failure(f"there is no part {index}")
        key = self._key(_call(node), self._value)
        try:
            if key not in self._results:
                self._results[key] = self._evaluate(node)
            return self._results[key]
        except TypeError:  # an argument that cannot be a key
            return self._evaluate(node)

    def _evaluate(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._fake_mode())
            stack.enter_context(torch.no_grad())
            if is_random(node):  # without a fake kernel it would draw real numbers
                stack.enter_context(torch.random.fork_rng(devices=()))
            if is_mutating(node):  # such as `unsqueeze_`, which would change the recorded value itself
                args, kwargs = compat.pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            try:
                return self._form(node.target(*args, **kwargs))
            except Exception as error:
                return _UNKNOWN if compat.operator_needing_values(error) else _Failure(str(error).split("\n")[0])

    def _fake_mode(self) -> compat.FakeTensorMode:
        if self._mode is None:
            values = (value for node in self.step.graph.nodes for value in _tensors(node.meta.get("val")))
            self._mode = next(v.fake_mode for v in values if isinstance(v, compat.FakeTensor))
        return self._mode

    def _value(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        return self._constant(node) if value is None and node.op == "get_attr" else value

    def _first_value(self, node: fx.Node) -> Any:
        value = self._first[node][3]
        return self._constant(node) if value is None and node.op == "get_attr" else value

    def _constant(self, node: fx.Node) -> Any:
        return operator.attrgetter(node.target)(self.step.module)

    def _form(self, value: Any) -> Any:
        """What must agree of two values; that of a tensor is one object for all that agree, kept with the tensor."""
        if isinstance(value, torch.Tensor):
            kept = self._forms.get(id(value))
            if kept is None:
                form = _tensor_form(value)
                kept = self._forms[id(value)] = value, self._distinct.setdefault(form, form)
            return kept[1]
        if isinstance(value, (list, tuple)):
            return tuple(map(self._form, value))
        return type(value) if isinstance(value, (int, float, complex, torch.SymInt)) else None

    def _key(self, call: _Call, value_of: Callable[[fx.Node], Any]) -> tuple:
        target, args, kwargs, _ = call
        return target, self._argument(args, value_of), self._argument(kwargs, value_of) if kwargs else ()

    def _argument(self, value: Any, value_of: Callable[[fx.Node], Any]) -> Any:
        if isinstance(value, fx.Node):
            given = value_of(value)
            form = self._form(given)
            # Hashing an object's number is quick.
            return given if isinstance(given, fx.GraphModule) else id(form) if type(form) is _TensorForm else form
        if isinstance(value, (list, tuple)):
            return tuple([self._argument(item, value_of) for item in value])
        if isinstance(value, dict):
            return tuple([(key, self._argument(item, value_of)) for key, item in value.items()])
        return type(value), value

    def _was_recorded(self, node: fx.Node, recorded: Any) -> bool:
        """Whether capture recorded the same value for the same call."""
        if self._captured is None:
            self._captured = set()
            for call in self._first.values():
                if not isinstance(call[0], str):
                    self._captured.add((*self._key(call, self._first_value), self._form(call[3])))
        return node.op == "call_function" and (*self._key(_call(node), self._value), recorded) in self._captured


def _call(node: fx.Node) -> _Call:
    return node.target, node.args, node.kwargs, node.meta.get("val")


def _tensor_form(value: torch.Tensor) -> _TensorForm:
    # Where a dimension has one element, or the tensor none, no stride leads anywhere.
    strides = tuple(
        stride if size > 1 and value.numel() else 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return _TensorForm(value.dtype, tuple(value.shape), strides, value.device, value.is_conj(), value.is_neg())


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _text(node: fx.Node) -> str:
    return f"{node.target}({', '.join([*map(str, node.args), *(f'{k}={v}' for k, v in node.kwargs.items())])})"


def _form_text(form: Any) -> str:
    if isinstance(form, Sequence) and not isinstance(form, (_TensorForm, _Failure)):
        return f"[{', '.join(map(_form_text, form))}]"
    return form.__name__ if isinstance(form, type) else str(form)
