"""Value-dependent work of eager, as nodes: formulas of backward, and checks. A trace has no values.

Torch has other formulas for the tensors of a trace. In eager the gradient of a product, cumulative or not, divides by
each factor if none is zero, and that of a value that fills a mask, or that is written where a mask is true, is the sum
of what the mask selects. For a trace torch takes formulas that look at nothing and round otherwise. Here both are
nodes, and values choose. The gradient of ``masked_scatter``'s source is moved by an index, which needs no host.
Singular values and eigenvalues that need no gradient eager computes alone, by another algorithm; a trace has the whole
decomposition.

Checks that eager makes on the host before it computes raise when the step runs. For the tensors of a trace torch leaves
these out: that classes of ``one_hot`` are below their number, and that ``q`` of ``quantile`` is in [0, 1]. Those of
``torch.distributions`` and of ``gaussian_nll_loss`` ask for a value.
"""

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from stepgraph import compat
from stepgraph.capture.batch_reads import packet
from stepgraph.graph.facts import is_view
from stepgraph.kernels.masked_sum import masked_sum, selected_sum

_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__) + os.sep
#: Functions of theirs that raise where a truth value is false. Others decide by one how to compute.
_CHECKS = ("__init__", "_validate_sample", "check", "_mvdigamma")
#: Operators that give positions along a dimension.
_POSITIONS = ("topk", "sort", "argsort", "max", "min", "kthvalue", "mode", "median", "argmax", "argmin", "multinomial")
#: Operators besides views whose elements are those of their first argument.
_SAME = ("_to_copy", "clone", "index", "gather", "index_select")


def check_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_literal: Callable) -> bool | None:
    """Record what eager checks in a call of ``func``; the answer to a question for a truth value that such a check
    asks. ``is_literal``: whether the values of a tensor follow from literals, whose checks are eager's."""
    if func not in _CHECKED or not compat.is_tracing():
        return None
    if func is Tensor.__bool__ and not is_literal(args[0]):
        frame = compat.outside_function_modes(sys._getframe(2))
        if frame.f_code.co_name == "_all_true_or_runtime_assert":  # of torch 2.15, which its checks call
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS) and frame.f_code.co_name in _CHECKS:
            compat.assert_all(args[0], _message(frame))
            return True
    elif func is nn.functional.one_hot:
        _check_classes(*args, **kwargs)
    elif func is not Tensor.__bool__:
        q = kwargs["q"] if "q" in kwargs else args[1]
        if isinstance(q, Tensor) and q.device.type == "cpu":
            compat.assert_all(q.ge(0).logical_and_(q.le(1)), "quantile() q values must be in the range [0, 1]")
    return None


_CHECKED = {Tensor.__bool__, nn.functional.one_hot}
_CHECKED |= {torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile}


def _message(frame: FrameType) -> str:
    param, of = map(frame.f_locals.get, ("param", "self"))
    return f"{param or 'a value'} of {type(of).__name__} is outside what torch.distributions allows"


def _check_classes(x: Tensor, num_classes: int = -1) -> None:
    if compat.is_traceable_wrapper_subclass(x) or x.numel() == 0:
        return
    bound = _bound(compat.node_of_trace(x))
    if bound is None:
        compat.assert_all(x >= 0, "Class values must be non-negative.")
    if num_classes > 0 and not (bound is not None and bound <= num_classes):
        compat.assert_all(x < num_classes, "Class values must be smaller than num_classes.")


def _bound(node: fx.Node | None) -> int | None:
    """A number above all elements of ``node``, if they are positions along a dimension; else None."""
    while node is not None and node.all_input_nodes and (is_view(node) or packet(node) in _SAME or _is_second(node)):
        node = node.all_input_nodes[0]
    if node is None or packet(node) not in _POSITIONS or len(node.target._schema.arguments) == 1:  # max() is a value
        return None
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    sizes, dim = node.all_input_nodes[0].meta["val"].shape, given.get("dim", -1)
    return sizes.numel() if dim is None else sizes[dim] if sizes else 1


