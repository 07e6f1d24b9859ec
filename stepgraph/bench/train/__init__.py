"""``stepgraph bench train``."""
