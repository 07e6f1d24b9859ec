"""Collectives that run beside compute: by copy engines, or in a pipeline with matrix products."""
