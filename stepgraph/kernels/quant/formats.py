"""Sizes of the 4-bit format, shared by the reference and the kernel."""

#: Values that share a scale, and scales that share one of their own.
BLOCK, NESTED_BLOCK = 64, 256
