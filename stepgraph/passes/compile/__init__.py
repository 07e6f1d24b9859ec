"""Passes that hand the graph to Inductor and to CUDA graphs."""
