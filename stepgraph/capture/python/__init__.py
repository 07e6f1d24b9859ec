"""What Python does in a step beside the tensors: the random numbers it draws, the attributes and hooks that it reads."""
