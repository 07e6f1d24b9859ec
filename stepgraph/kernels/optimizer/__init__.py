"""Operators of the optimizer's update."""

from stepgraph.kernels.optimizer.add_scaled import add_scaled
