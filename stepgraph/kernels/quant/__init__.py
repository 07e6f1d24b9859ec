"""Frozen weights in fewer bits: bitsandbytes' NF4, fp8, and linear layers and experts that use them."""

from stepgraph.kernels.quant.experts import quantize_experts
from stepgraph.kernels.quant.linear import KINDS, Fp8Linear, Nf4Linear, QuantizedLinear, quantize_linear
from stepgraph.kernels.quant.nf4 import Quantized, dequantize_4bit, quantize
from stepgraph.kernels.quant.weight import QuantizedWeight
