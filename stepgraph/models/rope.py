"""Rotary position embedding in the rotate-half layout of the Hugging Face checkpoints.

Pair ``i`` of a head is (element ``i``, element ``i + head_dim / 2``), rotated by ``position * frequency[i]``. Meta's
own checkpoints pair neighbours instead, and permute ``q_proj`` and ``k_proj`` to match. With rotate-half, Hugging Face
weights load by renaming alone.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.4.
"""

import math
from dataclasses import dataclass

import torch

from stepgraph.models.checks import check_positive


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches RoPE to sequences longer than it was pre-trained on.

    Source: Llama 3.1 model code (``apply_scaling``) and "The Llama 3 Herd of Models", 2024, section 3.4.2.
    """

    factor: float  # low frequencies are divided by this: 8 for Llama 3.1, 32 for Llama 3.2
    low_freq_factor: float = 1.0  # wavelengths above original_max_seq_len / low_freq_factor are stretched fully
    high_freq_factor: float = 4.0  # wavelengths below original_max_seq_len / high_freq_factor stay as they are
    original_max_seq_len: int = 8192  # sequence length of the pre-training before the stretch

    def __post_init__(self) -> None:
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} is not above low_freq_factor={self.low_freq_factor}; "
                "Llama 3.1 uses 4 and 1"
            )


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Angle per position of each rotated pair: (head_dim / 2,) fp32, radians, on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequency = 1.0 / theta**exponent
    if scaling is None:
        return frequency
    # Turns of a pair within the original context: at high_freq_factor and above keep it, at low_freq_factor and below
    # divide it by factor, between the two blend linearly.
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequency + (1.0 - keep) * frequency / scaling.factor


def rope_tables(
    max_seq_len: int, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for :func:`apply_rope`: cos and signed sin, each (max_seq_len, 1, head_dim) fp32 on the CPU.

    Both halves of a row hold the same angles; in the sin table the first half is negated, which turns the rotation's
    ``cat(-b, a) * sin`` into ``cat(b, a) * signed_sin`` and saves a pass over memory. Always computed on the CPU: a
    difference in the last bit of another device's frequencies would grow with the position.
    """
    position = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
    angle = torch.outer(position, rope_frequencies(head_dim, theta, scaling))  # (max_seq_len, head_dim / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the heads of ``x`` (B, T, H, head_dim) by the tables' rows of its T positions, each (T, 1, head_dim).

    Computes in the wider of the two dtypes and returns ``x.dtype``.
    """
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((b, a), dim=-1) * signed_sin).to(x.dtype)
