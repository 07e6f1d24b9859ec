"""What a step costs: hardware, seconds of kernels and of collectives, memory. Passes and the forecast both read it."""
