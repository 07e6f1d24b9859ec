"""What Python does in a step apart from tensors: random numbers that it draws, attributes that it reads and writes."""
