"""``stepgraph bench norm``."""
