"""Collectives that overlap with compute: by copy engines, or interleaved with matrix products."""