def _is_second(node: fx.Node) -> bool:
    """Whether ``node`` is the second result of an operator."""
    return packet(node) == "" and node.op == "call_function" and node.args[1:] == (1,)


#: Operators that eager calls only for values, or for vectors too where gradients need them, and where values are.
BY_GRADIENTS = {torch.ops.aten._linalg_svd.default: 1, torch.ops.aten._linalg_eigh.default: 0}
#: In the meta of a node: whether eager computes only its values.
ALONE = "stepgraph_values_alone"
#: Functions that call them for values.
_VALUES = ("linalg_svdvals", "linalg_eigvalsh", "linalg_matrix_norm", "linalg_norm", "linalg_cond", "nuclear_norm")


class EagerFormulas(TorchFunctionMode):
    """Inside, ``prod``, ``cumprod``, ``masked_fill``, ``masked_scatter`` and ``x[mask] = value`` have eager's
    gradients, and `check_call` records eager's checks.

    ``is_known``: whether a mask's values are known, and with them how many elements it selects. ``is_literal``: whether
    they follow from literals. ``look``: called before each function. ``instead``: what gives its result, or None.
    """

    instead: ClassVar[Mapping[Any, Callable[..., Tensor | None]]] = {}

    def __init__(
        self, is_known: Callable[[Tensor], bool], is_literal: Callable[[Tensor], bool], look: Callable[[], None]
    ) -> None:
        super().__init__()
        self.is_known, self.is_literal, self.look = is_known, is_literal, look

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.look()
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in _VALUES:
            return _values(func, args, kwargs)
        if func in (torch.ctc_loss, nn.functional.ctc_loss):
            return _ctc_loss(func, *args, **kwargs)
        if func is nn.functional.gaussian_nll_loss:
            return _gaussian_nll_loss(func, *args, **kwargs)
        if compat.in_function_transform():
            return func(*args, **kwargs)
        if func in _SPECIAL or func in _CHECKED:
            args = (*args, *(kwargs.pop(name) for name in ("input", "indices", "values") if name in kwargs))
        answer = check_call(func, args, kwargs, self.is_literal)
        if answer is not None:
            return answer
        if func is Tensor.__bool__:
            return compat.truth(*args)
        instead = self.instead.get(func)
        if instead is not None and (made := instead(*args, **kwargs)) is not None:
            return made
        special = _SPECIAL.get(func)
        if special is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if special is _put and any(map(self.is_known, _masks(args[1]))):
            return func(*args, **kwargs)
        return special(func, *args, **kwargs)


