"""Sizes of the 4-bit format: what the reference and the kernel agree on."""

#: Values that share a scale, and scales that share one of their own.
BLOCK, NESTED_BLOCK = 64, 256
