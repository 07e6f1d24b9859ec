"""Hand-written models that belong to no library: a GPT-2 with a fused projection, a diffusion
transformer. As those of ``transformers``, ``model(**batch)`` gives an output with ``loss``, an fp32 scalar."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Output(NamedTuple):
    """What a forward pass gives."""

    loss: torch.Tensor


class Attention(nn.Module):
    """Self-attention with one product for q, k and v, all with bias. (B, T, D) to (B, T, D)."""

    def __init__(self, hidden: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D), in the dtype of ``x``."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp(hidden: int, approximate: str = "none") -> nn.Sequential:
    """Two linear layers with bias, GELU between them, four times as wide inside."""
    return nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(approximate), nn.Linear(4 * hidden, hidden))


class GPTBlock(nn.Module):
    """Attention and MLP, each after a LayerNorm with bias and added to the residual."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads, causal=True)
        self.norm2, self.mlp = nn.LayerNorm(hidden), mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D), in the dtype of ``x``."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    """GPT-2 in the style of nanoGPT: learned positions, pre-norm, a head that shares the embedding's weight and a loss
    in fp32. Source: Radford et al., 2019; the layout of github.com/karpathy/nanoGPT."""

    def __init__(self, vocab_size: int, context: int, hidden: int, layers: int, heads: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.apply(_normal)
        for name, weight in self.named_parameters():  # 2 additions to the residual per layer
            if name.endswith(("out.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.tokens.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> Output:
        """``idx``, ``targets``: int64 (B, T), the targets already shifted by one."""
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return Output(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class DiTBlock(nn.Module):
    """Attention and MLP, whose norms are shifted and scaled, and whose results are gated, by the condition."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.attention, self.mlp = Attention(hidden, heads, causal=False), mlp(hidden, "tanh")
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """``x``: (B, T, D); ``c``: (B, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer over latents, conditioned by adaLN; it predicts the noise, with a mean squared error in
    fp32. The gates start small instead of at zero, so that the first gradients reach every weight.
    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023."""

    def __init__(self, side: int, channels: int, patch: int, classes: int, hidden: int, layers: int, heads: int):
        super().__init__()
        self.patch, self.frequencies = patch, 256
        self.patches = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.times = nn.Sequential(nn.Linear(self.frequencies, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.classes = nn.Embedding(classes + 1, hidden)  # the last: no class
        self.blocks = nn.ModuleList(DiTBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, eps=1e-6, elementwise_affine=False)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        self.head = nn.Linear(hidden, patch * patch * channels)
        self.apply(_normal)
        self.register_buffer("positions", sinusoids(torch.arange((side // patch) ** 2), hidden))

    def forward(self, latents: torch.Tensor, noise: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> Output:
        """``latents``, ``noise``: (B, C, S, S); ``t``: fp32 (B,) in [0, 1), the share of noise; ``labels``: int64."""
        angle = (math.pi / 2 * t)[:, None, None, None]
        noisy = (angle.cos() * latents + angle.sin() * noise).to(latents.dtype)
        x = self.patches(noisy)
        height, width = x.shape[2:]
        x = x.flatten(2).transpose(1, 2) + self.positions
        c = self.times(sinusoids(1000 * t, self.frequencies).to(x.dtype)) + self.classes(labels)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.condition(c).unsqueeze(1).chunk(2, dim=-1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        x = x.view(-1, height, width, self.patch, self.patch, latents.shape[1]).permute(0, 5, 1, 3, 2, 4)
        return Output(F.mse_loss(x.reshape(noise.shape).float(), noise.float()))


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Cosines and sines of ``positions`` (N,) at ``width`` / 2 frequencies from 1 to 1 / 10,000: fp32 (N, width)."""
    exponents = torch.arange(width // 2, device=positions.device) / (width // 2)
    angles = positions.float()[:, None] * torch.exp(-math.log(10_000) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
