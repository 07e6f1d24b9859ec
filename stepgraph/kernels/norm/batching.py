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
        x, x_dim: an input with its batch dimension, None where it has none.
        weight, w_dim: the same of the weight, which may be None.
        per_sample: whether each sample has a weight, or a gradient of it, of its own.
    """

    def __init__(
        self, size: int, x: Tensor, x_dim: int | None, weight: Optional, w_dim: int | None, per_sample: bool
    ) -> None:
        self.size, self.at, self.heads = size, 0, None
        self.per_sample = per_sample and weight is not None
        if self.per_sample:
            shape = [n for i, n in enumerate(weight.shape) if i != w_dim]
            self.at = x.dim() - (x_dim is not None) - len(shape)
            self.heads = shape[0] if len(shape) == 2 else None

    def rows(self, tensor: Optional, dim: int | None) -> Optional:
        """x, or anything that has its leading dimensions, with the batch folded in."""
        tensor = _move(tensor, dim, self.size, self.at)
        if tensor is not None and self.heads is not None:
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
        return tensor if self.heads is None else tensor.flatten(0, 1)

    def rows_back(self, tensor: Optional) -> tuple[Optional, int | None]:
        """An output with rows like x, unfolded, and its batch dimension."""
        return self._back(tensor, self.at)

    def weight_back(self, tensor: Optional) -> tuple[Optional, int | None]:
        """A gradient of weight or bias, unfolded, and its batch dimension."""
        return self._back(tensor, 0)

    def _back(self, tensor: Optional, at: int) -> tuple[Optional, int | None]:
        if tensor is None:
            return None, None
        return (tensor if self.heads is None else tensor.unflatten(at, (self.size, self.heads))), at


def _unzip(pairs: list[tuple[Optional, int | None]]) -> tuple[tuple[Optional, ...], tuple[int | None, ...]]:
    outputs, dims = zip(*pairs, strict=True)
    return outputs, dims


def norm(operator: Callable, info, in_dims, x, weight, bias, residual, *options):
    dx, dw, db, dr = in_dims[:4]
    fold = _Fold(info.batch_size, x, dx, weight, dw, dw is not None or db is not None)
    outputs = operator(
        fold.wide_rows(x, dx), fold.weight(weight, dw), fold.weight(bias, db), fold.wide_rows(residual, dr), *options
    )
    return _unzip([fold.rows_back(output) for output in outputs])


def norm_backward(operator: Callable, info, in_dims, dy, h, weight, mean, rstd, dh, *options):
    need_dw, need_db = options[-2:]
    fold = _Fold(info.batch_size, h, in_dims[1], weight, in_dims[2], in_dims[2] is not None or need_dw or need_db)
    dx, dw, db = operator(
        fold.wide_rows(dy, in_dims[0]),
        fold.wide_rows(h, in_dims[1]),
        fold.weight(weight, in_dims[2]),
        fold.rows(mean, in_dims[3]),
        fold.rows(rstd, in_dims[4]),
        fold.wide_rows(dh, in_dims[5]),
        *options,
    )
    return _unzip([fold.rows_back(dx), fold.weight_back(dw), fold.weight_back(db)])


def _pair_folds(size, q, k, wq, wk, dims, per_sample):
    per_sample = per_sample or dims[2] is not None or dims[3] is not None
    return _Fold(size, q, dims[0], wq, dims[2], per_sample), _Fold(size, k, dims[1], wk, dims[3], per_sample)


def norm_pair(operator: Callable, info, in_dims, q, k, wq, wk, *options):
    fold_q, fold_k = _pair_folds(info.batch_size, q, k, wq, wk, in_dims[:4], False)
    outputs = operator(
        fold_q.wide_rows(q, in_dims[0]),
        fold_k.wide_rows(k, in_dims[1]),
        fold_q.weight(wq, in_dims[2]),
        fold_k.weight(wk, in_dims[3]),
        *options,
    )
    return _unzip([fold.rows_back(output) for fold, output in zip([fold_q, fold_k] * 2, outputs, strict=True)])


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
    return _unzip([fold_q.rows_back(dq), fold_k.rows_back(dk), fold_q.weight_back(dwq), fold_k.weight_back(dwk)])
