"""The providers of ``stepgraph bench norm``: ours, torch, its compiler, and the kernels of other packages.

Each is called as its users call it. Forward runs with gradients on, as in training: it stores what backward needs.
Backward is ``torch.autograd.grad(..., retain_graph=True)`` through the package's own autograd function, for the
gradients of x, weight and (layer norm) bias. Only QuACK's layer norm has no autograd function: its public
``layernorm_fwd`` and ``layernorm_bwd`` are called directly, with the fp32 weights that they ask for. torch.compile gets
``torch.nn.functional`` of static shapes, after a reset for every shape, once by its own rules and once by those of
``stepgraph.inductor``; max-autotune is measured without CUDA graphs of its own, which would copy x.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph import kernels
from stepgraph.inductor import fusion_guard, tuned_reductions

Tensor = torch.Tensor

OPS = ("rms_norm", "layer_norm")

#: Added to the mean square or the variance, by every provider.
EPS = 1e-6


class Provider:
    """One norm with its parameters: a method for each of `OPS` gives y (M, N) of x (M, N). ``weight`` and ``bias`` are
    (N,), no bias for rms_norm."""

    package: str | None = None
    """What must be importable."""
    needs_cuda = False
    overwrites_dy = False
    """Backward writes dx over dy."""

    def __init__(self, op: str, weight: Tensor, bias: Tensor | None = None):
        self.n = weight.numel()
        self.params = [weight] if bias is None else [weight, bias]
        self.weight, self.bias = weight, bias
        self.function = getattr(self, op)

    def forward(self, x: Tensor) -> Tensor:
        """y (M, N) of x (M, N)."""
        return self.function(x)

    def saved(self, x: Tensor) -> Any:
        """What backward needs of a forward: y with its autograd graph."""
        return self.function(x)

    def backward(self, saved: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """(dx, dw) or (dx, dw, db)."""
        return torch.autograd.grad(saved, (x, *self.params), dy, retain_graph=True)


class Ours(Provider):
    """``stepgraph.kernels``."""

    def rms_norm(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, eps=EPS)

    def layer_norm(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, eps=EPS)


class Eager(Provider):
    """``torch.nn.functional``."""

    def rms_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.n,), self.weight, EPS)

    def layer_norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.n,), self.weight, self.bias, EPS)


class Compiled(Eager):
    """``torch.compile`` of eager, only for this shape."""

    how: dict[str, Any] = {}

    def __init__(self, op: str, weight: Tensor, bias: Tensor | None = None):
        super().__init__(op, weight, bias)
        torch.compiler.reset()
        self.function = torch.compile(self.function, dynamic=False, fullgraph=True, **self.how)


class CompiledMaxAutotune(Compiled):
    how = {"mode": "max-autotune-no-cudagraphs"}


class CompiledTuned(Compiled):
    """Under the rules of ``stepgraph.inductor``."""

    @property
    def how(self) -> dict[str, Any]:
        return {"options": (fusion_guard() | tuned_reductions()).options}


class Quack(Provider):
    package, needs_cuda = "quack", True

    def __init__(self, op: str, weight: Tensor, bias: Tensor | None = None):
        super().__init__(op, weight, bias)
        self.direct, self.quack = op == "layer_norm", import_module("quack.rmsnorm")
        if self.direct:
            self.params = [p.detach().float() for p in self.params]

    def rms_norm(self, x: Tensor) -> Tensor:
        return self.quack.rmsnorm(x, self.weight, eps=EPS)

    def layer_norm(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.quack.layernorm_fwd(x.detach(), *self.params, EPS, True, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)[0] if self.direct else self.function(x)

    def backward(self, saved: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        if not self.direct:
            return super().backward(saved, x, dy)
        _, rstd, mean = saved
        return self.quack.layernorm_bwd(x.detach(), self.params[0], dy, rstd, mean)


class Liger(Provider):
    package, needs_cuda = "liger_kernel", True
    overwrites_dy = True  # RMS norm's default; a copy of its own would cost it a pass

    def __init__(self, op: str, weight: Tensor, bias: Tensor | None = None):
        super().__init__(op, weight, bias)
        self.liger = import_module("liger_kernel.transformers.functional")

    def rms_norm(self, x: Tensor) -> Tensor:
        return self.liger.liger_rms_norm(x, self.weight, EPS)

    def layer_norm(self, x: Tensor) -> Tensor:
        return self.liger.liger_layer_norm(x, self.weight, self.bias, EPS)


#: Name -> provider. Those whose package is missing are named in the output.
PROVIDERS: dict[str, type[Provider]] = {
    "ours": Ours,
    "eager": Eager,
    "compile": Compiled,
    "compile-max-autotune": CompiledMaxAutotune,
    "compile-tuned": CompiledTuned,
    "quack": Quack,
    "liger": Liger,
}