def _ctc_loss(
    func: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Lengths that are plain numbers as tensors: torch would write the numbers into a tensor of the trace. It divides
    losses on a GPU by lengths on the host only outside of a trace."""
    of_inputs, of_targets = (
        torch.tensor(lengths, dtype=torch.long) if isinstance(lengths, (tuple, list)) else lengths
        for lengths in (input_lengths, target_lengths)
    )
    is_mean = reduction in ("mean", 1) and of_targets.device != log_probs.device
    reduction = ("none" if func is nn.functional.ctc_loss else 0) if is_mean else reduction
    losses = func(log_probs, targets, of_inputs, of_targets, blank, reduction, zero_infinity)
    return (losses / of_targets.to(losses.device).clamp(min=1)).mean() if is_mean else losses


def _gaussian_nll_loss(func: Any, x: Tensor, target: Tensor, var: Any, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(var, Tensor):
        compat.assert_all(~(var < 0), "var has negative entry/entries")
    with compat.replaced(torch, any=lambda _: False):  # what it asks of var
        return func(x, target, var, *args, **kwargs)


def _values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in compat.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    before = next(iter(reversed(compat.graph_of_trace().nodes)), None)
    result = func(*args, **kwargs)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)):
        for node in reversed(compat.graph_of_trace().nodes):
            if node is before:
                break
            node.meta[ALONE] = node.target in BY_GRADIENTS
    return result


def _prod(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    x, *dims = args
    if not isinstance(x, Tensor) or not x.requires_grad or compat.is_traceable_wrapper_subclass(x):
        return func(*args, **kwargs)
    given = dict(zip(("dim", "keepdim"), dims, strict=False)) | kwargs
    dim, dtype = given.get("dim"), given.get("dtype")
    if dtype is None:
        dtype = compat.autocast_dtype(torch.ops.aten.prod.default, x)  # it casts before
    if not isinstance(dim, int | None) or given.keys() - {"dim", "keepdim", "dtype"}:
        return func(*args, **kwargs)
    return _Prod.apply(x if dtype is None else x.to(dtype), dim, given.get("keepdim", False))


class _Prod(torch.autograd.Function):
    """``x.prod()``, or ``x.prod(dim, keepdim)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            result = x.prod() if dim is None else x.prod(dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x, result), dim = ctx.saved_tensors, ctx.dim
        if x.ndim == 0:
            return grad * torch.ones_like(grad) if dim is None else grad, None, None
        x = x.to(grad.dtype)
        if dim is not None and not ctx.keepdim:
            grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
        zeros = x == 0
        some = zeros.any()
        if dim is None:
            whole = _without_each(grad, x.contiguous().view(-1), 0).view_as(x)
            if not torch.is_grad_enabled():
                whole = torch.where(zeros.sum() > 1, 0, whole)
        else:
            whole = _without_each(grad, x, dim)
        return torch.where(some, whole, grad * (result / torch.where(some, 1, x)).conj()), None, None


def _cumprod(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    x, *dims = args
    given = dict(zip(("dim",), dims, strict=False)) | kwargs
    dim, dtype = given.get("dim"), given.get("dtype")
    plain = isinstance(x, Tensor) and x.requires_grad and not compat.is_traceable_wrapper_subclass(x)
    if not plain or not isinstance(dim, int) or given.keys() - {"dim", "dtype"} or x.ndim == 0 or x.shape[dim] < 2:
        return func(*args, **kwargs)
    if dtype is None:
        dtype = compat.autocast_dtype(torch.ops.aten.cumprod.default, x)  # it sets the result's
    is_complex = x.is_complex() or (dtype is not None and dtype.is_complex)
    return func(x, dim, dtype=dtype) if is_complex else _Cumprod.apply(x, dim, dtype)


def _cumprod_in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return (
        x.copy_(_cumprod(Tensor.cumprod, x.clone(), *args, **kwargs)) if x.requires_grad else func(x, *args, **kwargs)
    )


def _vander(func: Any, x: Tensor, *, N: int | None = None) -> Tensor:
    n = x.shape[-1] if N is None else N
    if not x.requires_grad or n < 2:
        return func(x, N=N)
    powers = _cumprod(torch.cumprod, x[..., None].expand(*x.shape, n - 1), -1)
    return torch.cat([powers.new_ones(*x.shape, 1), powers], -1)


class _Cumprod(torch.autograd.Function):
    """``x.cumprod(dim, dtype=dtype)`` of real numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            result = x.cumprod(dim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x, result), dim = ctx.saved_tensors, ctx.dim
        grad = grad.to(x.dtype)
        zeros = x == 0
        if torch.is_grad_enabled():
            some = zeros.any()
            whole = torch.ops.aten.cumprod_backward(grad, x, dim, result)
            return torch.where(some, whole, _sums_behind(result * grad, dim) / x.where(~some, 1)), None, None
        count = zeros.cumsum(dim)
        before, one = count == 0, count == 1  # the first zero of a row, and what is behind it, up to the second
        first = one.long().argmax(dim, keepdim=True)
        at_first = torch.zeros_like(one).scatter_(dim, first, True).logical_and_(one)
        simple = _sums_behind((result * grad).masked_fill(~before, 0), dim) / x
        factors = x.masked_fill(~(one & ~at_first), 1).cumprod(dim)
        product = result.gather(dim, (first - 1).relu_()).masked_fill_(first == 0, 1)
        of_first = (factors * grad.masked_fill(~one, 0)).sum(dim, keepdim=True) * product
        return torch.where(at_first, of_first, simple.where(before, 0)), None, None


def _sums_behind(x: Tensor, dim: int) -> Tensor:
    """For each element of ``x``, the sum of it and of the ones behind it."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _without_each(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """``grad`` times the product of all other elements along ``dim``, without a division."""
    size = x.shape[dim]
    if x.numel() == 0:
        return torch.zeros_like(x)
    if size == 1:
        return grad
    ones = torch.ones_like(x.narrow(dim, 0, 1), dtype=grad.dtype, memory_format=torch.contiguous_format)
    before = torch.cat([ones, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    behind = torch.cat([ones, x.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * behind).conj()


class _Written(torch.autograd.Function):
    """``filled``, into which ``value`` was written where ``mask`` is true."""

    @staticmethod
    def forward(ctx: Any, filled: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(filled)
        ctx.save_for_backward(mask)
        ctx.shape, ctx.dtype = value.shape, value.dtype
        return filled

    @classmethod
    def by_mask(cls, name: str, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """``func(self, mask, value)``; ``name``: of the value."""
        given = dict(zip(("self", "mask", name), args, strict=False)) | kwargs
        mask, value = given.get("mask"), given.get(name)
        if not isinstance(value, Tensor) or not value.requires_grad or compat.is_traceable_wrapper_subclass(value):
            return func(*args, **kwargs)
        return cls.apply(func(given["self"], mask, value.detach()), mask, value)


class _FilledBy(_Written):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        (mask,) = ctx.saved_tensors
        return grad, None, masked_sum(grad, mask).to(ctx.dtype)


class _ScatteredFrom(_Written):
    """torch's backward selects by the mask, for which the host reads their number; here the same elements go to the
    same places by an index, and what no mask selects to one place behind them."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        (mask,) = ctx.saved_tensors
        mask, size = mask.expand_as(grad).reshape(-1), ctx.shape.numel()
        places = torch.where(mask, mask.cumsum(0) - 1, size).clamp(max=size)
        found = grad.new_zeros(size + 1).scatter(0, places, grad.reshape(-1))
        return grad, None, found.narrow(0, 0, size).view(ctx.shape)


def _masks(index: Any) -> list[Tensor]:
    indices = index if isinstance(index, list | tuple) else [index]
    return [one for one in indices if isinstance(one, Tensor) and one.dtype == torch.bool]


def _put(func: Any, x: Any, index: Any, value: Any, *accumulate: Any, **kwargs: Any) -> Any:
    indices = index if isinstance(index, list | tuple) else [index]
    whole = all(isinstance(one, Tensor) or (isinstance(one, slice) and one == slice(None)) for one in indices)
    if (
        not (isinstance(value, Tensor) and value.requires_grad and _masks(index) and whole)
        or any((*accumulate, kwargs.get("accumulate")))
        or any(map(compat.is_traceable_wrapper_subclass, (x, value)))
    ):
        return func(x, index, value, *accumulate, **kwargs)
    filled = func(x, index, value.detach())
    places = [one if isinstance(one, Tensor) else None for one in indices]
    made = _PutBy.apply(x if filled is None else filled, value, *places)
    return filled if filled is None else made


class _PutBy(torch.autograd.Function):
    """``filled``, into which ``value`` was written at the places of ``indices``, masks among them."""

    @staticmethod
    def forward(ctx: Any, filled: Tensor, value: Tensor, *indices: Tensor | None) -> Tensor:
        ctx.mark_dirty(filled)
        ctx.save_for_backward(*indices)
        ctx.shape = value.shape
        return filled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indices = ctx.saved_tensors
        return grad, selected_sum(grad, indices, ctx.shape), *(None for _ in indices)


_SPECIAL = {
    **dict.fromkeys((torch.prod, Tensor.prod), _prod),
    **dict.fromkeys((torch.cumprod, Tensor.cumprod), _cumprod),
    Tensor.cumprod_: _cumprod_in_place,
    torch.linalg.vander: _vander,
    **dict.fromkeys((Tensor.__setitem__, Tensor.index_put_, torch.index_put, Tensor.index_put), _put),
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), partial(_FilledBy.by_mask, "value")),
    **dict.fromkeys(
        (torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_),
        partial(_ScatteredFrom.by_mask, "source"),
    ),
}
