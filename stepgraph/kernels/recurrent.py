"""A recurrent layer on a CPU as training runs it, in a graph that runs without gradient mode.

torch computes ``nn.LSTM`` on a CPU with oneDNN, whose backward reads a workspace that forward wrote. Forward writes it
if gradient mode is on, whatever its arguments say, and rounds otherwise than with gradient mode off on some processors.
A captured step, whose backward is part of the graph, runs with gradient mode off.
"""

import functools
from typing import Any

import torch

from stepgraph import compat

aten = torch.ops.aten


@torch.library.custom_op("stepgraph::rnn_layer", mutates_args=())
def rnn_layer(
    input: torch.Tensor,
    weights: list[torch.Tensor],
    hx: torch.Tensor,
    cx: torch.Tensor,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``aten.mkldnn_rnn_layer`` with gradient mode on: (output, hy, cy, workspace), the workspace as bytes (N,)."""
    options = (reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train)
    with torch.enable_grad(), compat.below_autograd():
        return aten.mkldnn_rnn_layer.default(input, *weights, hx, cx, *options)


@rnn_layer.register_fake
def _(input, weights, hx, cx, *options):
    output, hy, cy, _ = aten.mkldnn_rnn_layer.default(input, *weights, hx, cx, *options)
    return output, hy, cy, input.new_empty(workspace_size(input, weights, hx, cx, *options), dtype=torch.uint8)


def workspace_size(x: torch.Tensor, weights: list[torch.Tensor], hx: torch.Tensor, cx: torch.Tensor, *rest: Any) -> int:
    """Bytes of the workspace. oneDNN alone knows them: the layer runs once for each form, on zeros."""
    reverse, batch_sizes, *options = rest
    forms = tuple((tuple(t.shape), t.stride(), t.dtype) for t in (x, *weights, hx, cx))
    return _workspace_size(forms, reverse, tuple(batch_sizes), *options)


@functools.lru_cache(maxsize=64)
def _workspace_size(forms: tuple, reverse: bool, batch_sizes: tuple[int, ...], *options: Any) -> int:
    with compat.without_modes():
        input, *weights, hx, cx = (torch.empty_strided(*form[:2], dtype=form[2]).zero_() for form in forms)
        return rnn_layer(input, weights, hx, cx, reverse, list(batch_sizes), *options)[3].numel()
