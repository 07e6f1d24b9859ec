"""Rotary position embedding.

Pair ``i`` of a head is rotated by ``position * frequency[i]``. Models differ in which elements make a pair: (``i``,
``i + head_dim / 2``) in Hugging Face's Llama and Qwen, whose weights load by renaming only, and the neighbours
(``2 i``, ``2 i + 1``) in DeepSeek's.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.4.
"""

import math
from dataclasses import dataclass

import torch

from stepgraph.models.family import check_positive


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches RoPE to sequences longer than it was pre-trained on.

    Source: Llama 3.1 model code (``apply_scaling``) and "The Llama 3 Herd of Models", 2024, section 3.4.2.
    """

    factor: float  # low frequencies are divided by this: 8 for Llama 3.1, 32 for Llama 3.2
    low_freq_factor: float = 1.0  # wavelengths above original_max_seq_len / low_freq_factor are stretched fully
    high_freq_factor: float = 4.0  # wavelengths below original_max_seq_len / high_freq_factor are left unchanged
    original_max_seq_len: int = 8192  # sequence length of the pre-training before the stretch

    table_scale = 1.0  # of cos and sin

    def __post_init__(self) -> None:
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} is not above low_freq_factor={self.low_freq_factor}; "
                "Llama 3.1 uses 4 and 1"
            )

    def kept(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
        """How much of each frequency is left unchanged, in [0, 1]; the rest is divided by ``factor``."""
        # Turns of a pair within the original context: at high_freq_factor and above keep it, at low_freq_factor and
        # below divide it by factor, between the two blend linearly.
        turns = self.original_max_seq_len * frequency / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return keep.clamp(0.0, 1.0)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: the same idea with a ramp over the pairs, and a temperature of the attention scores.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023, sections 3.2 to 3.4;
    DeepSeek-V2's and V3's model code for the two ``mscale`` and the rounding of the ramp's ends.
    """

    factor: float  # low frequencies are divided by this
    original_max_seq_len: int = 4096  # sequence length of the pre-training before the stretch
    beta_fast: float = 32.0  # pairs with more turns than this in the original length are left unchanged
    beta_slow: float = 1.0  # pairs with fewer turns than this are stretched fully
    mscale: float = 1.0  # with mscale_all_dim: cos and sin are scaled by the ratio of the two temperatures
    mscale_all_dim: float = 1.0  # attention scores are scaled by the square of this one's temperature; 0: they are not

    def __post_init__(self) -> None:
        check_positive(self, "factor", "original_max_seq_len", "beta_fast", "beta_slow", "mscale")
        if not self.mscale_all_dim >= 0:
            raise ValueError(f"mscale_all_dim={self.mscale_all_dim} is negative; use 0 to leave scores as they are")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} is not above beta_slow={self.beta_slow}; YaRN uses 32 and 1")

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def table_scale(self) -> float:
        """The factor of cos and sin."""
        return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """The factor of the attention scores' scale."""
        return self._temperature(self.mscale_all_dim) ** 2

    def kept(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
        """How much of each frequency is left unchanged, in [0, 1]; the rest is divided by ``factor``."""
        pairs = frequency.numel()

        def pair(turns: float) -> float:
            """The (fractional) pair that makes ``turns`` turns in the original length."""
            return pairs * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), 2 * pairs - 1)
        ramp = (torch.arange(pairs, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
        return 1.0 - ramp.clamp(0.0, 1.0)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | YarnScaling | None) -> torch.Tensor:
    """Angle per position of each rotated pair: (head_dim / 2,) fp32, radians, on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequency = 1.0 / theta**exponent
    if scaling is None:
        return frequency
    keep = scaling.kept(frequency, theta)
    return keep * frequency + (1.0 - keep) * frequency / scaling.factor


def rope_tables(
    max_seq_len: int, head_dim: int, theta: float, scaling: RopeScaling | YarnScaling | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for :func:`apply_rope`: cos and signed sin, each (max_seq_len, 1, head_dim) fp32 on the CPU.

    Both halves of a row hold the same angles; in the sin table the first half is negated, which turns the rotation's
    ``cat(-b, a) * sin`` into ``cat(b, a) * signed_sin`` and saves a pass over memory. Always computed on the CPU: a
    difference in the last bit of another device's frequencies would grow with the position.
    """
    position = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
    angle = torch.outer(position, rope_frequencies(head_dim, theta, scaling))  # (max_seq_len, head_dim / 2)
    scale = 1.0 if scaling is None else scaling.table_scale
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the heads of ``x`` (B, T, H, head_dim) by the tables' rows of its T positions, each (T, 1, head_dim).

    Computes in the wider of the two dtypes and returns ``x.dtype``.
    """
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((b, a), dim=-1) * signed_sin).to(x.dtype)


def apply_rope_interleaved(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """The same where neighbours are pairs. The result has the first of all pairs in front, then the second: the same
    order in queries and keys, whose products it so leaves as they are."""
    half = x.shape[-1] // 2
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], cos[..., :half], signed_sin[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
