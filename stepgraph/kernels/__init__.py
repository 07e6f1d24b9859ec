"""Normalization at memory speed: public functions, modules, and operators under ``torch.ops.stepgraph``."""

from stepgraph.kernels.norm.functional import layer_norm, qk_norm, rms_norm
from stepgraph.kernels.norm.modules import LayerNorm, RMSNorm
