"""What Python does in a step beside the tensors: random numbers that it draws, attributes that it reads and writes."""
