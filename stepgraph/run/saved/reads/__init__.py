"""What a capture reads, as text: of Python objects, of the functions that run, and of what is around."""
