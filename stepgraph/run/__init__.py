"""Execution: a step program bound to live tensors, node by node, compiled, or as CUDA graphs."""
