"""A batch as leaves: the facts that a graph is specialized on, microbatches, and batches of another length."""

import contextlib
import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stepgraph import compat
from stepgraph.capture.state import check_class, unwrap
from stepgraph.errors import CaptureError, UnlikeError, warn_caller
from stepgraph.graph.aliases import memory_span

#: Values that are not tensors, which are constants of the graph; NumPy's scalars are numbers.
_PLAIN = (Number, np.bool_, str, bytes, Enum, torch.dtype, torch.device, type(None))
_SHORTEST = 4


def flatten_batch(batch: Any) -> tuple[list[Any], Any]:
    """The batch's leaves and how to put them together again: tensors, and plain values as `_PLAIN` has them.

    Raises `CaptureError` for other values, and for tensors that have no strides.
    """
    leaves, spec = compat.pytree.tree_flatten(_nodes(batch))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            _check_layout(leaf)
            check_class(leaf, "the batch holds")
        elif not isinstance(leaf, _PLAIN):
            raise CaptureError(
                f"the batch holds a value of type {_kind(leaf)}; allowed: tensors and plain values in dicts, lists, "
                f"tuples and dataclasses; {_instead_of(leaf)}"
            )
    return leaves, spec


class _Fields:
    """A dataclass of the batch, as a node of its tree; unflattened, it is that class again, without its constructor."""

    def __init__(self, one: Any) -> None:
        names = [f.name for f in dataclasses.fields(one) if hasattr(one, f.name)]  # `init=False` may leave one unset
        self.kind, self.held = type(one), {name: _nodes(getattr(one, name)) for name in names}
        if more := getattr(one, "__dict__", {}).keys() - self.held:
            raise CaptureError(
                f"the batch holds a {_kind(one)} with the attribute {min(more)}, which is no field of it: declare it"
            )

    def flatten(self) -> tuple[list[Any], Any]:
        return [*self.held.values()], (self.kind, tuple(self.held))

    def flatten_with_keys(self) -> tuple[list[Any], Any]:
        return [(compat.pytree.GetAttrKey(name), value) for name, value in self.held.items()], self.flatten()[1]

    @staticmethod
    def unflatten(values: Iterable[Any], context: Any) -> Any:
        kind, names = context
        made = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)  # it may be frozen
        return made


compat.pytree.register_pytree_node(
    _Fields, _Fields.flatten, _Fields.unflatten, flatten_with_keys_fn=_Fields.flatten_with_keys
)


def _nodes(batch: Any) -> Any:
    """``batch`` as dicts, lists, tuples and `_Fields`."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    return compat.pytree.tree_map(lambda one: _Fields(one) if _has_fields(one) else one, batch)


def _has_fields(one: Any) -> bool:
    is_instance = dataclasses.is_dataclass(one) and not isinstance(one, type)
    return is_instance and not isinstance(one, (*_PLAIN, torch.Tensor, torch.nn.Module, dict, list, tuple, set))


def classes_of(batch: Any) -> list[type]:
    """The classes of the batch's containers, whose methods the loss may call."""
    found = dict.fromkeys([type(batch)])

    def is_leaf(one: Any) -> bool:  # it is asked of every node
        found[one.kind if isinstance(one, _Fields) else type(one)] = None
        return False

    compat.pytree.tree_flatten(_nodes(batch), is_leaf)
    return [cls for cls in found if dataclasses.is_dataclass(cls) or issubclass(cls, (tuple, list, Mapping))]


def _instead_of(value: Any) -> str:
    """What a batch may hold instead of ``value``."""
    if isinstance(value, np.ndarray):
        return "pass torch.from_numpy(...) of it"
    if isinstance(value, Mapping):
        return "pass dict(...) of it"
    if isinstance(value, Iterable):
        return "pass list(...) of it"
    return "use it in loss_fn by its name" if callable(value) else "pass its parts, such as vars(...) of it"


def _kind(value: Any) -> str:
    """The name of its class, under that of the library which it is from."""
    library = type(value).__module__.partition(".")[0]
    return type(value).__qualname__ if library in ("builtins", "__main__") else f"{library}.{type(value).__qualname__}"


