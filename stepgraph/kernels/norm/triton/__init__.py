"""The Triton kernels of norms, and how they are configured and launched."""
