"""Normalization at memory speed: public functions, modules, and operators under ``torch.ops.stepgraph``."""

from stepgraph.kernels.norm.functional import (
    Quantized,
    dequantize,
    layer_norm,
    layer_norm_fp8,
    qk_norm,
    rms_norm,
    rms_norm_fp8,
)
from stepgraph.kernels.norm.modules import LayerNorm, RMSNorm
from stepgraph.kernels.norm.triton.config.tuning import autotune