def _check_layout(tensor: torch.Tensor) -> None:
    """Raise for a sparse, nested or quantized tensor."""
    kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "sparse": tensor.layout != torch.strided}
    kind = next((kind for kind, is_so in kinds.items() if is_so), None)
    if kind is not None:
        raise CaptureError(
            f"the batch holds a {kind} tensor, and a graph takes dense ones: pad rows that differ in length, and make "
            "sparse or quantized tensors inside loss_fn from their dense parts"
        )


def masks_of_ones(batch: Any, microbatches: int = 1, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """Places, among the batch's leaves, of attention masks that hide nothing, as tokenizers return them: eager looks
    at their values, and transformers drops them. The ranks of ``mesh`` find the same places together: those of masks
    that hide nothing on any. It warns of a mask that is kept though eager drops it for a microbatch, or on a rank."""
    leaves = compat.pytree.tree_flatten_with_path(_nodes(batch))[0]
    masks = {i: leaf for i, (path, leaf) in enumerate(leaves) if path and _is_mask(path[-1], leaf)}
    if not masks:
        return ()
    every = torch.stack([(mask == 1).all() for mask in masks.values()]).int()
    parts = [[(microbatch(mask, k, microbatches) == 1).all() for k in range(microbatches)] for mask in masks.values()]
    some = torch.stack([torch.stack(part).any() for part in parts]).tolist()
    if mesh is not None:
        every = every.to(mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(every, dist.ReduceOp.MIN, group=group)
    found = tuple(i for i, ones in zip(masks, every.tolist(), strict=True) if ones)
    dropped = next((i for i, ones in zip(masks, some, strict=True) if ones and i not in found), None)
    if dropped is not None:
        warn_caller(
            f"batch{compat.pytree.keystr(leaves[dropped][0])} hides nothing in one microbatch or on one rank, where "
            "eager drops it, and something in another: it is kept in all, which may change the last bits"
        )
    return found


def mask_names(batch: Any) -> list[str]:
    """The attention masks of ``batch``, which `masks_of_ones` looks at, such as ``batch['attention_mask']``."""
    leaves = compat.pytree.tree_flatten_with_path(_nodes(batch))[0]
    return [f"batch{compat.pytree.keystr(path)}" for path, leaf in leaves if path and _is_mask(path[-1], leaf)]


_refusing: list[None] = []


@contextlib.contextmanager
def refusing_masks() -> Iterator[None]:
    """Inside, `warn_of_mask` raises `UnlikeError` instead of warning."""
    _refusing.append(None)
    try:
        yield
    finally:
        _refusing.pop()


def warn_of_mask(message: str) -> None:
    """Warn that a mask is kept although eager drops it for some microbatches."""
    if _refusing:
        raise UnlikeError(message)
    warn_caller(message)


def share_of_labels(batch: Any) -> float:
    """The share of labels that are not ignored, in the tensors of integers that hold -100; 1 if none does."""
    leaves = [leaf for leaf in flatten_batch(batch)[0] if has_values(leaf) and leaf.dtype == torch.int64]
    counts = [leaf != -100 for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]
    found = [(int(some.sum()), some.numel()) for some in counts if not some.all()]
    return sum(count for count, _ in found) / sum(size for _, size in found) if found else 1.0


def _is_mask(key: Any, leaf: Any) -> bool:
    named = str(getattr(key, "key", getattr(key, "name", ""))).endswith("attention_mask")
    return named and has_values(leaf) and not (leaf.is_floating_point() or leaf.is_complex())


def has_values(leaf: Any) -> bool:
    """Whether a leaf of a batch is a plain tensor with values."""
    plain = isinstance(leaf, torch.Tensor) and not (compat.is_traceable_wrapper_subclass(leaf) or leaf.is_meta)
    return plain and not compat.is_fake(leaf)


def leaves_by_name(batch: Any) -> dict[str, Any]:
    """The leaves of ``batch``, each by what it is called, such as ``batch['id']``."""
    found = compat.pytree.tree_flatten_with_path(_nodes(batch))[0]
    return {f"batch{compat.pytree.keystr(path)}": leaf for path, leaf in found}


def rebuilt(batch: Any, leaves: Sequence[Any], spec: compat.pytree.TreeSpec) -> Any:
    """A batch like ``batch`` with other ``leaves``, and one of them where it has one tensor in several places. A batch
    of transformers' classes keeps its class, whose attributes are its keys; other mappings become dicts."""
    places = first_places(flatten_batch(batch)[0])
    made = compat.pytree.tree_unflatten([leaves[i] for i in places], spec)
    if not isinstance(batch, UserDict):
        return made
    shell = copy.copy(batch)
    shell.data = made
    return shell


def first_places(leaves: Sequence[Any]) -> list[int]:
    """For each leaf the place of the first that is the same tensor; of other values, and tensors alone, their own."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), i) if isinstance(leaf, torch.Tensor) else i for i, leaf in enumerate(leaves)]


def shared_memory(leaves: Sequence[Any]) -> list[tuple[int, int, int]]:
    """For each pair of leaves whose memory overlaps: their places, and the bytes from one start to the other."""
    spans = []
    for i, leaf in enumerate(leaves):
        if has_values(leaf) and leaf.numel():
            _, start, end = memory_span(leaf)
            spans.append((leaf.get_device(), leaf.data_ptr(), leaf.data_ptr() + end - start, i))
    found, open_ = [], []
    for device, start, end, i in sorted(spans):
        open_ = [one for one in open_ if one[0] == device and start < one[2]]
        found += [(j, i, start - begin) for _, begin, _, j in open_]
        open_.append((device, start, end, i))
    return found


def form(leaf: Any) -> Any:
    """What of a leaf the graph was specialized on: a tensor's form, any other value itself."""
    if not isinstance(leaf, torch.Tensor):
        # As text -0.0 differs from 0.0, and NaN equals itself.
        return type(leaf), repr(leaf) if isinstance(leaf, Number) else leaf
    inner, wrapping = unwrap(leaf)
    plain = tuple(
        (t.shape, t.dtype, t.device, t.stride(), leaf.requires_grad, leaf.is_leaf, t.is_conj(), t.is_neg())
        for t in inner
    )
    if wrapping is None:
        plain += (type(leaf),)
    if wrapping is not None:
        return plain, wrapping.kind, wrapping.context, *wrapping.others.values()
    return (plain, *((name, form(value)) for name, value in attributes(leaf).items())) if vars(leaf) else plain


def attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Plain values that the user's code has set on a tensor of the batch. Raises `CaptureError` for other ones."""
    held = {name: value for name, value in vars(tensor).items() if not name.startswith("_dynamo")}
    for name, value in held.items():
        if not isinstance(value, _PLAIN):
            raise CaptureError(
                f"a tensor of the batch has the attribute {name}, a {_kind(value)}: pass it in the batch by a key"
            )
    return held


def microbatch(leaf: Any, k: int, n: int) -> Any:
    """Part ``k`` of ``n`` equal ones of a leaf of the batch: tensors are split along their first dimension."""
    if n == 1 or not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        return leaf
    size = leaf.shape[0] // n
    return leaf.detach().narrow(0, k * size, size)


def batch_sizes(leaves: Sequence[Any]) -> list[int]:
    """The first dimension of each tensor among the leaves of a batch that has one: what microbatches divide."""
    return [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0]


def shorter(batch: Any) -> Any | None:
    """``batch`` with the second dimension (batch, length, ...) of its tensors halved; None if none is of 4 or more."""
    leaves, spec = flatten_batch(batch)
    halves = [_half(leaf) if _has_length(leaf) else leaf for leaf in leaves]
    same = all(half is leaf for half, leaf in zip(halves, leaves, strict=True))
    return None if same else rebuilt(batch, halves, spec)


def _has_length(leaf: Any) -> bool:
    plain = isinstance(leaf, torch.Tensor) and not compat.is_traceable_wrapper_subclass(leaf)
    return plain and leaf.ndim > 1 and leaf.shape[1] >= _SHORTEST


def _half(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach()[:, : leaf.shape[1] // 2].clone(memory_format=torch.contiguous_format)
