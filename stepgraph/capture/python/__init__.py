"""What Python does in a step besides tensors: random numbers that it draws, attributes that it reads and writes."""
