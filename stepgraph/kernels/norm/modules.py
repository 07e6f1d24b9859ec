"""`RMSNorm` and `LayerNorm`: torch's modules, constructors and ``state_dict`` included, on this package's kernels."""

from typing import Any

import torch

from stepgraph.kernels.norm.functional import layer_norm, rms_norm

Tensor = torch.Tensor


def _flat(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """``tensor`` (..., *shape) as (..., N)."""
    if tensor is None:
        return None
    if tensor.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; allowed is (..., {', '.join(map(str, shape))}): "
            f"reshape it, or make the module with another normalized_shape"
        )
    return tensor if len(shape) == 1 else tensor.flatten(-len(shape))


class _Forward:
    """``forward`` of both modules."""

    def forward(self, input: Tensor, residual: Tensor | None = None, *, prenorm: bool = False) -> Any:
        """Normalize ``input + residual`` (..., *normalized_shape); with ``prenorm`` return that sum as well."""
        shape = self.normalized_shape
        x = _flat("input", input, shape)
        if len(shape) == 1:
            return self._norm(x, self.weight, self.bias, residual, prenorm)
        weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        result = self._norm(x, weight, bias, _flat("residual", residual, shape), prenorm)
        return tuple(t.unflatten(-1, shape) for t in result) if prenorm else result.unflatten(-1, shape)


class RMSNorm(_Forward, torch.nn.RMSNorm):
    """Drop-in for `torch.nn.RMSNorm` (`stepgraph.kernels.rms_norm`), which may add a residual first.

    Args as there, and ``weight_offset``: 1.0 for weights stored as a difference from one, which then start at zero.
    Parameters: ``weight`` of ``normalized_shape``. Raises ``ValueError`` if the input does not end with that shape.
    """

    def __init__(self, *args: Any, weight_offset: float = 0.0, **kwargs: Any) -> None:
        self.weight_offset = weight_offset
        super().__init__(*args, **kwargs)

    def reset_parameters(self) -> None:
        """Start as a norm without a weight."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    bias = None

    def _norm(self, x: Tensor, weight: Any, bias: Any, residual: Any, prenorm: bool) -> Any:
        return rms_norm(x, weight, bias, residual, self.eps, weight_offset=self.weight_offset, prenorm=prenorm)


class LayerNorm(_Forward, torch.nn.LayerNorm):
    """Drop-in for `torch.nn.LayerNorm` (`stepgraph.kernels.layer_norm`), which may add a residual first.

    Args as there. Parameters: ``weight``, and ``bias`` unless False. Raises ``ValueError`` as `RMSNorm` does.
    """

    def _norm(self, x: Tensor, weight: Any, bias: Any, residual: Any, prenorm: bool) -> Any:
        return layer_norm(x, weight, bias, residual, self.eps, prenorm=prenorm)
