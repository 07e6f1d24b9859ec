"""``torch.func.vmap`` rules of the operators.

A batch of inputs that share a weight is just more rows. A batch of weights, or a gradient per sample, is a norm with
per-head weights: the batch dimension becomes the head dimension, before the last.

`norm`, `norm_backward`, `norm_pair` and `norm_pair_backward` are the rules; each folds the batch into its inputs, calls
the operator it is given, and unfolds the outputs.
"""

from collections.abc import Callable

import torch

Tensor = torch.Tensor
Optional = Tensor | None


def _move(tensor: Optional, dim: int | None, size: int, to: int) -> Optional:
    """The batch dimension ``dim`` of ``tensor`` moved to ``to``; expanded if it has none."""
    if tensor is None:
        return None
    if dim is None:
        return tensor.unsqueeze(to).expand(*tensor.shape[:to], size, *tensor.shape[to:])
    return tensor.movedim(dim, to)


class _Fold:
    """Folds the batch into the rows of x, and unfolds it again.

    Args:
        size: of the batch.
        dims: number of dimensions of x, without the batch.
        weight_dims: the same of the weight if each sample has a weight of its own; else None.
    """

    def __init__(self, size: int, dims: int, weight_dims: int | None) -> None:
        self.size = size
        self.at = 0 if weight_dims is None else dims - weight_dims
        self.heads = weight_dims == 2
        self.per_sample = weight_dims is not None

    def rows(self, tensor: Optional, dim: int | None) -> Optional:
        """x, or anything that has its leading dimensions, with the batch folded in."""
        tensor = _move(tensor, dim, self.size, self.at)
        if tensor is not None and self.heads:
            tensor = tensor.flatten(self.at, self.at + 1)
        return tensor

    def wide_rows(self, tensor: Optional, dim: int | None) -> Optional:
        """As `rows`, with last stride 1: the batch may have been the last dimension."""
        tensor = self.rows(tensor, dim)
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            tensor = tensor.contiguous()
        return tensor

    def weight(self, tensor: Optional, dim: int | None) -> Optional:
        """weight or bias with the batch folded in, if each sample has its own."""
        if tensor is None or not self.per_sample:
            return tensor
        tensor = _move(tensor, dim, self.size, 0)
        return tensor.flatten(0, 1) if self.heads else tensor

    def rows_back(self, tensor: Optional, heads: int) -> tuple[Optional, int | None]:
        """An output with rows like x, unfolded, and its batch dimension."""
        if tensor is None:
            return None, None
        return (tensor.unflatten(self.at, (self.size, heads)) if self.heads else tensor), self.at

    def weight_back(self, tensor: Optional, heads: int) -> tuple[Optional, int | None]:
        """A gradient of weight or bias, unfolded, and its batch dimension."""
        if tensor is None:
            return None, None
        return (tensor.unflatten(0, (self.size, heads)) if self.heads else tensor), 0


def _dims(tensor: Tensor, dim: int | None) -> int:
    return tensor.dim() - (dim is not None)


def _heads(tensor: Optional, dim: int | None) -> int:
    """Number of heads of a weight, 1 where it has none."""
    if tensor is None or _dims(tensor, dim) < 2:
        return 1
    return next(size for i, size in enumerate(tensor.shape) if i != dim)


def _fold(size: int, x: Tensor, x_dim: int | None, weight: Optional, w_dim: int | None, per_sample: bool) -> _Fold:
    return _Fold(size, _dims(x, x_dim), _dims(weight, w_dim) if per_sample and weight is not None else None)


def _unzip(pairs: list[tuple[Optional, int | None]]) -> tuple[tuple[Optional, ...], tuple[int | None, ...]]:
    outputs, dims = zip(*pairs, strict=True)
    return outputs, dims


def norm(operator: Callable, info, in_dims, x, weight, bias, residual, *options):
    dx, dw, db, dr = in_dims[:4]
    fold = _fold(info.batch_size, x, dx, weight, dw, dw is not None or db is not None)
    outputs = operator(
        fold.wide_rows(x, dx), fold.weight(weight, dw), fold.weight(bias, db), fold.wide_rows(residual, dr), *options
    )
    heads = _heads(weight, dw)
    return _unzip([fold.rows_back(output, heads) for output in outputs])


def norm_backward(operator: Callable, info, in_dims, dy, h, weight, mean, rstd, dh, *options):
    need_dw, need_db = options[-2:]
    fold = _fold(info.batch_size, h, in_dims[1], weight, in_dims[2], in_dims[2] is not None or need_dw or need_db)
    dx, dw, db = operator(
        fold.wide_rows(dy, in_dims[0]),
        fold.wide_rows(h, in_dims[1]),
        fold.weight(weight, in_dims[2]),
        fold.rows(mean, in_dims[3]),
        fold.rows(rstd, in_dims[4]),
        fold.wide_rows(dh, in_dims[5]),
        *options,
    )
    heads = _heads(weight, in_dims[2])
    return _unzip([fold.rows_back(dx, heads), fold.weight_back(dw, heads), fold.weight_back(db, heads)])


def _pair_folds(size, q, k, wq, wk, dims, per_sample):
    per_sample = per_sample or dims[2] is not None or dims[3] is not None
    return _fold(size, q, dims[0], wq, dims[2], per_sample), _fold(size, k, dims[1], wk, dims[3], per_sample)


def norm_pair(operator: Callable, info, in_dims, q, k, wq, wk, *options):
    fold_q, fold_k = _pair_folds(info.batch_size, q, k, wq, wk, in_dims[:4], False)
    yq, yk, rstd_q, rstd_k = operator(
        fold_q.wide_rows(q, in_dims[0]),
        fold_k.wide_rows(k, in_dims[1]),
        fold_q.weight(wq, in_dims[2]),
        fold_k.weight(wk, in_dims[3]),
        *options,
    )
    hq, hk = _heads(wq, in_dims[2]), _heads(wk, in_dims[3])
    outputs = [fold_q.rows_back(yq, hq), fold_k.rows_back(yk, hk)]
    return _unzip(outputs + [fold_q.rows_back(rstd_q, hq), fold_k.rows_back(rstd_k, hk)])


def norm_pair_backward(operator: Callable, info, in_dims, dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, *options):
    fold_q, fold_k = _pair_folds(info.batch_size, q, k, wq, wk, in_dims[2:6], options[-1])
    dq, dk, dwq, dwk = operator(
        fold_q.wide_rows(dyq, in_dims[0]),
        fold_k.wide_rows(dyk, in_dims[1]),
        fold_q.wide_rows(q, in_dims[2]),
        fold_k.wide_rows(k, in_dims[3]),
        fold_q.weight(wq, in_dims[4]),
        fold_k.weight(wk, in_dims[5]),
        fold_q.rows(rstd_q, in_dims[6]),
        fold_k.rows(rstd_k, in_dims[7]),
        *options,
    )
    hq, hk = _heads(wq, in_dims[4]), _heads(wk, in_dims[5])
    outputs = [fold_q.rows_back(dq, hq), fold_k.rows_back(dk, hk)]
    return _unzip(outputs + [fold_q.weight_back(dwq, hq), fold_k.weight_back(dwk, hk)])
