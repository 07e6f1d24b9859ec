"""Mixtures of experts: the kernels of `stepgraph.kernels.moe` in models that were written without them."""
