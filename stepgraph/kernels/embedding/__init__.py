"""The gradient of an embedding's table."""
