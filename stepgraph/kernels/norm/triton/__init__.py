"""Triton kernels of the norms: forward, backward, their configurations, and how they are launched."""
