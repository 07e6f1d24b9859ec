"""Linear layers in fp8 in plain eager PyTorch, module by module: what the pass must equal bit for bit."""

import torch
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantized(x, recipe, dtype=E4M3):
    """(values, scale) of a matrix whose rows a product sums over, both fp32."""
    most = torch.tensor(torch.finfo(dtype).max, device=x.device)
    wide = x.float()
    top = wide.abs().amax() if recipe == "tensorwise" else wide.abs().amax(1, keepdim=True)
    top = top.clamp_min(2.0**-100)
    return (wide * (most / top)).clamp(-most, most).to(dtype).float(), top / most


def product(a, b, bias=None):
    """``a b^T`` of two quantized matrices, in bf16."""
    (a, scale_a), (b, scale_b) = a, b
    y = a @ b.t() * scale_a * scale_b.squeeze()
    return (y if bias is None else y + bias.float()).bfloat16()


class Linear(torch.autograd.Function):
    """``x w^T + bias`` of bf16 matrices."""

    @staticmethod
    def forward(ctx, x, weight, bias, recipe):
        ctx.recipe = recipe
        ctx.save_for_backward(x, weight)
        return product(quantized(x, recipe), quantized(weight, recipe), bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        recipe, dtype = ctx.recipe, E5M2 if ctx.recipe == "tensorwise" else E4M3
        dx = product(quantized(dy, recipe, dtype), quantized(weight.t(), recipe))
        if recipe.endswith("bf16-weight-gradients"):
            dw = dy.t() @ x
        else:
            dw = product(quantized(dy.t(), recipe, dtype), quantized(x.t(), recipe))
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None


class Fp8Linear(nn.Module):
    """In the place of ``nn.Linear`` or of transformers' ``Conv1D``, with the same parameters."""

    def __init__(self, linear, recipe):
        super().__init__()
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe
        self.transposed = not isinstance(linear, nn.Linear)

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            bias = None if self.bias is None else self.bias.bfloat16()
            x, weight = x.bfloat16(), self.weight.bfloat16()
        else:
            weight, bias = self.weight, self.bias
        with torch.autocast("cpu", enabled=False):
            weight = weight.t() if self.transposed else weight
            return Linear.apply(x.flatten(0, -2), weight, bias, self.recipe).view(*x.shape[:-1], -1)


def swap(model, recipe, keep=()):
    """Put `Fp8Linear` in the place of every linear layer of ``model`` but those named ``keep``."""
    for name, module in list(model.named_modules()):
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and name not in keep:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Fp8Linear(module, recipe))
    return model
