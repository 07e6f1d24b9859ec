"""Attention: the kernels that run it, and masks that the graph itself determines."""
