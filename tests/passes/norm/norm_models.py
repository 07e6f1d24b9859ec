"""Norms as people write them, others that only look like norms, and a small model around any of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS = 24, 3


class Around(nn.Module):
    """Two pre-norm blocks, so that sums with the residual stream lie before and after a norm."""

    def __init__(self, norm: Callable[[], nn.Module], n: int = 2):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n))
        self.norms = nn.ModuleList(norm() for _ in range(n))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        for up, norm, down in zip(self.up, self.norms, self.down, strict=True):
            x = x + up(x)
            x = x + down(norm(x))
        return x


class ByFunction(nn.Module):
    """``function(x, weight, bias)`` as a module."""

    def __init__(self, function: Callable, shape: tuple[int, ...] = (WIDTH,)):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)
        self.bias = nn.Parameter(torch.rand(shape) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight, self.bias)


def rms_plain(x, w, b):
    return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-5) * w


def rms_llama(x, w, b):
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_gemma(x, w, b):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)


def rms_divided(x, w, b):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w + b


def rms_of_a_sum(x, w, b):
    return w * x * ((x * x).sum(-1, keepdim=True) / WIDTH + 1e-5).pow(-0.5)


def rms_without_keepdim(x, w, b):
    return torch.rsqrt(x.pow(2).mean(-1) + 1e-5).unsqueeze(-1) * x * w


def rms_without_eps(x, w, b):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def rms_by_normalize(x, w, b):
    return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * w


def rms_by_length(x, w, b):
    """In a wider dtype, and with a weight that is stored as a difference."""
    wide = x.float()
    length = wide.norm(dim=-1, keepdim=True).clamp(min=1e-8)
    return (wide / (length * x.shape[-1] ** -0.5)).to(x.dtype) * (1 + w)


def rms_of_an_exponential_weight(x, w, b):
    return rms_plain(x, w.exp(), b)


def rms_twice(x, w, b):
    """Each output of the first goes into the second."""
    return rms_plain(rms_plain(x, w, b), b, w)


def llama_twice(x, w, b):
    """In bf16 what the first one rounds is what the second one widens."""
    return rms_llama(rms_llama(x, w, b), b, w)


def both_of_one(x, w, b):
    """Two norms of the same rows, whose gradients are added term by term."""
    return torch.tanh(rms_plain(x, w, b)) * rms_plain(x, b, w)


def rms_rounded_before(x, w, b):
    """Of rows that are rounded for it, from a wider stream."""
    return rms_llama(x.bfloat16() if x.dtype == torch.float32 else x, w, b).to(x.dtype)


def rms_gated(x, w, b):
    return rms_plain(x, w, b) * torch.sigmoid(x)


def rms_halved(x, w, b):
    return F.rms_norm(x, x.shape[-1:], w).chunk(2, -1)[0].repeat(1, 1, 2)


def layer_plain(x, w, b):
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b


def layer_by_variance(x, w, b):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * w + b


def layer_by_moments(x, w, b):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * ((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5).rsqrt() * (w + 1)


def layer_in_float(x, w, b):
    return F.layer_norm(x.float(), x.shape[-1:], w.float(), b.float()).type_as(x)


def per_head(x, w, b):
    """A weight (H, N) on rows of heads."""
    heads = x.view(*x.shape[:-1], HEADS, -1)
    return (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5) * w).flatten(-2)


def transposed(x, w, b):
    """Rows of heads that lie in memory as the projection made them."""
    heads = x.view(*x.shape[:-1], HEADS, -1).transpose(1, 2)
    return rms_plain(heads, w, b).transpose(1, 2).reshape(x.shape)


#: Function, weight shape, form in the report, number per use.
WRITTEN: dict[str, tuple[Callable, tuple[int, ...], str, int]] = {
    "plain": (rms_plain, (WIDTH,), "composite rms", 1),
    "llama": (rms_llama, (WIDTH,), "composite rms", 1),
    "gemma": (rms_gemma, (WIDTH,), "composite rms, weight + 1", 1),
    "divided, with bias": (rms_divided, (WIDTH,), "composite rms", 1),
    "of a sum": (rms_of_a_sum, (WIDTH,), "composite rms", 1),
    "without keepdim": (rms_without_keepdim, (WIDTH,), "composite rms", 1),
    "without eps": (rms_without_eps, (WIDTH,), "composite rms", 1),
    "normalize": (rms_by_normalize, (WIDTH,), "composite rms", 1),
    "length": (rms_by_length, (WIDTH,), "composite rms, weight + 1", 1),
    "exponential weight": (rms_of_an_exponential_weight, (WIDTH,), "composite rms", 1),
    "twice": (rms_twice, (WIDTH,), "composite rms", 2),
    "llama twice": (llama_twice, (WIDTH,), "composite rms", 2),
    "both of one": (both_of_one, (WIDTH,), "composite rms", 2),
    "gated": (rms_gated, (WIDTH,), "composite rms", 1),
    "halved": (rms_halved, (WIDTH,), "composite rms", 1),
    "layer": (layer_plain, (WIDTH,), "composite layer norm", 1),
    "layer by variance": (layer_by_variance, (WIDTH,), "composite layer norm", 1),
    "layer by moments": (layer_by_moments, (WIDTH,), "composite layer norm, weight + 1", 1),
    "layer in float": (layer_in_float, (WIDTH,), "fused layer norm", 1),
    "per head": (per_head, (HEADS, WIDTH // HEADS), "composite rms", 1),
    "transposed": (transposed, (WIDTH // HEADS,), "composite rms", 1),
}


def over_tokens(x, w, b):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * w


def eps_outside(x, w, b):
    return x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-5) * w


def unbiased(x, w, b):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * w + b


def not_centered(x, w, b):
    return x * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * w


def half_of_the_row(x, w, b):
    return x * torch.rsqrt(x[..., : WIDTH // 2].pow(2).mean(-1, keepdim=True) + 1e-5) * w


def no_gradient_through_the_statistics(x, w, b):
    return x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + 1e-5) * w


def statistics_read(x, w, b):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * rstd * w + rstd.log()


def before_the_weight_read(x, w, b):
    xhat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return xhat * w + torch.tanh(xhat)


def fourth_power(x, w, b):
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5) * w


def clamped_far_from_zero(x, w, b):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=0.5) * x.shape[-1] ** 0.5 * w


def length_by_absolute_values(x, w, b):
    return F.normalize(x, p=1, dim=-1) * x.shape[-1] ** 0.5 * w


def masked_by_the_length(x, w, b):
    length = x.norm(dim=-1, keepdim=True)
    return torch.where(length >= 5.0, x / length * x.shape[-1] ** 0.5, 0.0) * w


def unit_length(x, w, b):
    return F.normalize(x, dim=-1) * w


def sum_of_squares(x, w, b):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5) * w


DECOYS = (
    over_tokens, eps_outside, unbiased, not_centered, half_of_the_row, no_gradient_through_the_statistics,
    statistics_read, before_the_weight_read, fourth_power, sum_of_squares, clamped_far_from_zero,
    length_by_absolute_values, masked_by_the_length, unit_length,
)  # fmt: skip


def hugging_face(name: str, **options: Any) -> nn.Module:
    """A tiny causal model of the ``transformers`` library with weights that are not near their initial values."""
    import transformers

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, vocab_size=37, max_position_embeddings=16, **options)  # fmt: skip
    config = getattr(transformers, name + ("TextConfig" if name == "Gemma3" else "Config"))(**sizes)
    model = getattr(transformers, name + "ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model
