"""What a step costs: hardware, the roofline of kernels, memory, and the links between ranks."""
