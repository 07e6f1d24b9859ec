"""Python's part of a step besides tensors: random numbers it draws, attributes it reads and writes."""
