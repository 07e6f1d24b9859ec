"""``x + scale * y`` with a factor that is a tensor, bit for bit as ``torch.add`` with a number.

On a CPU, ``torch.add`` rounds its factor to bf16 for bf16 tensors, and rounds once or twice, depending on where in
memory an element lies. No formula of other operators gives the same bits, so these read the factor and call it.
"""

import torch

torch.library.define("stepgraph::add_scaled", "(Tensor x, Tensor y, Tensor scale) -> Tensor")
torch.library.define("stepgraph::add_scaled_", "(Tensor(a!) x, Tensor y, Tensor scale) -> Tensor(a!)")


def add_scaled(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``torch.add(x, y, alpha=scale.item())``, on a CPU, in a graph: in the dtype of ``x``, floating-point or complex.
    y: of the shape of ``x``, in its dtype or one that promotes to it. scale: (), fp64.
    ``torch.ops.stepgraph.add_scaled_`` writes the result into ``x``."""
    return torch.ops.stepgraph.add_scaled(x, y, scale)


torch.library.impl("stepgraph::add_scaled", "CPU", lambda x, y, scale: torch.add(x, y, alpha=scale.item()))
torch.library.impl("stepgraph::add_scaled_", "CPU", lambda x, y, scale: x.add_(y, alpha=scale.item()))
torch.library.register_fake("stepgraph::add_scaled", lambda x, y, _: torch.add(x, y))
torch.library.register_fake("stepgraph::add_scaled_", lambda x, *_: x)
